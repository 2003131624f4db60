"""What the parity tests share: ways to open a batched env, and small helpers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from shoal import ParallelEnv, SerialEnv

# A fork of this process has torch already: envs of TorchRL are up in a moment. The fresh
# interpreter that is the default takes seconds to import it, and is used where it matters.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "serial": (SerialEnv, {}),
    "parallel": (ParallelEnv, {"mp_start_method": "fork", "num_processes": 2}),
}
BOTH = list(KINDS)


def open_batched(kind: str, num_workers: int, maker: Any, **options: Any) -> Any:
    """Returns a batched env, not yet started."""
    cls, more = KINDS[kind]
    return cls(num_workers, maker, **{**more, **options})


def acting(env: Any, *actions: float, **more: Any) -> TensorDict:
    """Returns a tensordict with one action per env, the same in all its numbers."""
    shape = env.full_action_spec["action"].shape
    rows = torch.tensor(actions, dtype=torch.float32)
    if len(rows) == 1:
        rows = rows.expand(shape[0])
    action = rows.reshape(-1, *[1] * (len(shape) - 1)).expand(shape).clone()
    return TensorDict({"action": action, **more}, batch_size=env.batch_size)


def column(data: Any, key: Any = "observation") -> list[Any]:
    """Returns the first number of each row."""
    value = data.get(key)
    return value.reshape(value.shape[0], -1)[:, 0].tolist()  # type: ignore[no-any-return]


def mask(*rows: bool) -> torch.Tensor:
    return torch.tensor(rows).unsqueeze(-1)


def diary_of(path: Any) -> list[tuple[str, int]]:
    """Returns what envs have noted: what happened, and in which process."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [(line.split()[0], int(line.split()[1])) for line in lines]
