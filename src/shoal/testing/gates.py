"""A point that an env reaches and a test opens, whatever processes they run in.

Two named pipes in a folder: the env writes to one and waits at the other. So a test
orders events without a sleep, and a gate whose test is gone lets nobody wait for ever.
Knows the operating system; does not know envs or engines.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Gate", "GateClosed"]


class GateClosed(Exception):
    """The test that holds the gate is gone, or did not open it in time."""


class Gate:
    """One gate. Picklable: a copy in another process is the same gate.

    The process that makes it holds it, as a context manager or until `close`.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, Gate(folder) as gate:
        ...     gate.open()
        ...     gate.enter()  # an env does this, in its worker
        ...     gate.wait_reached(timeout=10)
    """

    def __init__(self, folder: str | os.PathLike[str], name: str = "gate") -> None:
        """Makes the pipes.

        Args:
            folder: where to put them; a temporary folder.
            name: tells gates in one folder apart.
        """
        self._reached = Path(folder, f"{name}.reached")
        self._opened = Path(folder, f"{name}.opened")
        for path in (self._reached, self._opened):
            os.mkfifo(path)
        # Open for both, so that whoever comes later finds the other side there.
        self._reached_fd = os.open(self._reached, os.O_RDWR | os.O_NONBLOCK)
        self._opened_fd = os.open(self._opened, os.O_RDWR | os.O_NONBLOCK)

    # --- in the env ----------------------------------------------------------------

    def enter(self, timeout: float = 60.0) -> None:
        """Says that the gate is reached, then waits until it is opened once.

        Raises:
            GateClosed: nobody opened it in time, or nobody holds it any more.
        """
        try:
            opened_fd = os.open(self._opened, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            raise GateClosed(f"{self._opened} is gone") from None
        try:
            reached_fd = os.open(self._reached, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(reached_fd, b".")
            finally:
                os.close(reached_fd)
            if not _read_one(opened_fd, timeout):
                raise GateClosed(f"{self._opened} was not opened within {timeout:g} s")
        finally:
            os.close(opened_fd)

    # --- in the test ---------------------------------------------------------------

    def wait_reached(self, timeout: float) -> None:
        """Waits until somebody stands at the gate; each arrival counts once.

        Raises:
            TimeoutError: nobody came in time.
        """
        if not _read_one(self._reached_fd, timeout):
            raise TimeoutError(f"nobody reached {self._reached} within {timeout:g} s")

    def open(self, times: int = 1) -> None:
        """Lets ``times`` arrivals pass, those that wait and those to come."""
        os.write(self._opened_fd, b"." * times)

    def close(self) -> None:
        """Gives the gate up; whoever waits there gets `GateClosed`. May be called again."""
        for fd in {self._reached_fd, self._opened_fd} - {-1}:
            os.close(fd)
        self._reached_fd = self._opened_fd = -1
        for path in (self._reached, self._opened):
            with suppress(FileNotFoundError):
                path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # The descriptors stay with the holder.
        return {**self.__dict__, "_reached_fd": -1, "_opened_fd": -1}


def _read_one(fd: int, timeout: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(max(0, round(timeout * 1000))):
        return False
    try:
        return bool(os.read(fd, 1))
    except BlockingIOError:  # another one at the gate was faster
        return False
