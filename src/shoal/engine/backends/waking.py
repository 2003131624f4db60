"""Wakes the thread that waits for rows, from other threads of the same process.

Knows bells and deadlines. Does not know who carries out what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.engine.system.bell import Bell
from shoal.engine.system.poller import Poller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.engine.core.deadline import Deadline

__all__ = ["Wakeups"]

# A Ctrl-C that comes just before the system call does not end it; so it is noticed soon.
_LONGEST_WAIT_S = 1.0
_AWAKE, _FOR_ANY, _FOR_ALL = 0, 1, 2


class Wakeups:
    """One thread waits; others tell it that something has happened.

    They say so after they have written what happened, and it looks again after it has
    said that it sleeps; the interpreter's lock orders the two, so no news is lost.
    """

    def __init__(self) -> None:
        self._bell = Bell.create()
        self._poller = Poller(self._bell)
        self._asleep = self._at_rest = _AWAKE

    def notify(self, *, all_done: bool = False) -> None:
        """Tells the one who waits. ``all_done``: nothing that was submitted is left."""
        asleep = self._asleep
        if asleep == _FOR_ANY or (asleep == _FOR_ALL and all_done):
            self._bell.ring()

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Waits until ``done()``; returns whether it is. See `Backend.wait`."""
        if done():
            return True
        try:
            while True:
                self._asleep = _FOR_ALL if for_all else _FOR_ANY
                if done():
                    return True
                if not self._poller.wait_any(deadline, _LONGEST_WAIT_S) and deadline.expired():
                    return done()
        finally:
            self._asleep = self._at_rest

    def arm(self, armed: bool) -> None:
        """See `Backend.arm`."""
        self._asleep = self._at_rest = _FOR_ANY if armed else _AWAKE

    def fds(self) -> Sequence[int]:
        """See `Backend.wake_fds`."""
        return self._poller.fds()

    def doze(self, deadline: Deadline) -> list[int]:
        """See `Backend.doze`."""
        return self._poller.wait_any(deadline)

    def poke(self) -> None:
        """See `Backend.poke`."""
        self._bell.ring()

    def close(self) -> None:
        """Frees the descriptors. May be called again."""
        self._poller.close()
        self._bell.close()
