"""What each env of a pool was sent, and results made of it.

Knows TensorDicts. Does not know envs or the engine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from shoal.torchrl.fresh import fresh_tensordict
from shoal.torchrl.pool_index import ENV_INDEX
from shoal.torchrl.roots import carry_over, set_entry

__all__ = ["SentRows", "as_rows", "first_row", "joined", "stack_rows"]

Array = np.ndarray[Any, Any]
_NOT_KEPT = frozenset({ENV_INDEX, "next", "_reset", "_step"})


class SentRows:
    """The entries that each env in flight was sent, which come back with its result.

    Plain tensors that look as they did the first time are copied into columns with a row
    per env: two quick copies, however sends and receives cut the batch. Anything else is
    kept as it came.
    """

    def __init__(self, num_envs: int) -> None:
        self._num_envs = num_envs
        # The rows of all envs under each key, and the shape of one.
        self._columns: dict[str, tuple[Array, tuple[int, ...]]] | None = None
        self._in_columns = np.zeros(num_envs, np.bool_)
        self._others: list[TensorDictBase | None] = [None] * num_envs

    def keep(self, env_ids: Array, tensordict: TensorDictBase | None) -> None:
        """Keeps the rows of a TensorDict, one per env; ``None`` has no entries."""
        if tensordict is None:
            self._in_columns[env_ids] = False
            for env_id in env_ids.tolist():
                self._others[env_id] = None
            return
        if type(tensordict) is TensorDict:
            entries = tensordict._tensordict
            if self._columns is None:
                self._columns = self._new_columns(entries)
            if self._columns is not None and self._fill_columns(env_ids, entries):
                self._in_columns[env_ids] = True
                return
        self._in_columns[env_ids] = False
        for env_id, row in zip(env_ids.tolist(), tensordict.unbind(0), strict=True):
            self._others[env_id] = _without_private(row).clone()

    def _new_columns(self, entries: dict[str, Any]) -> dict[str, tuple[Array, Any]] | None:
        columns: dict[str, tuple[Array, Any]] = {}
        for key, value in entries.items():
            if key in _NOT_KEPT:
                continue
            if (row := _as_plain(value)) is None:
                return None
            shape = row.shape[1:]
            # A single number as a column without a dimension, which is written at a quarter
            # of the price.
            row_shape = () if math.prod(shape) == 1 else shape
            columns[key] = (np.empty((self._num_envs, *row_shape), row.dtype), shape)
        return columns

    def _fill_columns(self, env_ids: Array, entries: dict[str, Any]) -> bool:
        """Copies entries into the columns; returns whether they fit. If not, no matter."""
        columns = self._columns
        assert columns is not None
        if len(columns) != len(entries) - len(_NOT_KEPT & entries.keys()):
            return False
        for key, (column, shape) in columns.items():
            rows = _as_plain(entries.get(key))
            if rows is None or rows.dtype != column.dtype or rows.shape[1:] != shape:
                return False
            column[env_ids] = rows.reshape(-1) if column.ndim == 1 else rows
        return True

    def take(self, env_ids: Array, batch_size: torch.Size) -> TensorDictBase:
        """Returns the rows of some envs in memory of their own.

        Dense where the entries are tensors of one shape, else a lazy stack.

        Args:
            env_ids: the envs, ascending.
            batch_size: of the result.
        """
        if self._columns is not None and np.count_nonzero(self._in_columns[env_ids]) == len(
            env_ids
        ):
            found = {}
            for key, (column, shape) in self._columns.items():
                rows = column.take(env_ids, 0)
                rows = rows.reshape(-1, *shape) if column.ndim == 1 else rows
                found[key] = torch.from_numpy(rows)
            return fresh_tensordict(found, batch_size)
        others = [self._row(env_id, batch_size[1:]) for env_id in env_ids.tolist()]
        if all(row is None for row in others):
            return TensorDict._new_unsafe({}, batch_size=batch_size)
        empty = TensorDict({}, batch_size=batch_size[1:])
        return LazyStackedTensorDict.maybe_dense_stack(
            [empty.copy() if row is None else row for row in others], 0
        )

    def _row(self, env_id: int, batch_size: torch.Size) -> TensorDictBase | None:
        if not self._in_columns[env_id]:
            row, self._others[env_id] = self._others[env_id], None
            return row
        assert self._columns is not None
        found = {
            key: torch.from_numpy(np.array(column[env_id]).reshape(shape))
            for key, (column, shape) in self._columns.items()
        }
        return TensorDict._new_unsafe(found, batch_size=batch_size)


def _as_plain(value: Any) -> Array | None:
    """Returns a plain tensor as an array that shares its memory; ``None`` for what is none."""
    if type(value) is not torch.Tensor:
        return None
    try:
        row: Array = value.numpy()
    except (TypeError, RuntimeError):  # a gradient, a device, a layout, a dtype of torch's own
        return None
    return row


def _without_private(row: TensorDictBase) -> TensorDictBase:
    return row.exclude(*[key for key in _NOT_KEPT if key in row.keys()])  # noqa: SIM118


def first_row(batch: TensorDictBase) -> TensorDictBase:
    """Returns the first row of a batch; quicker than by an index where it can be."""
    if type(batch) is TensorDict:
        entries = {}
        for key, value in batch._tensordict.items():
            if type(value) is torch.Tensor:
                entries[key] = value[0]
            elif type(value) is TensorDict:
                entries[key] = first_row(value)
            else:
                return batch[0]
        return TensorDict._new_unsafe(entries, batch_size=batch.batch_size[1:], device=batch.device)
    return batch[0]


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
