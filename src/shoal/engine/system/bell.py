"""Wake one waiter in another process.

A bell stays rung until it is cleared, so a ring before the wait is not lost. It is
an event counter where the system has one, else a pipe. Does not know why someone
is woken.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Bell"]

_HAS_EVENTFD = hasattr(os, "eventfd")
_ONE = (1).to_bytes(8, sys.byteorder)  # what an event counter takes; a pipe takes anything


class Bell:
    """A wake-up for one waiter.

    Attributes:
        fd: what the waiter polls for reading.
        ring_fd: what ringers write to; the same as ``fd`` for an event counter.
    """

    __slots__ = ("fd", "ring_fd")

    def __init__(self, fd: int, ring_fd: int) -> None:
        self.fd = fd
        self.ring_fd = ring_fd

    @classmethod
    def create(cls) -> Self:
        """Returns a new silent bell."""
        if _HAS_EVENTFD:
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            return cls(fd, fd)
        fd, ring_fd = os.pipe()
        os.set_blocking(fd, False)
        os.set_blocking(ring_fd, False)
        return cls(fd, ring_fd)

    def ring(self) -> None:
        """Wakes the waiter, now or when it next waits."""
        try:
            os.write(self.ring_fd, _ONE)
        except BlockingIOError:
            return  # a full pipe or counter is a bell that rings already

    def clear(self) -> None:
        """Silences the bell. Only the waiter calls this, and looks at the flags after."""
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Closes both ends. May be called again."""
        for fd in {self.fd, self.ring_fd} - {-1}:
            os.close(fd)
        self.fd = self.ring_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
