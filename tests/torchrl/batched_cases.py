"""What the tests of the batched envs share: ways to run them, envs, and comparisons."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDictBase, is_tensor_collection
from torchrl.envs import GymEnv
from torchrl.envs import SerialEnv as TorchRLSerialEnv

from shoal.torchrl import ParallelEnv, SerialEnv

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 7

# The ways in which the engine runs envs. In the last one the calling thread steps some of
# them itself.
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "serial": (SerialEnv, {}),
    "2 processes": (ParallelEnv, {"num_processes": 2}),
    "caller steps": (ParallelEnv, {"caller_steps": True}),
}


def open_env(way: str, num_envs: int, maker: Any, **options: Any) -> Any:
    kind, more = WAYS.get(way, (ParallelEnv, {"num_processes": 1}))
    return kind(num_envs, maker, **{**more, **options})


def open_reference(num_envs: int, env_id: str, **kwargs: Any) -> Any:
    """Returns TorchRL's own serial env over the same envs."""
    kwargs.setdefault("categorical_action_encoding", True)
    return TorchRLSerialEnv(num_envs, functools.partial(GymEnv, env_id, **kwargs))


# --- comparisons ---------------------------------------------------------------------


def leaves_of(data: TensorDictBase, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Returns tensors, and lists for everything else, by path."""
    found: dict[tuple[str, ...], Any] = {}
    for key in data.keys():  # noqa: SIM118
        value = data.get(key)
        if isinstance(value, torch.Tensor):
            found[*path, key] = value
        elif is_tensor_collection(value) and not _is_non_tensor(value):
            found.update(leaves_of(value, (*path, key)))
        else:
            found[*path, key] = value.tolist()
    return found


def _is_non_tensor(value: Any) -> bool:
    from tensordict.base import is_non_tensor

    return isinstance(value, NonTensorStack) or bool(is_non_tensor(value))


def assert_same(actual: Any, expected: Any, what: str = "") -> None:
    """Checks that two results agree in every bit, and in what they say about themselves."""
    if not isinstance(expected, TensorDictBase):
        assert actual == expected, what
        return
    assert actual.batch_size == expected.batch_size, what
    assert actual.device == expected.device, what
    assert actual.names == expected.names, what
    left, right = leaves_of(actual), leaves_of(expected)
    assert left.keys() == right.keys(), what
    for path, wanted in right.items():
        where = f"{what} {'/'.join(path)}"
        value = left[path]
        if not isinstance(wanted, torch.Tensor):
            assert same_objects(value, wanted), where
            continue
        assert value.dtype == wanted.dtype, where
        assert value.shape == wanted.shape, where
        assert value.device == wanted.device, where
        same = (value == wanted) | ((value != value) & (wanted != wanted))
        assert bool(same.all()), where


def same_objects(left: Any, right: Any) -> bool:
    """Returns whether two Python objects of any nesting hold the same."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            np.asarray(left).dtype == np.asarray(right).dtype
            and np.shape(left) == np.shape(right)
            and np.array_equal(left, right)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_objects(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_objects, left, right))
    return bool(left == right)


class Log:
    """What a script got, and copies of it from that very moment."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any, Any]] = []

    def add(self, what: str, value: Any) -> Any:
        is_data = isinstance(value, TensorDictBase)
        # Shallow: the script may add entries of its own, but the tensors are the env's.
        kept, copied = (value.copy(), value.clone()) if is_data else (value, value)
        self.entries.append((f"{len(self.entries)} {what}", kept, copied))
        return value

    def assert_untouched(self) -> None:
        """Checks that nothing that was returned has changed since, or is shared."""
        for what, value, copied in self.entries:
            if isinstance(value, TensorDictBase):
                assert_same(value, copied, what)
                assert not value.is_shared(), what


def play(env: Any, script: Callable[[Any, Log], None]) -> Log:
    log = Log()
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    try:
        script(env, log)
    finally:
        env.close(raise_if_closed=False)
    return log


def play_reference(env: Any, script: Callable[[Any, Log], None]) -> Log:
    """Plays a script with an env of TorchRL's, and lets go of everything of that env."""
    log = play(env, script)
    log.entries = [(what, None, copied) for what, _, copied in log.entries]
    return log


def assert_same_logs(actual: Log, expected: Log) -> None:
    assert len(actual.entries) == len(expected.entries)
    for (what, _, copied), (_, _, wanted) in zip(actual.entries, expected.entries, strict=True):
        assert_same(copied, wanted, what)
    actual.assert_untouched()
