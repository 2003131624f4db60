"""Envs of a native pool, which steps them on threads of its own.

Knows the contract of a native pool, rows, and how a caller is woken. Does not know
EnvPool itself; `shoal.adapters.envpool` does.

The caller receives results itself as long as it waits without a limit: nothing is faster.
A pool cannot be asked to wait for a limited time, so with the first limit, or the first
caller that dozes, a thread takes over the receiving, for good.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import traceback
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from shoal.engine.backends.pool_exchange import IDLE, NEW, Exchange, Receiver
from shoal.engine.backends.waking import Wakeups
from shoal.engine.core.deadline import Deadline, stopwatch
from shoal.engine.core.layout import Op, Status, plan_layout, view_arrays
from shoal.engine.core.messages import CallEnvs, EnvFailure, EnvNotes, Returned, SeedEnvs
from shoal.engine.core.spinning import SpinAhead
from shoal.engine.system.cores import count_usable_cores
from shoal.errors import BrokenError, SpecError, UsageError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine.env import NativePool, NativePoolFactory
    from shoal.engine.spec import LeafPath

__all__ = ["EnvPoolBackend"]

Array = np.ndarray[Any, Any]
_READY, _FAILED = int(Status.READY), int(Status.FAILED)


class EnvPoolBackend:
    """Runs envs in a native pool; see `Backend`."""

    worker_pids: tuple[int, ...] = ()

    def __init__(self, factories: Sequence[NativePoolFactory], *, keep_infos: bool) -> None:
        """Builds the pool.

        Args:
            factories: the same one, once per env.
            keep_infos: must be false.

        Raises:
            UsageError: different factories, or one of another number of envs.
        """
        factory = factories[0]
        if any(other is not factory for other in factories) or getattr(
            factory, "num_envs", None
        ) != len(factories):
            raise UsageError(
                "backend 'envpool' runs all envs in one pool: give it a factory that has"
                " num_envs, that many times, as list(EnvPoolFactory('CartPole-v1', 8))"
            )
        if keep_infos:
            raise UsageError("backend 'envpool' has no info dicts; leave keep_infos out")
        pool = factory()
        self.spec = pool.spec
        layout = plan_layout(self.spec, pool.num_envs, 1)
        self.arrays = view_arrays(layout, np.zeros(layout.nbytes, np.uint8))
        self._pool = pool
        self._num_envs = pool.num_envs
        self._notes: dict[int, EnvNotes] = {}
        self._exchange = Exchange(pool, self.arrays)
        has_core = 0 < pool.num_threads < count_usable_cores()
        self._ahead = SpinAhead(enabled=has_core)
        # Nobody else is there until a receiver is; an interrupt may leave a lock locked.
        self._guard: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._wakeups = Wakeups()
        self._receiver: Receiver | None = None
        self._owner_pid = os.getpid()
        self._receivers: list[Receiver] = []
        self._finalizer = weakref.finalize(
            self, _close_forgotten, pool, self._wakeups, self._receivers
        )

    @property
    def steps_done(self) -> Callable[[], bool] | None:
        """See `Backend`."""
        # A thread that receives does not stop in between.
        return self._exchange.steps_done if self._receiver is None else None

    def take_observation(self) -> Mapping[LeafPath, Array] | None:
        """See `Backend`."""
        own, self._exchange.observation = self._exchange.observation, None
        return None if own is None else dict(zip(self.spec.observation, own, strict=True))

    def worker_of(self, env_id: int) -> int:
        """All envs are with worker 0, the pool."""
        return 0

    # --- requests ------------------------------------------------------------------

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Carries out the op rows, which are the same for all of these envs."""
        self._check_process()
        ops = self.arrays.op
        if env_ids is None:
            ids, op = None, int(ops[0])
            ops.fill(0)
        else:
            ids, op = np.asarray(env_ids, np.int64), int(ops[env_ids[0]])
            ops[ids] = 0
        with self._guard:
            if op == Op.RESET:
                self._exchange.begin_resets(ids)
            else:
                wrong = self._pool.unfit(self.arrays.action, ids)
                if wrong is not None:
                    ids = self._refuse(wrong, ids)
                if ids is None or len(ids):
                    self._exchange.begin_steps(ids, autoreset=op == Op.STEP_AUTORESET)
            self._tell()

    def _refuse(self, wrong: Array, ids: Array | None) -> Array:
        """Notes a failure for envs whose actions do not fit; returns the other envs."""
        for env_id in wrong.tolist():
            given = {path: rows[env_id].tolist() for path, rows in self.arrays.action.items()}
            error = SpecError(
                key="action",
                expected="within the env's action space, or EnvPool would end the process",
                actual=f"{given.get((), given)}",
            )
            text = f"SpecError: {error}"
            failure = EnvFailure(env_id, "step", text, "", cloudpickle.dumps(error))
            self._notes[env_id] = EnvNotes(failure=failure)
        self.arrays.status[wrong] = _READY | _FAILED
        every = np.arange(self._num_envs) if ids is None else ids
        return every[~np.isin(every, wrong)]

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Resets; with seeds, if all envs get one: that makes a new pool.

        Raises:
            UsageError: seeds of some envs only, or options. Nothing was reset.
        """
        self._check_process()
        if any(kwargs):
            options = next(filter(None, kwargs))
            raise UsageError(f"EnvPool's resets take no options, such as {dict(options)}")
        given = [seed for seed in seeds if seed is not None]
        if given:
            self._seed(dict(zip(env_ids, seeds, strict=True)))
        with self._guard:
            self._exchange.begin_resets(np.asarray(env_ids, np.int64))
            self._tell()

    def _seed(self, seeds: Mapping[int, int | None]) -> None:
        given = [seeds.get(env_id) for env_id in range(self._num_envs)]
        if None in given or not self._exchange.all_done():
            raise UsageError("EnvPool can only be seeded as a whole: give every env a seed")
        with self._guard:
            self._pool.seed([seed for seed in given if seed is not None])
            self._exchange.phase.fill(NEW)

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Never called: a pool's actions are arrays."""

    def _tell(self) -> None:
        if self._receiver is not None:
            self._receiver.tell()

    def _check_process(self) -> None:
        if os.getpid() != self._owner_pid:
            raise BrokenError(
                "The threads of the pool are in the process that opened the engine, and this is"
                " a fork of it. Open another engine here."
            )

    # --- waiting -------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """See `Backend.wait`.

        Raises:
            WorkerDied: results could not be read.
            UsageError: fewer envs are in the pool than it returns at a time, so it never will.
        """
        if done():
            return True
        self._check_process()
        exchange = self._exchange
        if self._receiver is None and deadline.expires_at == math.inf:
            while not done():
                self._check_hope(is_stuck=exchange.is_stuck())
                self._receive()
                exchange.settle()
            return True
        receiver = self._start_receiver()

        def is_over() -> bool:
            return done() or receiver.error is not None or exchange.is_stuck()

        self._wakeups.wait(is_over, deadline, for_all=for_all)
        self.take_news([])
        # In this order: what was the last to come is in the rows before nothing is left.
        is_stuck = exchange.is_stuck()
        if not done():
            self._check_hope(is_stuck=is_stuck)
        return done()

    def _receive(self) -> None:
        """Waits for results in this thread, which stays awake for it if they come soon."""
        exchange, ahead, clock = self._exchange, self._ahead, stopwatch
        if exchange.num_in_pool < self._num_envs:
            exchange.receive()  # resets of a few: over before anybody falls asleep
            return
        if ahead.spin_s:
            until = clock() + ahead.spin_s
            while clock() < until:
                pass
        began = clock()
        exchange.receive()
        ahead.note_wait(clock() - began)

    def _check_hope(self, *, is_stuck: bool) -> None:
        if is_stuck:
            raise UsageError(
                f"EnvPool returns {self._pool.batch_size} envs at a time, and fewer than that are"
                " under way: send more of them first, or make the pool with batch_size=1"
            )

    def _start_receiver(self) -> Receiver:
        if self._receiver is None:
            self._check_process()
            lock = threading.Lock()
            self._receiver = Receiver(self._exchange, lock, self._wakeups)
            self._guard = lock
            self._receivers.append(self._receiver)
        return self._receiver

    def wake_fds(self) -> Sequence[int]:
        """See `Backend.wake_fds`."""
        self._start_receiver()
        return self._wakeups.fds()

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """See `Backend.arm`."""
        if armed:
            self._start_receiver()
        self._wakeups.arm(armed, watched=watched, is_due=is_due)

    def doze(self, deadline: Deadline) -> list[int]:
        """See `Backend.doze`."""
        return self._wakeups.doze(deadline)

    def poke(self) -> None:
        """See `Backend.poke`."""
        self._wakeups.poke()

    def take_news(self, news: list[int]) -> None:
        """Raises if results could not be read; everything else is in the rows."""
        error = None if self._receiver is None else self._receiver.error
        if error is not None:
            raise WorkerDied(
                worker_id=0,
                env_ids=tuple(range(self._num_envs)),
                exitcode=None,
                during="step",
                kind="thread",
            ) from error

    def all_done(self) -> bool:
        """See `Backend.all_done`."""
        return self._exchange.all_done()

    def has_notes(self) -> bool:
        """See `Backend.has_notes`."""
        return bool(self._notes)

    def take_notes(self) -> dict[int, EnvNotes]:
        """See `Backend.take_notes`."""
        notes, self._notes = self._notes, {}
        return notes

    def resubmit(self, deadline: Deadline) -> None:
        """Goes on with what an interrupt cut off, and drops what had not begun."""
        self.arrays.op.fill(0)
        with self._guard:
            self._exchange.recount()
            if self._receiver is None:
                self._exchange.settle()
                self._exchange.recount()
            self._exchange.pump()
            self.arrays.status[self._exchange.phase <= IDLE] = _READY
            self._tell()

    # --- calls ---------------------------------------------------------------------

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Seeds the pool, or calls a method of it once for all envs that are named."""
        return [self._answer(command) for _, command in commands]

    def _answer(self, command: CallEnvs | SeedEnvs) -> Returned:
        if isinstance(command, SeedEnvs):
            self._seed(dict(zip(command.env_ids, command.seeds, strict=True)))
            return Returned(command.call_id, dict.fromkeys(command.env_ids))
        try:
            value = self._pool.call(command.name, command.args, command.kwargs)
        except Exception as exc:  # noqa: BLE001 - border: foreign code, its error is data
            text, frames = f"{type(exc).__name__}: {exc}", traceback.format_exc()
            failure = EnvFailure(command.env_ids[0], "call", text, frames, cloudpickle.dumps(exc))
            return Returned(command.call_id, {}, (failure,))
        return Returned(command.call_id, dict.fromkeys(command.env_ids, value))

    # --- end -----------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Lets the pool go, once it has returned what can be had. May be called again."""
        if self._finalizer.detach() is None or os.getpid() != self._owner_pid:
            return
        if self._exchange.can_receive():
            self._start_receiver()
        if self._receiver is None:
            self._pool.close()
        elif not self._receiver.stop(deadline, self._pool.close):
            warnings.warn(
                f"Envs of EnvPool did not finish their step within {deadline.timeout_s:g} s; the"
                " pool is left alone, and closed when they do.",
                RuntimeWarning,
                stacklevel=3,
            )
        self._wakeups.close()


def _close_forgotten(pool: NativePool, wakeups: Wakeups, receivers: list[Receiver]) -> None:
    """Runs when the backend was forgotten, or the interpreter ends."""
    for receiver in receivers:
        receiver.stop(Deadline.after(2), pool.close)
    wakeups.close()
    if not receivers:
        pool.close()
