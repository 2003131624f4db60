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

__all__ = ["Channel", "ChannelClosed", "dumps", "loads"]

_HEADER = struct.Struct("<QI")  # length of the body, number of descriptors with it
_CHUNK = 1 << 20
_MAX_FDS = 250  # Linux allows 253 with one message
_FD_SIZE = array.array("i").itemsize


class ChannelClosed(Exception):
    """The other side is gone."""


def dumps(message: object) -> bytes:
    """Pickles a message; by value what cannot be imported elsewhere."""
    try:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(cloudpickle.dumps(message))  # lambdas, closures, local classes
    # What the main module defines is pickled by name, and is not there on the other side.
    return bytes(cloudpickle.dumps(message)) if b"__main__" in body else body


def loads(body: bytes) -> Any:
    """Returns what `dumps` pickled."""
    return pickle.loads(body)


class _Outgoing:
    """One message, and how much of it is out: the sum of ``sent``."""

    __slots__ = ("fds", "number", "parts", "sent")

    def __init__(self, number: int, parts: list[memoryview], fds: Sequence[int]) -> None:
        self.number = number
        self.parts = parts
        self.fds = fds
        self.sent: list[int] = []

    def rest(self) -> memoryview | None:
        """Returns what to send next, or ``None`` if everything is out."""
        at = sum(self.sent)
        for part in self.parts:
            if at < len(part):
                return part[at : at + _CHUNK]
            at -= len(part)
        return None


class Channel:
    """One end of a two-way stream of pickled messages.

    Ctrl-C may come at any point, above all in a system call, which is where the time
    goes. So nothing is lost or doubled between a call and the note of what it did: both
    happen in one call into C, and a message is dropped from the stream only after it
    was handed on.

    Attributes:
        sock: the socket, for polling.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received: list[tuple[Any, Any, int, Any]] = []  # what `recvmsg` returned
        self._fds: deque[int] = deque()
        self._outgoing: deque[_Outgoing] = deque()
        self._num_sent = 0
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
            TimeoutError: it did not take the message in time; the rest goes out
                before the next message, or with `flush`.
        """
        body = dumps(message)
        self.send_bytes(body, deadline, fds)

    def send_bytes(self, body: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        """Sends one pickled message; see `send`."""
        self.queue_bytes(body, fds)
        self.flush(deadline)

    def queue_bytes(self, body: bytes, fds: Sequence[int] = ()) -> None:
        """Puts one pickled message behind those that `flush` has still to send."""
        header = _HEADER.pack(len(body), len(fds))
        parts = [header + body] if len(body) < _CHUNK else [header, body]
        number = self.num_queued + 1
        self._outgoing.append(_Outgoing(number, [memoryview(part) for part in parts], fds))

    @property
    def num_queued(self) -> int:
        """How many messages were queued so far, those included that are out."""
        return self._outgoing[-1].number if self._outgoing else self._num_sent

    @property
    def has_unsent(self) -> bool:
        """Whether a `send` was cut off before the other side had taken everything."""
        return bool(self._outgoing)

    def flush(self, deadline: Deadline) -> None:
        """Sends what is queued; after an interrupt, from where it was cut off.

        Raises: as `send`.
        """
        flags = [socket.MSG_DONTWAIT]
        while self._outgoing:
            first = self._outgoing[0]
            rest = first.rest()
            if rest is None:
                self._num_sent = first.number
                self._outgoing.popleft()
                continue
            ancillary: list[tuple[int, int, Any]] = []
            if first.fds and not first.sent:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", first.fds))]
            try:
                first.sent.extend(map(self.sock.sendmsg, [[rest]], [ancillary], flags))
            except BlockingIOError:
                self._wait(select.POLLIN | select.POLLOUT, deadline, "send")
                self._read_available()
            except OSError as exc:
                raise ChannelClosed(str(exc)) from exc

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
        found = self.peek()
        if found is not None:
            self.drop()
        return found

    def peek(self) -> tuple[Any, list[int]] | None:
        """Returns what `poll_recv` would, and leaves it there until `drop`."""
        size, num_fds = self._first_message()
        if not size:
            self._read_available()
            size, num_fds = self._first_message()
        if not size:
            if self._at_end:
                raise ChannelClosed("the other side is gone")
            return None
        try:
            message = pickle.loads(self._received[0][0][_HEADER.size : size])
        except Exception:
            self.drop()  # one that cannot be rebuilt must not bar the way
            raise
        return message, [self._fds.popleft() for _ in range(num_fds)]

    def drop(self) -> None:
        """Takes the message that `peek` returned out of the stream."""
        size, _ = self._first_message()
        rest = self._received[0][0][size:]
        self._received[:1] = [(rest, (), 0, None)] if rest else []

    def _wait(self, events: int, deadline: Deadline, verb: str) -> None:
        if self._at_end:
            raise ChannelClosed("the other side is gone")
        poller = select.poll()
        poller.register(self.sock, events)
        if not poller.poll(deadline.left_ms()) and deadline.expired():
            raise TimeoutError(f"channel {verb} took longer than {deadline.timeout_s:g} s")

    def _read_available(self) -> None:
        flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
        space = socket.CMSG_SPACE(_MAX_FDS * _FD_SIZE)
        while not self._at_end:
            try:
                self._received.extend(map(self.sock.recvmsg, [_CHUNK], [space], [flags]))
            except BlockingIOError:
                return
            except OSError:
                self._at_end = True
                return
            data, ancillary, _, _ = self._received[-1]
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(payload[: len(payload) - len(payload) % _FD_SIZE])
                    self._fds.extend(received)
            if not data:
                self._at_end = True
            if len(data) < _CHUNK:
                return

    def _first_message(self) -> tuple[int, int]:
        """Returns size and descriptors of the first message; 0 unless all of it is here.

        If it is, it lies in one piece at the start of what was received.
        """
        available = sum(len(received[0]) for received in self._received)
        if available < _HEADER.size:
            return 0, 0
        if len(self._received[0][0]) < _HEADER.size:
            self._join()
        length, num_fds = _HEADER.unpack_from(self._received[0][0])
        size = _HEADER.size + int(length)
        if available < size:
            return 0, 0
        if len(self._received[0][0]) < size:
            self._join()
        return size, num_fds

    def _join(self) -> None:
        joined = b"".join([received[0] for received in self._received])
        self._received[:] = [(memoryview(joined), (), 0, None)]

    def hang_up(self) -> None:
        """Ends the stream for every process that holds a copy of this end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes this process's copy of this end. May be called again."""
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())
