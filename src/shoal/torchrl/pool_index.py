"""``env_index``: how a pool's callers say which envs they mean, and how results say it.

Knows TensorDicts' entries that are no tensors. Does not know envs or the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from shoal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENV_INDEX", "EnvIndices", "as_made", "flat", "is_one"]

Array = np.ndarray[Any, Any]
ENV_INDEX = "env_index"
_RECIPE = "_shoal_recipe"


class EnvIndices:
    """The ``env_index`` entries of a pool: one Python integer per row.

    TorchRL's way of making such an entry takes longer than a step of a cheap env; so what
    is the same in all of them is made once. Each entry is still the caller's own: it may be
    locked, changed and shared without touching another.
    """

    def __init__(self, batch_sizes: Sequence[torch.Size]) -> None:
        """Makes what entries are made of.

        Args:
            batch_sizes: of each env.
        """
        self._parts = [_parts_of(i, size) for i, size in enumerate(batch_sizes)]
        self._prototypes: dict[int, dict[str, Any]] = {}

    def one(self, env_id: int) -> NonTensorData:
        """Returns the entry of a single row; a new one."""
        inner, data = self._parts[env_id]
        # Not by the classes' own `__new__`, which takes as long as all of this.
        tensordict: TensorDict = object.__new__(TensorDict)
        members = tensordict.__dict__
        members.update(inner)
        members["_tensordict"] = {}
        entry: NonTensorData = object.__new__(NonTensorData)
        members = entry.__dict__
        members["_tensordict"] = tensordict
        members["_non_tensordict"] = data.copy()
        members["_is_initialized"] = True
        return entry

    def of(self, env_ids: Array) -> NonTensorStack:
        """Returns the entry of several rows; a new one.

        Args:
            env_ids: the envs, ascending. Not to be changed later.
        """
        entry: NonTensorStack = object.__new__(_UnmadeStack)
        _members_of(entry)[_RECIPE] = (self, env_ids)
        return entry

    def _members(self, env_ids: Array) -> dict[str, Any]:
        """Returns the attributes of an entry of several rows."""
        items = list(map(self.one, env_ids.tolist()))
        members = self._prototypes.get(len(items))
        if members is None:
            members = self._prototypes[len(items)] = dict(NonTensorStack(*items).__dict__)
        return {**members, "tensordicts": items}

    def read(self, entry: Any) -> Any:
        """Returns what an entry says: integers, perhaps nested in lists."""
        if type(entry) is NonTensorStack:
            items = entry.tensordicts
            if all(type(item) is NonTensorData for item in items):
                return [item.__dict__["_non_tensordict"]["data"] for item in items]
        if isinstance(entry, NonTensorData):
            return entry.data
        return entry.tolist() if hasattr(entry, "tolist") else entry


class _UnmadeStack(NonTensorStack):
    """A `NonTensorStack` without its items, which are made when anybody looks at it.

    Most entries go back with the next send, and nobody has looked. With its items it is a
    `NonTensorStack` and nothing else, for good.
    """

    def __getattribute__(self, name: str) -> Any:
        members = _members_of(self)
        # Another thread may be here, too: then the last of both sets of items stays.
        recipe = members.get(_RECIPE)
        if recipe is not None:
            indices, env_ids = recipe
            members.update(indices._members(env_ids))
        object.__setattr__(self, "__class__", NonTensorStack)
        members.pop(_RECIPE, None)
        return getattr(self, name)


def as_made(entry: Any) -> Array | None:
    """Returns the ids that `EnvIndices.of` was given, if nobody has looked at this since."""
    if type(entry) is not _UnmadeStack:
        return None
    recipe = _members_of(entry).get(_RECIPE)
    return None if recipe is None else recipe[1]


def _members_of(entry: Any) -> dict[str, Any]:
    members: dict[str, Any] = object.__getattribute__(entry, "__dict__")
    return members


def _parts_of(env_id: int, batch_size: torch.Size) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = NonTensorData(env_id, batch_size=batch_size).__dict__
    return dict(whole["_tensordict"].__dict__), dict(whole["_non_tensordict"])


def is_one(named: Any) -> bool:
    """Returns whether an index is a number, and not a list of numbers."""
    return isinstance(named, int | np.integer) or (
        isinstance(named, torch.Tensor | np.ndarray) and named.ndim == 0
    )


def flat(named: Any) -> list[int]:
    """Returns the integers of an index; TorchRL names an env once per row of its batch.

    Raises:
        UsageError: it holds something else, or several envs where one belongs.
    """
    if type(named) is list and all(type(item) is int for item in named):
        return named
    given = named
    if isinstance(named, torch.Tensor | np.ndarray):
        is_plain = type(named) is np.ndarray and named.ndim == 1 and named.dtype.kind in "iu"
        named = numbers = named.tolist()
        if is_plain:
            return list(numbers)
    if is_one(named):
        named = [named]
    try:
        return [_only(item) for item in named]
    except (TypeError, ValueError):
        raise UsageError(
            "env_index is an env's number or a list of them, one for each row of the TensorDict;"
            f" not {given!r}"
        ) from None


def _only(item: Any) -> int:
    """Returns an integer, or the one that all entries of nested lists share."""
    if isinstance(item, torch.Tensor | np.ndarray):
        item = item.tolist()
    if isinstance(item, int | np.integer):
        return int(item)
    if isinstance(item, str):
        raise TypeError(item)
    [found] = set(map(_only, item))
    return found
