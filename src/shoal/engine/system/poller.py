"""Wait for a bell and for other descriptors at once.

Knows descriptors and deadlines. Does not know what they mean.
"""

from __future__ import annotations

import contextlib
import math
import select
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.engine.core.deadline import Deadline
    from shoal.engine.system.bell import Bell

__all__ = ["Poller"]

_HAS_EPOLL = hasattr(select, "epoll")


class Poller:
    """One wait over one bell and any number of descriptors."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._poller: Any = select.epoll() if _HAS_EPOLL else select.poll()
        # Edge-triggered where the system can: every ring is an event then, and the bell
        # need not be silenced, which saves a system call per step.
        edge = select.EPOLLET if _HAS_EPOLL else 0
        self._poller.register(bell.fd, select.POLLIN | edge)
        self._fds = {bell.fd}
        self._is_closed = False

    def watch(self, fd: int) -> None:
        """Waits for this descriptor too, until it is forgotten."""
        self._poller.register(fd, select.POLLIN)
        self._fds.add(fd)

    def forget(self, fd: int) -> None:
        """Waits for this descriptor no more."""
        self._fds.discard(fd)
        with contextlib.suppress(KeyError, FileNotFoundError, ValueError):
            self._poller.unregister(fd)

    def fds(self) -> list[int]:
        """Returns descriptors of which one is readable when `wait_any` would not wait."""
        return [self._poller.fileno()] if _HAS_EPOLL else sorted(self._fds)

    def wait_any(self, deadline: Deadline, at_most_s: float = math.inf) -> list[int]:
        """Returns what is readable; the bell too, if it rang. Empty: time is up.

        A ring is seen once, also one from before the wait.

        Args:
            deadline: when to stop waiting.
            at_most_s: when to look up in between, all the same.
        """
        left = min(deadline.left_s(), at_most_s)
        if _HAS_EPOLL:
            events = self._poller.poll(None if left == math.inf else left)
        else:
            events = self._poller.poll(None if left == math.inf else math.ceil(left * 1000))
        fds = [fd for fd, _ in events]
        if not _HAS_EPOLL and self._bell.fd in fds:
            self._bell.clear()
        return fds

    def wait_long(self) -> bool:
        """Waits without a limit; returns whether anything but the bell was heard."""
        events = self._poller.poll()
        if not _HAS_EPOLL and any(fd == self._bell.fd for fd, _ in events):
            self._bell.clear()
        return len(events) != 1 or events[0][0] != self._bell.fd

    def doze(self, deadline: Deadline, at_most_s: float) -> list[int]:
        """Waits as `wait_any`, but looking up in between is no end. Empty: time is up.

        Another thread may close this meanwhile, or just before: then the bell has rung.
        """
        try:
            while not (fds := self.wait_any(deadline, at_most_s)) and not deadline.expired():
                pass
        except ValueError:
            if not self._is_closed:
                raise
            return [self._bell.fd]
        return fds

    def close(self) -> None:
        """Frees the descriptor of the poller itself. May be called again."""
        self._is_closed = True
        if _HAS_EPOLL:
            self._poller.close()
