"""Wakes the thread that waits for rows, from other threads of the same process.

Knows bells and deadlines. Does not know who carries out what.
"""

from __future__ import annotations

import contextlib
import os
import threading
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
        # Between a ring and the end of the bell: its descriptor may be another file's
        # after that. Reentrant, because a collector may close what it finds forgotten
        # in the middle of a ring.
        self._bell_lock = threading.RLock()
        self._is_closed = False
        self._owner_pid = os.getpid()

    def notify(self, *, all_done: bool | Callable[[], bool] = False) -> None:
        """Tells the one who waits. May be called after `close`, by who comes late.

        ``all_done``: nothing that was submitted is left, or what tells it: it is asked
        only if somebody waits for that.
        """
        asleep = self._asleep
        if asleep == _FOR_ANY or (
            asleep == _FOR_ALL and (all_done if isinstance(all_done, bool) else all_done())
        ):
            self.poke()

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Waits until ``done()``; returns whether it is. See `Backend.wait`."""
        if done():
            return True
        # Once armed, each result makes a noise, whoever else waits for all of them.
        kind = _FOR_ALL if for_all and not self._at_rest else _FOR_ANY
        try:
            while True:
                self._asleep = kind
                if done():
                    return True
                if not self._poller.wait_any(deadline, _LONGEST_WAIT_S) and deadline.expired():
                    return done()
        finally:
            self._asleep = self._at_rest
            if self._at_rest:
                self.poke()  # what was heard here may have been meant for who dozes

    def arm(self, armed: bool) -> None:
        """See `Backend.arm`."""
        self._asleep = self._at_rest = _FOR_ANY if armed else _AWAKE

    def fds(self) -> Sequence[int]:
        """See `Backend.wake_fds`."""
        return self._poller.fds()

    def doze(self, deadline: Deadline) -> list[int]:
        """See `Backend.doze`."""
        return self._poller.doze(deadline, _LONGEST_WAIT_S)

    def poke(self) -> None:
        """See `Backend.poke`."""
        with self._bell_lock:
            if not self._is_closed:
                self._bell.ring()

    def close(self) -> None:
        """Frees the descriptors. May be called again."""
        if os.getpid() != self._owner_pid:
            # A fork: the lock may be held by a thread that is not here.
            self._is_closed = True
            self._poller.close()
            self._bell.close()
            return
        with self._bell_lock:
            if self._is_closed:
                return
            self._asleep = self._at_rest = _AWAKE
            with contextlib.suppress(OSError):
                self._bell.ring()  # who still dozes shall not do so for ever
            self._is_closed = True
            self._poller.close()
            self._bell.close()
