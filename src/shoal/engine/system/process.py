"""Start the server process of a pool, talk to it, end it.

Knows processes and deadlines. Does not know what workers do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from shoal.engine.core.deadline import Deadline
from shoal.engine.system.channel import Channel, ChannelClosed
from shoal.engine.system.server import (
    Kill,
    Preload,
    Serving,
    Spawn,
    interpreter_args,
    serve,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ServerProcess", "StartMethod"]

StartMethod = Literal["forkserver", "spawn", "fork"]
"""How workers come to life.

``forkserver``: forked from a fresh interpreter that imported only what workers need.
``spawn``: a fresh interpreter each. ``fork``: forked from the calling process, with all
it holds; needs no pickling, and is as safe as any fork of a process with threads.
"""


class ServerProcess:
    """The server of one pool, as seen from the process that owns it.

    Attributes:
        control: the channel to it; readable when a worker was started or has ended.
        pid: its process id.
    """

    def __init__(self, control: Channel, pid: int, popen: subprocess.Popen[bytes] | None) -> None:
        self.control = control
        self.pid = pid
        self._popen = popen
        self._reaped = False

    @classmethod
    def start(
        cls, method: StartMethod, preload: Sequence[str], inherited: Any, deadline: Deadline
    ) -> ServerProcess:
        """Starts a server and waits until it serves.

        Raises:
            TimeoutError: it did not come up in time.
            ChannelClosed: it ended at once.
        """
        ours, theirs = Channel.pair()
        try:
            server = _fork(ours, theirs, inherited) if method == "fork" else _exec(ours, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            if method != "fork":
                # A worker with an interpreter of its own shares nothing with the server.
                ours.send(Preload(() if method == "spawn" else tuple(preload)), deadline)
            reply, _ = ours.recv(deadline)
            assert isinstance(reply, Serving)
        except BaseException:
            server.stop(Deadline.after(0))
            raise
        return server

    def spawn(self, worker_id: int, entry: str, fd: int, fresh: bool, deadline: Deadline) -> None:
        """Asks for a worker; the answer arrives on ``control``."""
        self.control.send(Spawn(worker_id, entry, fresh), deadline, [fd])

    def kill(self, worker_id: int) -> None:
        """Kills a worker if it still runs. Never fails: a dead server has none."""
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self.control.send(Kill(worker_id), Deadline.after(5))

    def stop(self, deadline: Deadline) -> None:
        """Ends the server, and with it every worker that is left. May be called again."""
        self.control.hang_up()
        self.control.close()
        if self._reaped:
            return
        # It has nothing to do but to kill and reap; if that takes long it is stuck.
        grace = deadline.at_most(2.0)
        if not self._wait(max(grace.left_s(), 0.5)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._wait(5.0)
        self._reaped = True

    def _wait(self, timeout_s: float) -> bool:
        """Waits until the server has ended and reaps it."""
        if self._popen is not None:
            try:
                self._popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return False
            return True
        return _wait_pid(self.pid, Deadline.after(timeout_s))


def _exec(ours: Channel, theirs: Channel) -> ServerProcess:
    fd = theirs.fileno()
    code = f"from shoal.engine.system.server import main; main({fd}, {os.getpid()})"
    popen = subprocess.Popen(interpreter_args(code), pass_fds=[fd], stdin=subprocess.DEVNULL)
    return ServerProcess(ours, popen.pid, popen)


def _fork(ours: Channel, theirs: Channel, inherited: Any) -> ServerProcess:
    parent_pid = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        # What is still buffered would be written once more by every process below.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    pid = os.fork()
    if pid:
        return ServerProcess(ours, pid, None)
    try:
        # The caller's exit handlers are his: they remove his temporary files, for one.
        atexit._clear()
        ours.close()
        serve(theirs, parent_pid, inherited)
    finally:
        # Whatever the caller's stack holds above us is not ours to unwind.
        os._exit(0)


def _wait_pid(pid: int, deadline: Deadline) -> bool:
    while True:
        try:
            done, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return True
        if done:
            return True
        if deadline.expired():
            return False
        time.sleep(0.001)
