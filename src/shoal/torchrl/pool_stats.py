"""How busy the envs of a pool and its caller are.

Knows env ids and moments. Does not know TensorDicts or the engine. A send or a receive
costs a line in a log; the sums are worked out when they are asked for, or the log is long.
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
_LONGEST_LOG = 4096
# What happened to an env last: nothing yet, it was sent, or it was received.
_SENT, _STEPPED, _RESET = 1, 2, 3


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
        # The last event of each env that was digested: what it was, when it was, and
        # for a receive when its result was ready.
        self._last_kind = np.zeros(num_envs, np.int64)
        self._last_at = np.zeros(num_envs)
        self._last_ready = np.zeros(num_envs)
        self._log: list[tuple[Array, int, float, Array | None]] = []
        self._clear(clock())

    def _clear(self, now: float) -> None:
        self._since = self._digested_at = now
        self._steps = np.zeros(self._num_envs, np.int64)
        self._resets = np.zeros(self._num_envs, np.int64)
        self._sends = 0  # those after a receive
        # Seconds: with the env, ready and not received, with the caller.
        self._busy_s = np.zeros(self._num_envs)
        self._dwell_s = np.zeros(self._num_envs)
        self._waiting_s = np.zeros(self._num_envs)
        self._batches = 0
        self._partial = 0
        self._in_flight = 0
        self._caller_s = 0.0
        self._last_at = np.maximum(self._last_at, now)

    def note_sent(self, env_ids: Array, now: float) -> None:
        """Notes envs that were sent.

        Args:
            env_ids: the envs. Not to be changed later.
            now: the moment before they were sent; they may be ready by now.
        """
        self._log.append((env_ids, _SENT, now, None))

    def note_received(self, env_ids: Array, kind: int, num_in_flight: int) -> None:
        """Notes a batch that was received.

        Args:
            env_ids: the envs. Not to be changed later.
            kind: what they were sent for.
            num_in_flight: how many were in flight for the same, these included.
        """
        event = _RESET if kind == RESET else _STEPPED
        self._log.append((env_ids, event, self._clock(), self._ready_at[env_ids]))
        self._batches += 1
        self._in_flight += num_in_flight
        self._partial += num_in_flight > len(env_ids)
        if len(self._log) >= _LONGEST_LOG:
            self._digest()

    def note_rows(self, env_ids: Array | None, began: float, *, is_reset: bool) -> None:
        """Notes a call that sent and received envs (``None``: all) together."""
        ids = np.arange(self._num_envs) if env_ids is None else env_ids
        self.note_sent(ids, began)
        self.note_received(ids, RESET if is_reset else STEP, len(ids))

    def _digest(self) -> None:
        """Adds what the log says to the sums.

        All of it at once: one event at a time would cost as much as a step of a cheap env.
        """
        log, self._log = self._log, []
        if not log:
            return
        every = np.arange(self._num_envs)
        sizes = [len(ids) for ids, _, _, _ in log]
        # The last events before come first, so that each one here has one before it.
        ids = np.concatenate([every, *[entry[0] for entry in log]])
        kinds = np.concatenate([self._last_kind, np.repeat([entry[1] for entry in log], sizes)])
        moments = np.concatenate([self._last_at, np.repeat([entry[2] for entry in log], sizes)])
        ready = np.concatenate(
            [
                self._last_ready,
                *[np.zeros(len(e[0])) if e[3] is None else e[3] for e in log],
            ]
        )
        entries = np.concatenate([np.full(self._num_envs, -1), np.repeat(range(len(log)), sizes)])
        order = np.argsort(ids, kind="stable")
        ids, kinds, moments, ready = ids[order], kinds[order], moments[order], ready[order]
        follows = np.flatnonzero(ids[1:] == ids[:-1]) + 1
        before, now_kinds = kinds[follows - 1], kinds[follows]
        came = follows[(before == _SENT) & (now_kinds > _SENT)]
        left = follows[(before > _SENT) & (now_kinds == _SENT)]
        self._busy_s += self._sum(ids[came], ready[came] - moments[came - 1])
        self._dwell_s += self._sum(ids[came], moments[came] - ready[came])
        self._waiting_s += self._sum(ids[left], moments[left] - moments[left - 1])
        self._sends += len(left)
        self._steps += np.bincount(ids[came][kinds[came] == _STEPPED], minlength=self._num_envs)
        self._resets += np.bincount(ids[came][kinds[came] == _RESET], minlength=self._num_envs)
        num_held = int(np.count_nonzero(self._last_kind > _SENT))
        entries = entries[order]
        changes = np.bincount(entries[came], minlength=len(log)) - np.bincount(
            entries[left], minlength=len(log)
        )
        held = num_held + np.concatenate([[0], np.cumsum(changes)])
        times = np.concatenate([[self._digested_at], [entry[2] for entry in log]])
        self._caller_s += float(np.diff(times)[held[:-1] > 0].sum())
        self._digested_at = log[-1][2]
        last = np.flatnonzero(np.append(ids[1:] != ids[:-1], True))
        self._last_kind, self._last_at, self._last_ready = kinds[last], moments[last], ready[last]

    def _sum(self, ids: Array, seconds: Array) -> Array:
        return np.bincount(ids, weights=seconds, minlength=self._num_envs)

    def snapshot(self, *, reset: bool) -> dict[str, Any]:
        """Returns the figures; see `PoolVerbs.stats`."""
        now = self._clock()
        self._digest()
        elapsed_s = now - self._since
        per_env = self._steps + self._resets
        items = int(per_env.sum())
        holds = bool((self._last_kind > _SENT).any())
        caller_s = self._caller_s + (now - self._digested_at if holds else 0.0)
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
            "avg_batch_to_action_ms": _MS * _ratio(float(self._waiting_s.sum()), self._sends),
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
            self._clear(now)
        return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
