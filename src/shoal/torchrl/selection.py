"""All envs of an engine, or some of them in an order of their own.

Knows numpy and torch. Does not know envs or specs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Selection", "mixed"]

Array = np.ndarray[Any, Any]


class Selection:
    """Some envs, in the order in which a caller sees them.

    The engine takes and returns envs in ascending order; positions count as the caller
    does.

    Attributes:
        count: how many there are.
    """

    def __init__(self, num_envs: int, env_ids: Sequence[int] | Array | None) -> None:
        self._ids = None if env_ids is None else np.asarray(env_ids, np.int64)
        self.count = num_envs if self._ids is None else len(self._ids)

    @property
    def is_whole(self) -> bool:
        """Whether these are all envs, in their own order."""
        return self._ids is None

    def pick(self, rows: Array) -> Array:
        """Returns these envs' rows, copied."""
        return rows.copy() if self._ids is None else rows.take(self._ids, 0)

    def pick_list(self, rows: list[Any]) -> list[Any]:
        """Returns these envs' rows of a list."""
        return rows if self._ids is None else [rows[i] for i in self._ids.tolist()]

    def newer(self, is_fresh: Array) -> Array | None:
        """Returns the positions of envs whose present entries are those of a reset."""
        found: Array = (is_fresh if self._ids is None else is_fresh[self._ids]).nonzero()[0]
        return found if len(found) else None

    def pick_mixed(self, pair: Sequence[Array], newer: Array | None) -> torch.Tensor:
        """Returns these envs' rows of the last step, or of the last reset for ``newer``."""
        if self._ids is None:
            return mixed(pair, newer)
        present = pair[0].take(self._ids, 0)  # a third of the price of an index
        if newer is not None:
            present[newer] = pair[1].take(self._ids[newer], 0)
        return torch.from_numpy(present)

    def pick_mixed_list(self, pair: Sequence[Array], newer: Array | None) -> list[Any]:
        """Returns the same for rows of objects."""
        present = self.pick_list(list(pair[0]))
        for k in () if newer is None else newer.tolist():
            present[k] = pair[1][k if self._ids is None else self._ids[k]]
        return present

    def env_ids(self, positions: Array | None) -> Array | None:
        """Returns the ids at these positions (``None``: all), ascending; ``None`` for all."""
        if self._ids is None:
            return positions
        return np.sort(self._ids if positions is None else self._ids[positions])

    def ordered(self, columns: Mapping[Any, Any], positions: Array | None) -> dict[Any, Any]:
        """Returns the rows at these positions (``None``: all) in the order of `env_ids`."""
        order = self._order(positions)
        if order is None:
            return dict(columns)
        return {
            # Leaves without a fixed shape are lists, which take no array of positions.
            path: [rows[k] for k in order] if isinstance(rows, list) else rows[order]
            for path, rows in columns.items()
        }

    def ordered_list(self, rows: list[Any], positions: Array | None) -> list[Any]:
        """Returns the same for a list."""
        order = self._order(positions)
        return rows if order is None else [rows[k] for k in order.tolist()]

    def _order(self, positions: Array | None) -> Array | None:
        if self._ids is None:
            return positions
        mine = np.arange(self.count) if positions is None else positions
        order: Array = mine[np.argsort(self._ids[mine])]
        return order


def mixed(pair: Sequence[Array], newer: Array | None) -> torch.Tensor:
    """Returns all rows of the last step, or of the last reset for the ids in ``newer``."""
    stepped, reset = pair
    if newer is not None and len(newer) == len(stepped):
        return torch.from_numpy(reset.copy())
    present = stepped.copy()
    if newer is not None:
        # In numpy: torch cannot index its unsigned dtypes.
        present[newer] = reset.take(newer, 0)
    return torch.from_numpy(present)
