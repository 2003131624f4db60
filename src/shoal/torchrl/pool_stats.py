"""How busy the envs of a pool and its caller are.

Knows env ids and moments. Does not know TensorDicts or the engine. A send and a receive
cost a few additions to arrays; everything else is worked out when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.core.deadline import stopwatch
from shoal.torchrl.pool_requests import RESET, STEP

if TYPE_CHECKING:
    from shoal.engine.core.deadline import Clock

__all__ = ["PoolStats"]

Array = np.ndarray[Any, Any]
_NUM_SLOWEST = 5
_MS = 1e3


class PoolStats:
    """Counts and seconds per env since the start, or since they were last set to zero."""

    def __init__(self, num_envs: int, ready_at: Array, clock: Clock = stopwatch) -> None:
        """Starts to count.

        Args:
            num_envs: how many envs there are.
            ready_at: float64 ``[num_envs]``: a live view of when each result was ready, on
                ``clock``.
            clock: the one that the envs' workers use.
        """
        self._num_envs = num_envs
        self._ready_at = ready_at
        self._clock = clock
        self._sent_at = np.zeros(num_envs)
        self._received_at = np.zeros(num_envs)
        self._is_held = np.zeros(num_envs, np.bool_)
        self._num_held = 0
        self._held_since = 0.0
        self._clear()

    def _clear(self) -> None:
        self._since = self._clock()
        self._steps = np.zeros(self._num_envs, np.int64)
        self._resets = np.zeros(self._num_envs, np.int64)
        self._sends = np.zeros(self._num_envs, np.int64)  # those after a receive
        # Seconds: with the env, ready and not received, with the caller.
        self._busy_s = np.zeros(self._num_envs)
        self._dwell_s = np.zeros(self._num_envs)
        self._waiting_s = np.zeros(self._num_envs)
        self._batches = 0
        self._partial = 0
        self._in_flight = 0
        self._caller_s = 0.0
        self._held_since = max(self._held_since, self._since)
        self._received_at.clip(self._since, None, out=self._received_at)

    def note_sent(self, env_ids: Array, now: float) -> None:
        """Notes envs that were sent.

        Args:
            env_ids: the envs.
            now: the moment before they were sent; they may be ready by now.
        """
        held = self._is_held[env_ids]
        if held.all():
            self._waiting_s[env_ids] += now - self._received_at[env_ids]
            self._sends[env_ids] += 1
            self._is_held[env_ids] = False
            self._release(len(env_ids), now)
        elif held.any():
            self.note_sent(env_ids[held], now)
        self._sent_at[env_ids] = now

    def _release(self, count: int, now: float) -> None:
        self._num_held -= count
        if not self._num_held:
            self._caller_s += now - self._held_since

    def note_received(self, env_ids: Array, kind: int, num_in_flight: int) -> None:
        """Notes a batch that was received.

        Args:
            env_ids: the envs.
            kind: what they were sent for.
            num_in_flight: how many were in flight for the same, these included.
        """
        now = self._clock()
        ready_at = self._ready_at[env_ids]
        self._busy_s[env_ids] += ready_at - self._sent_at[env_ids]
        self._dwell_s[env_ids] += now - ready_at
        counts = self._resets if kind == RESET else self._steps
        counts[env_ids] += 1
        self._batches += 1
        self._in_flight += num_in_flight
        self._partial += num_in_flight > len(env_ids)
        if not self._num_held:
            self._held_since = now
        self._received_at[env_ids] = now
        self._is_held[env_ids] = True
        self._num_held += len(env_ids)

    def note_rows(self, env_ids: Array | None, began: float, *, is_reset: bool) -> None:
        """Notes a call that sent and received envs (``None``: all) together."""
        ids = np.arange(self._num_envs) if env_ids is None else env_ids
        self.note_sent(ids, began)
        self.note_received(ids, RESET if is_reset else STEP, len(ids))

    def snapshot(self, *, reset: bool) -> dict[str, Any]:
        """Returns the figures; see `PoolVerbs.stats`."""
        now = self._clock()
        elapsed_s = now - self._since
        per_env = self._steps + self._resets
        items = int(per_env.sum())
        caller_s = self._caller_s + (now - self._held_since if self._num_held else 0.0)
        mean_ms = _MS * self._busy_s / np.maximum(per_env, 1)
        slowest = [int(i) for i in np.argsort(-mean_ms, kind="stable")[:_NUM_SLOWEST] if per_env[i]]
        found: dict[str, Any] = {
            "elapsed_s": elapsed_s,
            "steps": int(self._steps.sum()),
            "resets": int(self._resets.sum()),
            "steps_per_s": _ratio(float(self._steps.sum()), elapsed_s),
            "batches": self._batches,
            "items": items,
            "avg_batch_size": _ratio(items, self._batches),
            "batch_fill_ratio": _ratio(items, self._in_flight),
            "partial_batch_fraction": _ratio(self._partial, self._batches),
            "avg_env_ms": _MS * _ratio(float(self._busy_s.sum()), items),
            "avg_observation_to_batch_ms": _MS * _ratio(float(self._dwell_s.sum()), items),
            "avg_batch_to_action_ms": _MS
            * _ratio(float(self._waiting_s.sum()), int(self._sends.sum())),
            "consumer_busy_fraction": _ratio(caller_s, elapsed_s),
            "slowest_envs": [(i, float(mean_ms[i])) for i in slowest],
            "per_env": {
                "steps": self._steps.tolist(),
                "resets": self._resets.tolist(),
                "busy_s": self._busy_s.tolist(),
                "dwell_s": self._dwell_s.tolist(),
                "waiting_s": self._waiting_s.tolist(),
            },
        }
        if reset:
            self._clear()
        return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
