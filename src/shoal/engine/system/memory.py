"""One block of shared memory, without a name.

The block is an anonymous file passed on by descriptor, so nothing stays behind in
the file system, whatever kills its users. Does not know what lies in it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Slab"]


class Slab:
    """A mapped, shared, writable block.

    The creator closes it, and each process that attached to it. Views that are still
    alive at `close` keep the mapping (not the descriptor) until they are gone.

    Attributes:
        fd: the descriptor that another process needs to attach.
        memory: the mapped bytes.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.memory: mmap.mmap | None = None
        try:
            self.memory = mmap.mmap(fd, max(nbytes, 1))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def create(cls, nbytes: int, *, on_disk: bool = False) -> Self:
        """Returns a new zeroed block of ``nbytes``, in memory or in a file on disk."""
        fd = _anonymous_file(on_disk)
        try:
            os.ftruncate(fd, max(nbytes, 1))
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Self:
        """Maps a block that another process created; takes over ``fd``."""
        return cls(fd, nbytes)

    def close(self) -> None:
        """Gives the block back. May be called again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        memory, self.memory = self.memory, None
        if memory is not None:
            try:
                memory.close()
            except BufferError:
                # Somebody still holds a view. Dropping our reference is enough: the
                # mapping goes with the last view.
                del memory

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _anonymous_file(on_disk: bool) -> int:
    if hasattr(os, "memfd_create") and not on_disk:
        return os.memfd_create("shoal", os.MFD_CLOEXEC)
    # A file that is deleted while it is open; also where there are no memory files.
    fd, path = tempfile.mkstemp(prefix="shoal-")
    os.unlink(path)
    return fd
