"""An engine for several threads and event loops at once.

Knows the engine's verbs and how a backend makes a noise. Does not know what a front end
wants of results.

A wait must not keep others from sending, so nobody holds the lock while he waits. One
thread at a time dozes until the backend makes a noise; other threads wait for him to
tell them, and event loops watch the same descriptors. Whoever hears a noise looks for
all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from shoal.engine.api import Engine
from shoal.engine.core.deadline import Deadline, stopwatch
from shoal.engine.core.layout import Op
from shoal.engine.core.lifecycle import EngineState
from shoal.errors import BrokenError, ClosedError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine.env import EnvFactory

__all__ = ["ConcurrentEngine"]

Array = np.ndarray[Any, Any]
T = TypeVar("T")
_STEP, _AUTORESET = int(Op.STEP), int(Op.STEP_AUTORESET)
# A Ctrl-C that comes just before the system call does not end it; so it is noticed soon.
_LONGEST_WAIT_S = 1.0
_NOW = 0.0
_CLOSED_MEANWHILE = "the envs were closed while somebody waited for them"


@dataclass(eq=False, slots=True)
class _Waiter:
    """A coroutine that waits.

    Attributes:
        is_ready: whether there is something for it; called with the lock held.
        env_id: the only env that it waits for, if so.
        future: ends its wait.
        loop: where it runs.
        thread_id: where that runs.
    """

    is_ready: Callable[[], bool]
    env_id: int | None
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    thread_id: int

    def tell(self) -> None:
        """Ends the wait; from any thread."""
        with contextlib.suppress(RuntimeError):  # its loop has ended
            if self.thread_id == threading.get_ident():
                _end_wait(self.future)
            else:
                self.loop.call_soon_threadsafe(_end_wait, self.future)


class _Watch:
    """One event loop that watches the backend's descriptors."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fds: Sequence[int]) -> None:
        self.loop = loop
        self.num_waiters = 0
        # Descriptors of our own: those of a backend that was closed meanwhile may
        # already be somebody else's.
        self.fds = [os.dup(fd) for fd in fds]

    def start(self, on_noise: Callable[[], None]) -> None:
        for fd in self.fds:
            self.loop.add_reader(fd, on_noise)

    def stop(self) -> None:
        for fd in self.fds:
            self.loop.remove_reader(fd)
            os.close(fd)
        self.fds.clear()


class ConcurrentEngine(Engine):
    """An `Engine` that threads and coroutines may share.

    Its own verbs take a lock. A front end that reads rows, or decides by what is in
    flight, holds `lock` meanwhile; and waits with `wait` or `wait_async`, which let go
    of it.

    Attributes:
        lock: reentrant. Held only for moments, except by the synchronous verbs.
        on_rows: called after `step_rows` and `reset_rows` with their ids, the moment they
            began, and ``is_reset``.
    """

    def __init__(self, factories: Sequence[EnvFactory], **options: Any) -> None:
        """Takes what `Engine` takes."""
        super().__init__(factories, **options)
        self.lock = threading.RLock()
        self._told = threading.Condition(self.lock)
        self._has_dozer = False
        self._is_up = threading.Event()
        self._is_up.set()
        self._num_waiting = 0
        self._watches: dict[asyncio.AbstractEventLoop, _Watch] = {}
        self._waiters: set[_Waiter] = set()
        # Those of a single env by its id: with a coroutine per env, looking at all of them
        # for each result would take longer than the steps.
        self._waiters_of: dict[int, set[_Waiter]] = {}
        self._death: WorkerDied | None = None
        self.on_rows: Callable[..., None] = _nothing
        self.rows.timed[0] = True

    # --- rows, for front ends ------------------------------------------------------

    @property
    def in_flight(self) -> Array:
        """Bool ``[num_envs]``: who was sent and not taken back. A live view."""
        return self._driver.slots.in_flight

    def send_steps(self, actions: Any, env_ids: Array | None, *, autoreset: bool) -> None:
        """Starts a step of idle envs (``None``: all), ids ascending. Does not wait.

        Raises: as `send`.
        """
        with self.lock:
            driver = self._driver
            self._check_sendable(env_ids)
            driver.start_step(actions, env_ids, _AUTORESET if autoreset else _STEP)
            driver.is_claimed[... if env_ids is None else env_ids] = True
            self._settle_at_once()

    def send_resets(
        self,
        env_ids: Array,
        *,
        seeds: Sequence[int | None] | None = None,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts resets of idle envs, ids ascending. Does not wait.

        Raises: as `send`.
        """
        with self.lock:
            driver = self._driver
            self._check_sendable(env_ids)
            driver.start_resets(env_ids, seeds, kwargs)
            driver.is_claimed[env_ids] = True
            if self._num_waiting and self.rows.status[env_ids].any():
                # Prepared ahead: nobody makes a noise for these.
                self._backend.poke()
            self._settle_at_once()

    def _check_sendable(self, env_ids: Array | None) -> None:
        driver = self._driver
        if self.is_broken:
            self._raise_broken()
        driver.check_usable("send", self._deadline(self.config.timeout))
        driver.check_no_reset("send")
        driver.slots.check_idle(env_ids, "send")

    def take(self, env_ids: Array) -> None:
        """Takes back envs that are ready; the results stay in `rows` until they are sent.

        Raises:
            EnvError: some of them raised. All of them are idle then.
        """
        driver = self._driver
        failures = driver.take(env_ids, foretells=False)
        if self._watches:
            self._tell_others(env_ids)
        if failures:
            raise driver.failure(env_ids, failures, after_reset=False)

    # --- waiting -------------------------------------------------------------------

    def wait(
        self,
        pick: Callable[[], T | None],
        deadline: Deadline,
        is_ready: Callable[[], bool] | None = None,
    ) -> T | None:
        """Returns what ``pick`` finds, as soon as it does; ``None`` if time is up.

        Args:
            pick: called with the lock held, at first and whenever something has happened;
                returns ``None`` for "not yet".
            deadline: when to give up.
            is_ready: whether ``pick`` would find something, from arrays alone: whoever hands
                a row over may ask, on any thread, to spare this one a look in vain.

        Raises:
            WorkerDied: a worker has ended, and there is nothing for ``pick``.
            ClosedError: the engine was closed.
        """
        with self.lock:
            while True:
                found = self._look(pick)
                if found is not None:
                    return found
                self._num_waiting += 1
                try:
                    if self._has_dozer:
                        # What is not enough for the one who dozes may be enough here.
                        self._backend.arm(True, watched=bool(self._watches))
                        if (found := self._look(pick)) is not None:
                            return found
                        self._told.wait(deadline.at_most(_LONGEST_WAIT_S).left_s())
                    elif (found := self._doze(pick, deadline, is_ready)) is not None:
                        return found
                finally:
                    self._num_waiting -= 1
                    self._rest()
                if deadline.expired():
                    return self._look(pick)

    def _doze(
        self,
        pick: Callable[[], T | None],
        deadline: Deadline,
        is_ready: Callable[[], bool] | None,
    ) -> T | None:
        """Waits without the lock for the next noise; looks once more before that."""
        backend = self._backend
        self._has_dozer = True
        try:
            is_alone = self._num_waiting == 1
            backend.arm(True, watched=bool(self._watches), is_due=is_ready if is_alone else None)
            found = self._look(pick)
            if found is not None:
                return found
            self._is_up.clear()
            self.lock.release()
            try:
                news = backend.doze(deadline.at_most(_LONGEST_WAIT_S))
            finally:
                self._is_up.set()
                self.lock.acquire()
            self._hear(news)
        finally:
            self._is_up.set()  # also where an interrupt came before the doze
            self._has_dozer = False
            self._told.notify_all()
        return None

    async def wait_async(
        self,
        pick: Callable[[], T | None],
        is_ready: Callable[[], bool],
        timeout: float | None,
        *,
        env_id: int | None = None,
    ) -> T | None:
        """Does what `wait` does, and lets the event loop run meanwhile.

        Args:
            pick: as for `wait`. Called by the coroutine itself, so that one which is
                cancelled takes nothing with it.
            is_ready: whether ``pick`` would find something.
            timeout: seconds; ``None`` for no limit.
            env_id: the only env whose result can make it ready, if there is only one.

        Raises: as `wait`.
        """
        deadline = Deadline.after(timeout)
        with self.lock:
            if (found := self._look(pick)) is not None:
                return found
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        waiter = _Waiter(is_ready, env_id, future, loop, threading.get_ident())
        watch = self._join(waiter)
        # A bit later than that: a timer may go off a moment before its time.
        alarm = None if timeout is None else loop.call_later(deadline.left_s() + 1e-3, waiter.tell)
        try:
            while True:
                with self.lock:
                    if self._driver.state is EngineState.OPEN:
                        self._backend.arm(True)
                    if (found := self._look(pick)) is not None or deadline.expired():
                        return found
                    waiter.future = loop.create_future()
                await waiter.future
        finally:
            if alarm is not None:
                alarm.cancel()
            self._leave(watch, waiter)

    def _join(self, waiter: _Waiter) -> _Watch:
        with self.lock:
            if self._driver.state is EngineState.CLOSED:
                raise ClosedError(_CLOSED_MEANWHILE)
            watch = self._watches.get(waiter.loop)
            if watch is None:
                watch = self._watches[waiter.loop] = _Watch(waiter.loop, self._backend.wake_fds())
                watch.start(self._on_noise)
            watch.num_waiters += 1
            self._group_of(waiter).add(waiter)
            self._num_waiting += 1
            return watch

    def _leave(self, watch: _Watch, waiter: _Waiter) -> None:
        with self.lock:
            self._group_of(waiter).remove(waiter)
            self._num_waiting -= 1
            self._rest()
            watch.num_waiters -= 1
            if not watch.num_waiters:
                del self._watches[watch.loop]
                watch.stop()

    def _group_of(self, waiter: _Waiter) -> set[_Waiter]:
        if waiter.env_id is None:
            return self._waiters
        return self._waiters_of.setdefault(waiter.env_id, set())

    def _on_noise(self) -> None:
        """Called by an event loop when the backend has made a noise."""
        # An event loop does not wait for a lock. Who has it, or dozes, hears it too.
        if not self.lock.acquire(blocking=False):
            return
        try:
            if self._driver.state is not EngineState.CLOSED and not self._has_dozer:
                self._hear(self._backend.doze(Deadline.after(_NOW)))
            self._settle()
        finally:
            self.lock.release()

    def _look(self, pick: Callable[[], T | None]) -> T | None:
        if self._driver.state is EngineState.CLOSED:
            raise ClosedError(_CLOSED_MEANWHILE)
        found = pick()
        if found is None and self.is_broken:
            self._raise_broken()
        return found

    def _raise_broken(self) -> NoReturn:
        if self._death is None:
            self._hear([])  # it was noticed by another verb
        if self._death is None:
            raise BrokenError("the engine is broken, as an earlier error said: close it")
        # One for each who asks: a traceback belongs to one thread.
        raise copy.copy(self._death) from self._death.__cause__

    def _hear(self, news: list[int]) -> None:
        if self._driver.state is EngineState.CLOSED:
            return
        try:
            self._backend.take_news(news)
        except WorkerDied as died:
            self._driver.state = EngineState.BROKEN
            self._death = died
        self._settle()

    def _settle(self) -> None:
        """Tells everybody for whom there is something."""
        self._told.notify_all()
        if not self._watches:
            return
        if self._death is not None or self._driver.state is not EngineState.OPEN:
            for waiter in (*self._waiters, *chain(*self._waiters_of.values())):
                waiter.tell()
            return
        for env_id in (self.in_flight & (self.rows.status != 0)).nonzero()[0].tolist():
            for waiter in self._waiters_of.get(env_id, ()):
                if not waiter.future.done():
                    waiter.tell()
        for waiter in self._waiters:
            if not waiter.future.done() and waiter.is_ready():
                waiter.tell()

    def _tell_others(self, env_ids: Array) -> None:
        """Tells coroutines that wait for envs which somebody else has taken."""
        for env_id in env_ids.tolist() if self._waiters_of else ():
            for waiter in self._waiters_of.get(env_id, ()):
                if not waiter.future.done():
                    waiter.tell()
        for waiter in self._waiters:
            if not waiter.future.done() and waiter.is_ready():
                waiter.tell()

    def _settle_at_once(self) -> None:
        # Where sending is doing, nobody will make a noise later.
        if self._num_waiting and not self._backend.wake_fds():
            self._settle()

    def _rest(self) -> None:
        if not self._num_waiting and self._driver.state is not EngineState.CLOSED:
            self._backend.arm(False)

    # --- the engine's own verbs ----------------------------------------------------

    def check_open(self, verb: str) -> None:
        """Raises `ClosedError` if the engine was closed. Called with the lock held."""
        if self._driver.state is EngineState.CLOSED:
            raise ClosedError(f"cannot {verb}: the envs were closed meanwhile")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Holds the lock for a verb that waits for results itself."""
        with self.lock:
            if not self._is_up.is_set():
                # Two threads may not wait for the same noise: each would miss some.
                self._backend.poke()
                self._is_up.wait()
            try:
                yield
            finally:
                self._settle()

    @contextlib.contextmanager
    def _exclusive_and_well(self) -> Iterator[None]:
        with self.exclusive():
            if self.is_broken:
                self._raise_broken()
            yield

    def send(self, *args: Any, **kwargs: Any) -> None:
        """See `Engine.send`."""
        with self.lock:
            super().send(*args, **kwargs)
            self._settle_at_once()

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine.recv`. Keeps all others waiting; see `wait`."""
        with self.exclusive():
            return super().recv(*args, **kwargs)

    def step_rows(self, actions: Any, env_ids: Array | None = None, **options: Any) -> None:
        """See `Engine.step_rows`."""
        with self._exclusive_and_well():
            began = stopwatch()
            super().step_rows(actions, env_ids, **options)
            self.on_rows(env_ids, began, is_reset=False)

    def reset_rows(self, env_ids: Array | None, **options: Any) -> None:
        """See `Engine.reset_rows`."""
        with self._exclusive_and_well():
            began = stopwatch()
            super().reset_rows(env_ids, **options)
            self.on_rows(env_ids, began, is_reset=True)

    def seed(self, *args: Any, **kwargs: Any) -> tuple[list[int], int]:
        """See `Engine.seed`."""
        with self._exclusive_and_well():
            return super().seed(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> list[Any]:
        """See `Engine.call`."""
        with self._exclusive_and_well():
            return super().call(*args, **kwargs)

    def close(self, timeout: float | None = None) -> None:
        """See `Engine.close`. Whoever waits gets a `ClosedError`."""
        with self.exclusive():
            super().close(timeout)


def _nothing(env_ids: Array | None, began: float, *, is_reset: bool) -> None:
    """Stands in where nobody counts."""


def _end_wait(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
