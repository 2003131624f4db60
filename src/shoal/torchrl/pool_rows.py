"""What each env of a pool was sent, and results made of it.

Knows TensorDicts. Does not know envs or the engine.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from shoal.torchrl.roots import carry_over, set_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENV_INDEX", "EnvIndices", "SentRows", "as_rows", "joined", "stack_rows"]

Array = np.ndarray[Any, Any]
ENV_INDEX = "env_index"
_NOT_KEPT = frozenset({ENV_INDEX, "next", "_reset", "_step"})


class EnvIndices:
    """The ``env_index`` entries of a pool: one Python integer per row.

    TorchRL's way of making such an entry takes longer than a step of a cheap env; so the
    integers are made once, and an entry remembers what it says.
    """

    def __init__(self, batch_sizes: Sequence[torch.Size]) -> None:
        """Makes the integers.

        Args:
            batch_sizes: of each env.
        """
        self._items = [
            NonTensorData(i, batch_size=size) if size else NonTensorData(i)
            for i, size in enumerate(batch_sizes)
        ]
        self._prototypes: dict[int, dict[str, Any]] = {}

    def one(self, env_id: int) -> NonTensorData:
        """Returns the entry of a single row."""
        return self._items[env_id]

    def of(self, env_ids: Array) -> NonTensorStack:
        """Returns the entry of several rows; a new one, which is the caller's."""
        ids = env_ids.tolist()
        items = [self._items[i] for i in ids]
        members = self._prototypes.get(len(ids))
        if members is None:
            members = self._prototypes[len(ids)] = dict(NonTensorStack(*items).__dict__)
        entry = NonTensorStack.__new__(NonTensorStack)
        entry.__dict__.update(members, tensordicts=items, _shoal_env_ids=env_ids)
        return entry

    def read(self, entry: Any) -> Any:
        """Returns what an entry says: integers, perhaps nested in lists."""
        if type(entry) is NonTensorStack:
            known = entry.__dict__.get("_shoal_env_ids")
            # One that was changed since does not hold the same items.
            if known is not None and len(known) == len(entry.tensordicts):
                items = self._items
                if all(map(is_, entry.tensordicts, [items[i] for i in known.tolist()])):
                    return known
        if isinstance(entry, NonTensorData):
            return entry.data
        return entry.tolist() if hasattr(entry, "tolist") else entry


class SentRows:
    """The entries that each env in flight was sent, which come back with its result."""

    def __init__(self, num_envs: int) -> None:
        self._sources: list[Any] = [None] * num_envs
        self._places = [0] * num_envs

    def keep(self, env_ids: Sequence[int], tensordict: TensorDictBase | None) -> None:
        """Keeps the rows of a TensorDict, one per env; ``None`` has no entries.

        Entries that are added to it later do not show.
        """
        if tensordict is None:
            source: Any = {}
        elif type(tensordict) is TensorDict:
            source = {
                key: value.copy() if is_tensor_collection(value) else value
                for key, value in tensordict._tensordict.items()
                if key not in _NOT_KEPT
            }
        else:
            source = [_without_private(row) for row in tensordict.unbind(0)]
        for place, env_id in enumerate(env_ids):
            self._sources[env_id] = source
            self._places[env_id] = place

    def take(self, env_ids: Sequence[int], batch_size: torch.Size) -> TensorDictBase:
        """Returns the rows of some envs in memory of their own, and forgets them.

        Dense where the entries are tensors of one shape, else a lazy stack.

        Args:
            env_ids: the envs, ascending.
            batch_size: of the result.
        """
        parts: dict[int, tuple[Any, list[int], list[int]]] = {}
        sources, places = self._sources, self._places
        for position, env_id in enumerate(env_ids):
            source = sources[env_id]
            part = parts.get(id(source))
            if part is None:
                part = parts[id(source)] = (source, [], [])
            part[1].append(places[env_id])
            part[2].append(position)
            sources[env_id] = None
        groups = list(parts.values())
        found = _gather(groups, len(env_ids))
        if found is not None:
            return TensorDict._new_unsafe(found, batch_size=batch_size)
        rows: list[Any] = [None] * len(env_ids)
        for source, taken, positions in groups:
            for place, position in zip(taken, positions, strict=True):
                rows[position] = _row(source, place, batch_size[1:])
        return LazyStackedTensorDict.maybe_dense_stack(rows, 0)


def _gather(
    groups: list[tuple[Any, list[int], list[int]]], num_rows: int
) -> dict[str, torch.Tensor] | None:
    """Returns dense rows by key; ``None`` if not all entries are plain tensors alike."""
    first = groups[0][0]
    if not isinstance(first, dict):
        return None
    for source, _, _ in groups:
        if not isinstance(source, dict) or source.keys() != first.keys():
            return None
    found = {}
    for key, like in first.items():
        columns = [source[key] for source, _, _ in groups]
        for column in columns:
            if (
                type(column) is not torch.Tensor
                or column.requires_grad
                or column.device.type != "cpu"
                or column.dtype != like.dtype
                or column.shape[1:] != like.shape[1:]
            ):
                return None
        if len(groups) == 1:
            # By numpy, which takes half of the time that torch takes for a few rows.
            rows = _as_numpy(like)
            found[key] = (
                torch.from_numpy(rows[groups[0][1]]) if rows is not None else like[groups[0][1]]
            )
            continue
        made = torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype)
        for column, (_, taken, positions) in zip(columns, groups, strict=True):
            made[positions] = column[taken]
        found[key] = made
    return found


def _as_numpy(column: torch.Tensor) -> Array | None:
    try:
        return column.numpy()
    except (RuntimeError, TypeError):  # a dtype that numpy lacks
        return None


def _without_private(row: TensorDictBase) -> TensorDictBase:
    return row.exclude(*[key for key in _NOT_KEPT if key in row.keys()])  # noqa: SIM118


def _row(source: Any, place: int, batch_size: torch.Size) -> TensorDictBase:
    if not isinstance(source, dict):
        return source[place].clone()
    entries = {key: value[place].clone() for key, value in source.items()}
    return TensorDict(entries, batch_size=batch_size)


def as_rows(tensordict: TensorDictBase) -> list[TensorDictBase]:
    """Returns a batch as one TensorDict per env."""
    return list(tensordict.unbind(0))


def stack_rows(rows: list[TensorDictBase], mode: str) -> TensorDictBase:
    """Returns rows as a batch.

    Args:
        rows: one per env.
        mode: ``"lazy"``, or ``"maybe_dense"``: dense where their entries are alike.
    """
    if mode == "lazy":
        return LazyStackedTensorDict(*rows, stack_dim=0)
    return LazyStackedTensorDict.maybe_dense_stack(rows, 0)


def joined(
    before: TensorDictBase, following: TensorDictBase | None, root: TensorDictBase | None
) -> tuple[TensorDictBase, TensorDictBase | None]:
    """Returns what was sent with what came of it, and the new root.

    Args:
        before: the rows that were sent; changed.
        following: what ``next`` holds.
        root: what to act on next; gets what was sent and no env returns. Changed.
    """
    dense = type(before) is TensorDict and all(
        made is None or type(made) is TensorDict for made in (following, root)
    )
    if not dense:
        return _joined_rows(before, following, root)
    assert isinstance(before, TensorDict)
    if isinstance(root, TensorDict):
        carry_over(before, root, None)
    if following is not None:
        set_entry(before, "next", following)
    return before, root


def _joined_rows(
    before: TensorDictBase, following: TensorDictBase | None, root: TensorDictBase | None
) -> tuple[TensorDictBase, TensorDictBase | None]:
    rows = as_rows(before)
    roots = None if root is None else as_rows(root)
    if roots is not None:
        for row, own in zip(rows, roots, strict=True):
            for key, value in row.items():
                if key not in own.keys() and key not in ("next", "reward"):  # noqa: SIM118
                    own.set(key, value.copy() if is_tensor_collection(value) else value)
        root = stack_rows(roots, "maybe_dense")
    if following is not None:
        for row, own in zip(rows, as_rows(following), strict=True):
            row.set("next", own)
    return stack_rows(rows, "maybe_dense"), root
