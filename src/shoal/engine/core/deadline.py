"""Time left: one deadline is made per call and handed to every wait below it.

The only module that reads the monotonic clock. Does not know what is waited for.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

from shoal.errors import UsageError

__all__ = ["Clock", "Deadline", "monotonic", "stopwatch"]

monotonic = time.monotonic
stopwatch = time.perf_counter  # for lengths of time, finer than the other


class Clock(Protocol):
    """Anything that returns seconds on a clock that never goes back."""

    def __call__(self) -> float:
        """Returns the present moment in seconds."""
        ...


@dataclass(slots=True)
class Deadline:
    """A moment on the monotonic clock. Not to be changed.

    It is not frozen because one is made in every step, and a frozen one takes four
    times as long to make.

    Attributes:
        expires_at: the moment in seconds; infinite where the caller asked for no limit.
        timeout_s: the seconds that were allowed, for messages.
        clock: where the present moment comes from.
    """

    expires_at: float
    timeout_s: float
    clock: Clock = monotonic

    @classmethod
    def after(cls, timeout_s: float | None, clock: Clock = monotonic) -> Deadline:
        """Returns the deadline ``timeout_s`` seconds from now; ``None`` never expires.

        Raises:
            UsageError: the timeout is negative or not a number.
        """
        if timeout_s is None:
            return NEVER
        given: object = timeout_s
        # The exact types first: asking the abstract one takes longer than all the rest.
        is_number = type(given) in (float, int) or isinstance(given, Real)
        if not is_number or not timeout_s >= 0:
            raise UsageError(f"a timeout is a number of seconds >= 0 or None, not {timeout_s!r}")
        return cls(clock() + timeout_s, timeout_s, clock)

    def left_s(self) -> float:
        """Returns the seconds left, at least 0."""
        if self.expires_at == math.inf:
            return math.inf
        return max(0.0, self.expires_at - self.clock())

    def left_ms(self) -> int:
        """Returns the milliseconds left, rounded up, for ``poll``; -1 for no limit."""
        left = self.left_s()
        return -1 if left == math.inf else math.ceil(left * 1000)

    def expired(self) -> bool:
        """Returns whether no time is left."""
        return self.left_s() == 0.0

    def at_most(self, timeout_s: float) -> Deadline:
        """Returns this deadline or the one ``timeout_s`` from now, whichever is earlier."""
        other = Deadline.after(timeout_s, self.clock)
        return self if self.expires_at <= other.expires_at else other


NEVER = Deadline(math.inf, math.inf)
