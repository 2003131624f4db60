"""The process that starts, reaps and kills the workers of one pool.

A fresh interpreter that has imported what workers need, and nothing else: a worker
is forked from it in milliseconds, shares its memory, and never sees the user's main
module, torch, or the threads of the user's process. When the user's process is gone,
for whatever reason, the server kills every worker and ends.

Knows the operating system and the records below. What a worker does is named by an
entry point, ``"module:function"``, which is called with the worker's end of its
channel and with what was inherited by fork, if anything.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.engine.core.deadline import NEVER, Deadline
from shoal.engine.system.channel import Channel, ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Exited", "Kill", "Preload", "Serving", "Spawn", "Spawned", "main", "serve"]

_MPI_PREFIXES = ("OMPI_", "PMI_", "PMIX_")
_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_MS = 1000  # how often to look for the parent where the system can't tell


@dataclass(frozen=True, slots=True)
class Preload:
    """Import these modules before the first worker is forked."""

    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker; its end of the channel comes along.

    ``fresh_interpreter`` is for libraries that do not bear a fork.
    """

    worker_id: int
    entry: str
    fresh_interpreter: bool


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a worker that still runs."""

    worker_id: int


@dataclass(frozen=True, slots=True)
class Serving:
    """The server is up."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """A worker runs."""

    worker_id: int
    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker has ended; negative for a signal."""

    worker_id: int
    exitcode: int


def main(control_fd: int, parent_pid: int) -> None:
    """Runs the server in a fresh interpreter until the parent is gone."""
    control = Channel(socket.socket(fileno=control_fd))
    # BLAS makes a thread per core at import, in every process, for nothing: the cores
    # are busy with envs. The variables are taken back so that programs started by an
    # environment don't inherit them.
    hidden = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    ours = [name for name in hidden if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    command, _ = control.recv(NEVER)
    for module in command.modules:
        # A module that cannot be imported here will say so where it is needed; and what a
        # foreign one raises while it is imported may be anything.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    for name in ours:
        del os.environ[name]
    try:
        serve(control, parent_pid, inherited=None)
    finally:
        control.close()


def serve(control: Channel, parent_pid: int, inherited: Any) -> None:
    """Starts, reaps and kills workers until the parent is gone; then kills the rest."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    for name in [name for name in os.environ if name.startswith(_MPI_PREFIXES)]:
        del os.environ[name]  # an env that imports MPI is no rank of the caller's job
    children: dict[int, int] = {}  # pid -> worker_id
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    gc.collect()
    gc.freeze()  # keeps the collector from copying shared pages in every worker
    poller = select.poll()
    poller.register(control.fileno(), select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    parent_fd = _open_pidfd(parent_pid)
    if parent_fd is not None:
        poller.register(parent_fd, select.POLLIN)
    try:
        control.send(Serving(), Deadline.after(60))
        while True:
            events = poller.poll(-1 if parent_fd is not None else _PARENT_CHECK_MS)
            if parent_fd is None and os.getppid() != parent_pid:
                return
            if any(fd == parent_fd for fd, _ in events):
                return
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _reap(control, children)
            while (found := control.poll_recv()) is not None:
                _carry_out(*found, control, children, inherited, [wake_read, wake_write])
    except ChannelClosed:
        return
    finally:
        _kill_all(children)


def _carry_out(
    command: Any,
    fds: list[int],
    control: Channel,
    children: dict[int, int],
    inherited: Any,
    own_fds: list[int],
) -> None:
    match command:
        case Spawn(worker_id, entry, fresh_interpreter):
            pid = _fork_worker(entry, fds[0], fresh_interpreter, control, inherited, own_fds)
            children[pid] = worker_id
            os.close(fds[0])
            control.send(Spawned(worker_id, pid), Deadline.after(60))
        case Kill(worker_id):
            # Only children that have not been reaped are here, so the pid is theirs.
            for pid, child in children.items():
                if child == worker_id:
                    os.kill(pid, signal.SIGKILL)


def _reap(control: Channel, children: dict[int, int]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            worker_id = children.pop(pid)
            exitcode = os.waitstatus_to_exitcode(status)
            control.send(Exited(worker_id, exitcode), Deadline.after(60))


def _kill_all(children: dict[int, int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _fork_worker(
    entry: str,
    fd: int,
    fresh_interpreter: bool,
    control: Channel,
    inherited: Any,
    own_fds: list[int],
) -> int:
    server_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        for own_fd in own_fds:
            os.close(own_fd)
        _die_with(server_pid)
        if fresh_interpreter:
            os.set_inheritable(fd, True)
            os.execv(sys.executable, interpreter_args(_worker_code(entry, fd)))
        run_worker(entry, fd, inherited)
        code = 0
    except SystemExit as exc:
        # An env that calls sys.exit() ends its worker with the code it asked for.
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # outermost frame of the process: report, then end  # noqa: BLE001 - the outermost frame reports it
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def run_worker(entry: str, fd: int, inherited: Any = None) -> None:
    """Runs a worker's entry point in this process, and its exit handlers after it."""
    with contextlib.suppress(Exception):  # stderr may be anything, or closed
        faulthandler.enable()
    module_name, _, function_name = entry.partition(":")
    run: Callable[[Channel, Any], None] = getattr(
        importlib.import_module(module_name), function_name
    )
    channel = Channel(socket.socket(fileno=fd))
    try:
        run(channel, inherited)
    finally:
        channel.close()
    # os._exit skips these, and an env library may have registered some.
    atexit._run_exitfuncs()


def interpreter_args(code: str) -> list[str]:
    """Returns the command line of a fresh interpreter like this one that runs ``code``."""
    import subprocess

    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", f"{_path_code()}{code}"]


def _path_code() -> str:
    # The same modules have to be found, whatever the user did to the path.
    paths: Sequence[str] = list(sys.path)
    return f"import sys; sys.path[:] = {paths!r}; sys.argv[:] = {sys.argv[:1]!r}; "


def _worker_code(entry: str, fd: int) -> str:
    return (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"from shoal.engine.system.server import run_worker; run_worker({entry!r}, {fd})"
    )


def _open_pidfd(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _die_with(server_pid: int) -> None:
    """Asks the system to kill this process when the server is gone."""
    if sys.platform != "linux":
        return  # the server kills its workers when it ends in any orderly way
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        os._exit(1)  # it was gone before the request
