"""Pickling that keeps what is shared between processes shared.

Knows the reductions of ``multiprocessing``, to which libraries add theirs (torch adds
tensors), and descriptors. Does not know what the objects mean.

``multiprocessing`` pickles shared memory, semaphores and connections only for a child
that it starts itself. Our workers have another parent, so the descriptors that its
reductions ask for are collected here, and sent beside the bytes.
"""

from __future__ import annotations

import os
import pickle
import threading
from collections import ChainMap
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["dumps_sharing", "loads_sharing"]

_lock = threading.Lock()
_received: list[int] = []  # while something is unpickled: the descriptors that came along


def dumps_sharing(value: object) -> tuple[bytes, list[int]]:
    """Pickles a value, by value what cannot be imported, by descriptor what is shared.

    Returns:
        The bytes, and the descriptors to send with them. They belong to the value and
        are open as long as it lives.
    """
    carrier = _Carrier()
    # Here, because importing it costs as much as the rest of the engine, and few need it.
    from multiprocessing import context, reduction

    table = cloudpickle.Pickler.dispatch_table
    extra = {
        kind: partial(_reduce, reducer, table)
        for kind, reducer in reduction.ForkingPickler._extra_reducers.items()  # type: ignore[attr-defined]
    }
    before = context.get_spawning_popen()
    # For the whole class, because TorchRL pickles the functions of its creators in a
    # pickler of their own; one thread at a time, because the class is everybody's.
    with _lock:
        context.set_spawning_popen(carrier)  # type: ignore[arg-type]
        cloudpickle.Pickler.dispatch_table = ChainMap(extra, table)
        try:
            return cloudpickle.dumps(value), carrier.fds
        finally:
            cloudpickle.Pickler.dispatch_table = table
            context.set_spawning_popen(before)


def loads_sharing(body: bytes, fds: Sequence[int]) -> Any:
    """Returns what `dumps_sharing` pickled; closes the descriptors."""
    global _received
    _received = list(fds)
    try:
        return cloudpickle.loads(body)
    finally:
        _received = []
        for fd in fds:
            os.close(fd)


def _reduce(reducer: Callable[[Any], Any], otherwise: Any, value: Any) -> Any:
    # Only what is shared already: the reductions of torch would move what is not into
    # shared memory, and then two envs that were to have a copy each would have one.
    if not _may_be_shared(value):
        usual = otherwise.get(type(value))
        return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if usual is None else usual(value)
    return reducer(value)


def _may_be_shared(value: Any) -> bool:
    """Returns false for a tensor or a storage that is not in shared memory."""
    # torch's older kind of storage warns when it is asked anything itself.
    inner = getattr(value, "_untyped_storage", None)
    is_shared = getattr(value if inner is None else inner, "is_shared", None)
    return is_shared is None or bool(is_shared())


class _Carrier:
    """What ``multiprocessing`` takes for the child that is being started."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1

    def DupFd(self, index: int) -> _Handle:  # the name is multiprocessing's
        return _Handle(index)


class _Handle:
    """A descriptor on its way; `detach` gives it to whoever unpickles."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return os.dup(_received[self.index])
