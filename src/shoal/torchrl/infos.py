"""Entries of info dicts as observations, through TorchRL's readers.

Knows ``torchrl.envs``' readers and the factory of one env. Does not know the engine.

A reader that names its keys and specs becomes numeric leaves, which travel through
shared memory like observations. Any other reader is called here, on whole info dicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs.gym_like import BaseInfoDictReader, default_info_dict_reader

from shoal.engine.spec import ArraySpec
from shoal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl.data import TensorSpec

    from shoal.adapters.gymnasium import GymnasiumEnv
    from shoal.engine.spec import LeafPath
    from shoal.torchrl.tables import Tables

__all__ = ["InfoReaders"]


class InfoReaders:
    """The readers of one batched env.

    Attributes:
        leaves: entries that travel as numeric leaves.
        specs: the spec of every entry, of one env.
    """

    def __init__(self) -> None:
        self.leaves: dict[LeafPath, ArraySpec] = {}
        self.specs: dict[str, TensorSpec] = {}
        self._called: list[Any] = []

    @property
    def needs_dicts(self) -> bool:
        """Whether whole info dicts have to travel."""
        return bool(self._called)

    def add(self, reader: Any, build_env: Callable[[], GymnasiumEnv]) -> None:
        """Adds a reader; one that does not know its specs learns them from an env.

        Raises:
            UsageError: the reader has no specs, and learns none.
        """
        if reader is None:
            reader = default_info_dict_reader()
        if isinstance(reader, default_info_dict_reader) and reader.info_spec is None:
            _learn(reader, build_env)
        spec = reader.info_spec if isinstance(reader, BaseInfoDictReader) else None
        if spec is None:
            raise UsageError(
                f"{type(reader).__name__} has no info_spec; derive it from"
                " torchrl.envs.gym_like.BaseInfoDictReader, so that the specs are known"
            )
        self.specs.update(spec.items())
        leaves = _leaves_of(reader, spec)
        if leaves is None:
            self._called.append(reader)
        else:
            self.leaves.update(leaves)

    def read(self, tensordict: Any, tables: Tables, which: int) -> Any:
        """Returns the tensordict with the entries of the readers that are called."""
        if not self._called:
            return tensordict
        rows = []
        for row, info in zip(tensordict.unbind(0), tables.infos(which), strict=True):
            for reader in self._called:
                found = reader(dict(info), row)
                row = row if found is None else found
            rows.append(row)
        return lazy_stack(rows, 0).contiguous()


def _leaves_of(reader: Any, spec: Any) -> dict[LeafPath, ArraySpec] | None:
    """Returns numeric leaves that say the same as the reader, if there are such."""
    if type(reader) is not default_info_dict_reader:
        return None
    leaves: dict[LeafPath, ArraySpec] = {}
    for key in reader.keys:
        leaf: Any = spec[key] if key in spec.keys() else None  # noqa: SIM118, it has no `in`
        dtype = getattr(leaf, "dtype", None)
        if not isinstance(key, str) or dtype is None or any(n < 0 for n in leaf.shape):
            return None
        leaves[(key,)] = ArraySpec(tuple(leaf.shape), torch.empty(0, dtype=dtype).numpy().dtype)
    return leaves


def _learn(reader: Any, build_env: Callable[[], GymnasiumEnv]) -> None:
    """Shows the reader one reset and one step of an env, as ``GymEnv`` does."""
    env = build_env()
    try:
        env.reset()
        action = env.action_space.sample()
        info = env.step(action)[4]
        reader.reset()
        reader(_numbers_of(info), TensorDict({}))
    finally:
        env.close()


def _numbers_of(info: dict[str, Any]) -> dict[str, Any]:
    """Returns the entries that are numbers or arrays of them, as arrays."""
    arrays = {key: np.asarray(value) for key, value in info.items()}
    return {key: array for key, array in arrays.items() if array.dtype.kind in "biufc"}
