"""Whole messages over a socket pair, with descriptors beside them.

The engine's end never blocks in a send without reading at the same time: both
sides may have megabytes to say, and neither waits for the other to listen first.
Does not know what the messages mean.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import select
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.engine.core.deadline import Deadline

__all__ = ["Channel", "ChannelClosed", "dumps"]

_HEADER = struct.Struct("<QI")  # length of the body, number of descriptors with it
_CHUNK = 1 << 20
_MAX_FDS = 8
_FD_SIZE = array.array("i").itemsize


class ChannelClosed(Exception):
    """The other side is gone."""


def dumps(message: object) -> bytes:
    """Pickles a message; by value what cannot be imported elsewhere."""
    try:
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Lambdas, closures, classes of the main module.
        return bytes(cloudpickle.dumps(message))


class Channel:
    """One end of a two-way stream of pickled messages.

    Attributes:
        sock: the socket, for polling.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._inbox: deque[tuple[bytes, list[int]]] = deque()
        self._at_end = False

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Returns two connected ends."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self.sock.fileno()

    def send(self, message: object, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        """Sends one message, reading what comes in meanwhile.

        Raises:
            ChannelClosed: the other side is gone.
            TimeoutError: it did not take the message in time; the stream is then
                broken in the middle of a message and must be closed.
        """
        body = dumps(message)
        self.send_bytes(body, deadline, fds)

    def send_bytes(self, body: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        """Sends one pickled message; see `send`."""
        header = _HEADER.pack(len(body), len(fds))
        parts = header + body if len(body) < _CHUNK else header
        self._send_all(memoryview(parts), deadline, fds)
        if parts is header:
            self._send_all(memoryview(body), deadline, ())

    def _send_all(self, data: memoryview, deadline: Deadline, fds: Sequence[int]) -> None:
        ancillary: list[tuple[int, int, Any]] = []
        if fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        while data:
            try:
                sent = self.sock.sendmsg([data[:_CHUNK]], ancillary, socket.MSG_DONTWAIT)
            except BlockingIOError:
                self._wait(select.POLLIN | select.POLLOUT, deadline, "send")
                self._read_available()
                continue
            except OSError as exc:
                raise ChannelClosed(str(exc)) from exc
            ancillary = []
            data = data[sent:]

    def recv(self, deadline: Deadline) -> tuple[Any, list[int]]:
        """Waits for one message and returns it with its descriptors.

        Raises:
            ChannelClosed: the other side is gone and everything it sent was read.
            TimeoutError: nothing came in time; nothing has changed.
        """
        while True:
            found = self.poll_recv()
            if found is not None:
                return found
            self._wait(select.POLLIN, deadline, "recv")

    def poll_recv(self) -> tuple[Any, list[int]] | None:
        """Returns the next message if a whole one is here, else ``None``.

        Raises:
            ChannelClosed: as for `recv`.
        """
        if not self._inbox:
            self._read_available()
        if self._inbox:
            # Unpickled only now: a message that cannot be is out of the way already.
            body, fds = self._inbox.popleft()
            return pickle.loads(body), fds
        if self._at_end:
            raise ChannelClosed("the other side is gone")
        return None

    def _wait(self, events: int, deadline: Deadline, verb: str) -> None:
        if self._at_end:
            raise ChannelClosed("the other side is gone")
        poller = select.poll()
        poller.register(self.sock, events)
        if not poller.poll(deadline.left_ms()) and deadline.expired():
            raise TimeoutError(f"channel {verb} took longer than {deadline.timeout_s:g} s")

    def _read_available(self) -> None:
        while not self._at_end:
            try:
                data, ancillary, _, _ = self.sock.recvmsg(
                    _CHUNK,
                    socket.CMSG_SPACE(_MAX_FDS * _FD_SIZE),
                    socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0),
                )
            except BlockingIOError:
                break
            except OSError:
                self._at_end = True
                break
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(payload[: len(payload) - len(payload) % _FD_SIZE])
                    self._fds.extend(received)
            if not data:
                self._at_end = True
            self._buffer += data
            if len(data) < _CHUNK:
                break
        self._split()

    def _split(self) -> None:
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            length, num_fds = _HEADER.unpack_from(self._buffer, start)
            stop = start + _HEADER.size + length
            if len(self._buffer) < stop:
                break
            with memoryview(self._buffer) as view:
                body = bytes(view[start + _HEADER.size : stop])
            fds = [self._fds.popleft() for _ in range(num_fds)]
            self._inbox.append((body, fds))
            start = stop
        if start:
            del self._buffer[:start]

    def hang_up(self) -> None:
        """Ends the stream for every process that holds a copy of this end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this process's copy of this end. May be called again."""
        self.sock.close()
        for _, fds in self._inbox:
            self._fds.extend(fds)
        self._inbox.clear()
        while self._fds:
            os.close(self._fds.popleft())
