"""Which envs of a pool are in flight, and who may receive them.

Knows env ids and counts. Does not know TensorDicts or the engine.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import NoPendingCallError, PendingCallError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RESET", "STEP", "STEP_AND_RESET", "VERBS", "Requests", "wanted_count"]

Array = np.ndarray[Any, Any]
STEP, STEP_AND_RESET, RESET = 1, 2, 3
VERBS = {STEP: "step", STEP_AND_RESET: "step_and_maybe_reset", RESET: "reset"}


class Requests:
    """What each env was asked for and has not given yet.

    An env that was sent by its number, or by a coroutine that awaits it, belongs to whoever
    asks for it by number: others who take what is ready do not get it.
    """

    def __init__(self, num_envs: int) -> None:
        self._kinds = np.zeros(num_envs, np.uint8)
        # By kind: who is in flight for anybody.
        self._open = {kind: np.zeros(num_envs, np.bool_) for kind in VERBS}

    def check_idle(self, env_ids: Array) -> None:
        """Raises `PendingCallError` if one of these envs is in flight."""
        if np.count_nonzero(self._kinds[env_ids]):
            busy = np.flatnonzero(self._kinds).tolist()
            raise PendingCallError(
                f"cannot send to envs {env_ids.tolist()}: envs {busy} are busy; receive them"
                " first, with the twin of the verb that sent them"
            )

    def note(self, env_ids: Array, kind: int, *, is_private: bool) -> None:
        """Notes envs that were sent."""
        self._kinds[env_ids] = kind
        if not is_private:
            self._open[kind][env_ids] = True

    def forget(self, env_ids: Array) -> None:
        """Notes envs that were received."""
        kinds = set(self._kinds[env_ids].tolist())
        self._kinds[env_ids] = 0
        for kind in kinds - {0}:
            self._open[kind][env_ids] = False

    def ready(self, kind: int, status: Array) -> Array:
        """Returns the ids of those that anybody may receive now, ascending."""
        found: Array = (self._open[kind] & (status != 0)).nonzero()[0]
        return found

    def count(self, kind: int) -> int:
        """Returns how many are in flight for anybody."""
        return int(np.count_nonzero(self._open[kind]))

    def count_all(self, kind: int) -> int:
        """Returns how many are in flight for this, whoever may receive them."""
        return int(np.count_nonzero(self._kinds == kind))

    def check_sent(self, env_ids: Sequence[int], kind: int) -> None:
        """Raises `NoPendingCallError` if one of these envs was not sent for this."""
        for env_id in env_ids:
            found = int(self._kinds[env_id])
            if found != kind:
                verb = f"async_{VERBS[kind]}_send"
                state = f"in flight for {VERBS[found]}" if found else "idle"
                raise NoPendingCallError(f"env {env_id} is {state}; {verb} comes first")

    def check_enough(self, wanted: int, kind: int) -> None:
        """Raises `NoPendingCallError` if fewer envs are in flight."""
        if wanted > self.count(kind):
            numbered = (self._kinds == kind) & ~self._open[kind]
            hint = (
                f" Envs {np.flatnonzero(numbered).tolist()} were sent by number: receive them with"
                " env_index."
                if numbered.any()
                else ""
            )
            raise NoPendingCallError(
                f"cannot await {wanted} envs for {VERBS[kind]}: {self.count(kind)} are in"
                f" flight.{hint}"
            )

    @property
    def kinds(self) -> Array:
        """uint8 ``[num_envs]``: what each env is in flight for; 0 for an idle one."""
        return self._kinds


def wanted_count(min_get: Any, max_get: Any, timeout: Any, default: int) -> int:
    """Returns how many results to wait for.

    Raises:
        ValueError: a number below 1, ``max_get`` below ``min_get``, a negative timeout.
    """
    wanted = default if min_get is None else min_get
    if type(wanted) is int and wanted >= 1 and max_get is None and timeout is None:
        return wanted
    if isinstance(wanted, bool) or not isinstance(wanted, Integral) or wanted < 1:
        raise ValueError(f"min_get is an integer >= 1, not {wanted!r}")
    if max_get is not None and (isinstance(max_get, bool) or not isinstance(max_get, Integral)):
        raise ValueError(f"max_get is an integer >= 1 or None, not {max_get!r}")
    if max_get is not None and max_get < wanted:
        raise ValueError(f"max_get ({max_get}) is less than min_get ({wanted})")
    if timeout is not None and (not isinstance(timeout, Real) or not float(timeout) >= 0):
        raise ValueError(f"timeout is a number of seconds >= 0, not {timeout!r}")
    return int(wanted)
