"""Wakes the thread that waits for rows, from other threads of the same process.

Knows bells and deadlines. Does not know who carries out what.

A thread waits for a lock, since the release of one keeps the interpreter: a write to a
descriptor gives it up, and whoever wrote has to wait for it among all others. Descriptors
are for event loops, and rung only if one watches them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from shoal.engine.core.deadline import NEVER
from shoal.engine.system.bell import Bell
from shoal.engine.system.poller import Poller

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.engine.core.deadline import Deadline

__all__ = ["Wakeups"]

# A Ctrl-C that comes just before the system call does not end it; so it is noticed soon.
_LONGEST_WAIT_S = 1.0
_AWAKE, _FOR_ANY, _FOR_ALL, _WHEN_DUE = 0, 1, 2, 3


class Wakeups:
    """One thread waits; others tell it that something has happened.

    They say so after they have written what happened, and it looks again after it has
    said that it sleeps; the interpreter's lock orders the two, so no news is lost.
    """

    def __init__(self) -> None:
        self._bell = Bell.create()
        self._poller = Poller(self._bell)
        self._asleep = self._at_rest = _AWAKE
        self._is_watched = True
        self._is_due: Callable[[], bool] = _always
        self._signal = threading.Lock()  # taken: nothing has happened since it was
        self._signal.acquire()
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
        if asleep == _AWAKE:
            return
        if asleep == _FOR_ALL:
            is_due = all_done if isinstance(all_done, bool) else all_done()
        else:
            # With nothing left to come, nothing else will wake him.
            is_due = asleep == _FOR_ANY or all_done is True or self._is_due()
        if is_due:
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
                if not self._wait_signal(deadline) and deadline.expired():
                    return done()
        finally:
            self._asleep = self._at_rest
            if self._at_rest:
                self.poke()  # what was heard here may have been meant for who dozes

    def _wait_signal(self, deadline: Deadline) -> bool:
        return self._signal.acquire(timeout=min(deadline.left_s(), _LONGEST_WAIT_S))

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """See `Backend.arm`."""
        self._is_watched = watched
        self._is_due = is_due or _always
        kind = _FOR_ANY if is_due is None else _WHEN_DUE
        self._asleep = self._at_rest = kind if armed else _AWAKE

    def fds(self) -> Sequence[int]:
        """See `Backend.wake_fds`."""
        return self._poller.fds()

    def doze(self, deadline: Deadline) -> list[int]:
        """See `Backend.doze`."""
        while True:
            came = self._wait_signal(deadline)
            if came or self._is_closed or deadline.expired():
                break
        if self._is_watched:
            # Those who watch shall not be told once more of what is taken in here.
            with contextlib.suppress(ValueError):  # closed meanwhile
                self._poller.wait_any(NEVER, 0.0)
        return [self._bell.fd] if came or self._is_closed else []

    def poke(self) -> None:
        """See `Backend.poke`."""
        self._raise_signal()
        if not self._is_watched:
            return
        with self._bell_lock:
            if not self._is_closed:
                self._bell.ring()

    def _raise_signal(self) -> None:
        # Two may find it taken, and one of them comes too late.
        if self._signal.locked():
            with contextlib.suppress(RuntimeError):
                self._signal.release()

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
                self._bell.ring()  # who still watches shall not do so for ever
            self._is_closed = True
            self._raise_signal()
            self._poller.close()
            self._bell.close()


def _always() -> bool:
    return True
