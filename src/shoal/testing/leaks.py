"""What a block of code left behind: processes, threads, descriptors, shared memory.

Looks at the system before and after, and gives what is on its way out some time to
go. Reads /proc, so descriptors and processes are seen on Linux only; threads are those
that Python knows, since native libraries keep pools of their own for good.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LeakError", "Traces", "find_marked", "look", "no_leaks"]

_PROC = Path("/proc")
_SHM = Path("/dev/shm")
# Helpers that other libraries start once, on first use, and keep.
_KEPT_PROCESSES = ("multiprocessing.resource_tracker", "torch_shm_manager")
_KEPT_DESCRIPTORS = ("/dev/urandom", "/dev/random", "/dev/null")
_KEPT_THREADS = ("pytest_timeout", "tqdm")


class LeakError(AssertionError):
    """Something was left behind; the text says what."""


@dataclass(frozen=True, slots=True)
class Traces:
    """What can be seen of this process at one moment.

    Attributes:
        processes: all descendants; pid to command line and state.
        threads: Python threads; ident to name.
        descriptors: number to what it is.
        blocks: names in /dev/shm.
    """

    processes: dict[int, str]
    threads: dict[int, str]
    descriptors: dict[int, str]
    blocks: frozenset[str]

    def describe_new(self, before: Traces) -> list[str]:
        """Returns a line for each thing that was not there before."""
        new = [
            f"process {pid}: {text}"
            for pid, text in self.processes.items()
            if pid not in before.processes
        ]
        new += [
            f"thread {name}" for ident, name in self.threads.items() if ident not in before.threads
        ]
        new += [
            f"descriptor {fd}: {target}"
            for fd, target in self.descriptors.items()
            if before.descriptors.get(fd) != target
        ]
        blocks = self.blocks - before.blocks
        if blocks:
            blocks -= _used_by_strangers()
        new += [f"/dev/shm/{name}" for name in sorted(blocks)]
        return new


def look() -> Traces:
    """Returns what can be seen now."""
    return Traces(
        processes=_descendants(os.getpid()),
        threads=_threads(),
        descriptors=_descriptors(),
        blocks=frozenset(os.listdir(_SHM)) if _SHM.is_dir() else frozenset(),
    )


@contextmanager
def no_leaks(grace_s: float = 10.0) -> Iterator[None]:
    """Checks that the block leaves nothing behind.

    Args:
        grace_s: how long what is still there after the block may take to go.

    Raises:
        LeakError: something is there that was not before. Not raised where the block
            itself raises.
    """
    before = look()
    yield
    until = time.monotonic() + grace_s
    pause = 0.001
    while left := look().describe_new(before):
        if time.monotonic() > until:
            raise LeakError("left behind:\n  " + "\n  ".join(left))
        gc.collect()  # an error's traceback may hold an engine
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def find_marked(marker: str) -> dict[int, str]:
    """Returns all processes started with ``marker`` in their environment, except this.

    Finds orphans too, which are nobody's descendants.
    """
    found = {}
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if marker.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = _describe_process(int(folder.name))
    return found


def _descendants(pid: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for child in _children(pid):
        if child in found:
            continue
        text = _describe_process(child)
        if text and not any(kept in text for kept in _KEPT_PROCESSES):
            found[child] = text
            found |= _descendants(child)
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def _describe_process(pid: int) -> str:
    try:
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return f"[{state}] {command[-200:]}".strip()


def _used_by_strangers() -> set[str]:
    """Returns the names in /dev/shm that processes which are not ours have mapped."""
    ours = {os.getpid(), *_descendants(os.getpid())}
    used = set()
    for folder in _PROC.iterdir() if _PROC.is_dir() else ():
        if folder.name.isdigit() and int(folder.name) not in ours:
            with suppress(OSError):
                for line in (folder / "maps").read_text().splitlines():
                    name = line.partition(f"{_SHM}/")[2]
                    if name:
                        used.add(name.removesuffix(" (deleted)"))
    return used


def _threads() -> dict[int, str]:
    return {
        id(thread): thread.name
        for thread in threading.enumerate()
        if not any(kept in thread.name for kept in _KEPT_THREADS)
    }


def _descriptors() -> dict[int, str]:
    found = {}
    with suppress(OSError):
        for name in os.listdir(_PROC / "self" / "fd"):
            with suppress(OSError):  # the one that lists them is gone
                target = os.readlink(_PROC / "self" / "fd" / name)
                if target not in _KEPT_DESCRIPTORS:
                    found[int(name)] = target
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    kept = getattr(getattr(tracker, "_resource_tracker", None), "_fd", None)
    if kept is not None:
        found.pop(kept, None)
    return found
