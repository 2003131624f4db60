"""Rows of the engine as fresh tensors, under the keys that TorchRL knows.

Knows torch, the codec of the spaces and the engine's rows. Does not know EnvBase.

Everything returned here is new memory: the rows change with the next step, and what
a caller has belongs to him.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from_numpy = torch.from_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.engine import Engine
    from shoal.torchrl.specs import SpaceCodec

__all__ = ["Tables"]

Tensors = dict[str, Any]
Array = np.ndarray[Any, Any]


class Tables:
    """Tensor views of one engine's rows, made once, and the copies taken from them."""

    def __init__(self, engine: Engine, codec: SpaceCodec) -> None:
        rows = engine.rows
        self._gather = engine.gatherer
        self._codec = codec
        self._num_envs = engine.num_envs
        self._size = torch.Size([engine.num_envs])
        # With the trailing dimension that TorchRL gives to rewards and flags. Small copies
        # are made by numpy, which takes a third of the time that torch takes.
        self._reward = rows.reward.reshape(-1, 1)
        self._terminated = rows.terminated.reshape(-1, 1)
        self._truncated = rows.truncated.reshape(-1, 1)
        self._leaves = {
            path: (array, rows.reset_observation[path]) for path, array in rows.observation.items()
        }
        self._infos = {path: (array, rows.reset_info[path]) for path, array in rows.info.items()}
        flat = codec.observation_is_identity and not codec.object_observations
        # The common case: a few tensors, each under a name of its own.
        self.plain: list[tuple[str, Array, Array]] | None = None
        if flat and all(isinstance(key, str) for key, _ in codec.identity_observations):
            self.plain = [
                (str(key), *self._leaves[path]) for key, path in codec.identity_observations
            ]
            for path, pair in self._infos.items():
                if len(path) != 1:
                    self.plain = None
                    break
                self.plain.append((path[0], *pair))

    @property
    def fresh_rows(self) -> Array | None:
        """Bool ``[N]``: whose present observation is that of a reset; ``None`` for nobody."""
        return self._gather.is_fresh if self._gather.any_fresh else None

    # --- what a step returned ------------------------------------------------------

    def stepped(self) -> Tensors:
        """Returns the tensors of ``next``: the last step, terminal observations included."""
        if self.plain is not None:
            found: Tensors = {key: from_numpy(rows.copy()) for key, rows, _ in self.plain}
        else:
            leaves = {path: from_numpy(pair[0].copy()) for path, pair in self._leaves.items()}
            found = self._decode(leaves, 0)
            for path, pair in self._infos.items():
                put(found, path, from_numpy(pair[0].copy()), self._size)
        found["reward"] = from_numpy(self._reward.astype(np.float32))
        found["done"] = from_numpy(self._terminated | self._truncated)
        found["terminated"] = from_numpy(self._terminated.copy())
        found["truncated"] = from_numpy(self._truncated.copy())
        return found

    def present(self, *, none_at_end: bool = False) -> Tensors:
        """Returns the tensors of the root: what to act on now, with its done flags.

        Args:
            none_at_end: the caller knows that no row is at the end of an episode.
        """
        fresh = self._gather.is_fresh
        newer = np.flatnonzero(fresh) if self._gather.any_fresh else None
        if self.plain is not None:
            found: Tensors = {key: mixed(pair, newer) for key, *pair in self.plain}
        else:
            leaves = {path: mixed(pair, newer) for path, pair in self._leaves.items()}
            found = self._decode(leaves, None)
            for path, pair in self._infos.items():
                put(found, path, mixed(pair, newer), self._size)
        flags = self._terminated, self._truncated
        if not none_at_end and (flags[0] | flags[1])[~fresh].any():
            old = ~fresh.reshape(-1, 1)
            found["done"] = from_numpy((flags[0] | flags[1]) & old)
            found["terminated"] = from_numpy(flags[0] & old)
            found["truncated"] = from_numpy(flags[1] & old)
            return found
        for name in ("done", "terminated", "truncated"):
            found[name] = from_numpy(np.zeros((self._num_envs, 1), np.bool_))
        return found

    # --- other than tensors --------------------------------------------------------

    def _decode(self, leaves: dict[Any, Any], which: int | None) -> Tensors:
        """Returns an observation from its leaves; ``which`` set of rows, or the mixture."""
        for path in self._gather.observation_objects:
            rows = self._gather.rows_of(path)
            if which is None:
                values = np.where(self._gather.is_fresh, rows[1], rows[0])
            else:
                values = rows[which]
            leaves[path] = list(values)
        found: Tensors = {}
        objects = set(self._codec.object_observations)
        for key, value in self._codec.decode_observation(leaves).items():
            stored = as_non_tensor(value) if key in objects else value
            put(found, (key,) if isinstance(key, str) else key, stored, self._size)
        return found

    def infos(self, which: int) -> list[dict[str, Any]]:
        """Returns whole info dicts: of the last steps (0) or resets (1), one per env."""
        return self._gather.infos if which == 0 else self._gather.reset_infos


def as_non_tensor(values: list[Any]) -> NonTensorStack:
    """Returns one Python object per env as TorchRL carries them."""
    return NonTensorStack(*[NonTensorData(value) for value in values])


def mixed(pair: Sequence[Array], newer: Array | None) -> torch.Tensor:
    """Returns rows of the last step, or of the last reset for the ids in ``newer``."""
    stepped, reset = pair
    if newer is not None and len(newer) == len(stepped):
        return from_numpy(reset.copy())
    present = stepped.copy()
    if newer is not None:
        # In numpy: torch cannot index its unsigned dtypes.
        present[newer] = reset[newer]
    return from_numpy(present)


def put(found: Tensors, path: tuple[str, ...], value: Any, size: torch.Size) -> None:
    """Puts a value at a nested place, making TensorDicts on the way."""
    *parents, last = path
    inner: Any = found
    for name in parents:
        if name not in inner:
            child = TensorDict({}, batch_size=size)
            inner[name] = child
        inner = inner[name]
    inner[last] = value
