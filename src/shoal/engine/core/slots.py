"""Who may touch an env's rows: the slot table.

``IDLE`` (the engine writes the action) ``-> IN_FLIGHT`` (only the worker writes)
``-> IDLE`` again when the engine has taken the result. Whether a worker is done is
not in the table but in the status byte that the worker publishes; a timeout changes
nothing. Knows env ids; does not know processes or the contents of arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import PendingCallError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["SlotTable"]


class SlotTable:
    """The in-flight flag of every env.

    Attributes:
        num_envs: how many there are.
        num_in_flight: how many are handed over to workers now.
        in_flight: bool ``[num_envs]``.
    """

    __slots__ = ("in_flight", "num_envs", "num_in_flight")

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.num_in_flight = 0
        self.in_flight = np.zeros(num_envs, np.bool_)

    def check_ids(self, env_ids: Iterable[int]) -> np.ndarray[Any, Any]:
        """Returns the ids as a sorted int64 array.

        Raises:
            UsageError: an id out of range, one named twice, or none at all.
        """
        ids = np.asarray(list(env_ids))
        if ids.size == 0:
            raise UsageError("env_ids is empty: name at least one env, or None for all")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise UsageError(f"env_ids is a sequence of integers, not {env_ids!r}")
        if ids.min() < 0 or ids.max() >= self.num_envs:
            bad = ids[(ids < 0) | (ids >= self.num_envs)][0]
            raise UsageError(f"there is no env {bad}: ids go from 0 to {self.num_envs - 1}")
        unique = np.unique(ids)
        if unique.size != ids.size:
            raise UsageError(f"env_ids names an env twice: {ids.tolist()}")
        return unique.astype(np.int64)

    def check_idle(self, env_ids: Sequence[int] | np.ndarray[Any, Any] | None, verb: str) -> None:
        """Raises `PendingCallError` if one of these envs (``None``: any) is in flight."""
        if not self.num_in_flight:
            return
        busy = self.in_flight if env_ids is None else self.in_flight[env_ids]
        if np.count_nonzero(busy):  # a fifth of the price of `any`
            listed = np.flatnonzero(self.in_flight).tolist()
            raise PendingCallError(
                f"cannot {verb}: envs {listed} have not been received yet; call recv() first"
            )

    def hand_over(self, env_ids: np.ndarray[Any, Any] | None) -> None:
        """Marks idle envs (``None``: all) as in flight."""
        if env_ids is None:
            self.in_flight.fill(True)
            self.num_in_flight = self.num_envs
        else:
            self.in_flight[env_ids] = True
            self.num_in_flight += len(env_ids)

    def take_back(self, env_ids: np.ndarray[Any, Any] | None) -> None:
        """Marks in-flight envs (``None``: all) as idle."""
        if env_ids is None:
            self.in_flight.fill(False)
            self.num_in_flight = 0
        else:
            self.in_flight[env_ids] = False
            self.num_in_flight -= len(env_ids)

    def recount(self) -> None:
        """Counts anew: an interrupt may have come between a mark and the count."""
        self.num_in_flight = int(np.count_nonzero(self.in_flight))
