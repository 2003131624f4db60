"""Envs whose resets and steps are coroutines, on one event loop in a thread of its own.

Knows the tasks on the loop, and how they wake the engine's thread. Does not know env
internals, or any framework.

For envs that wait rather than compute: hundreds of them cost one thread. They share it,
so an env that blocks it delays all others, and an env that ends it ends the engine.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shoal.engine.backends.common import OneBreath, own_notes, start_error
from shoal.engine.backends.waking import Wakeups
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.layout import plan_layout, view_arrays
from shoal.engine.core.merge import agree_on_spec
from shoal.engine.core.messages import ResetEnvs, Returned, SeedEnvs, SetActions
from shoal.engine.system.event_loop import EventLoopThread
from shoal.engine.worker.env_task import Call
from shoal.engine.worker.host import Host, own_copy
from shoal.engine.worker.tasks import EnvTasks, RunRows
from shoal.errors import BrokenError, RecvTimeout, StartError, StartTimeout, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine.core.messages import CallEnvs, EnvNotes
    from shoal.engine.env import AsyncEnvFactory, Env, EnvFactory
    from shoal.engine.spec import LeafPath

__all__ = ["CoroutineBackend"]

# Envs that were built may close when another one could not be.
_GRACE_AFTER_FAILURE_S = 2.0
# What the loop may take to end after the envs' time is up.
_GRACE_AFTER_CLOSE_S = 1.0


class CoroutineBackend(OneBreath):
    """Runs envs as tasks of one event loop, all at once."""

    def __init__(
        self,
        factories: Sequence[EnvFactory] | Sequence[AsyncEnvFactory],
        *,
        keep_infos: bool,
        mixed_specs: bool = False,
        deadline: Deadline,
    ) -> None:
        self._num_envs = len(factories)
        self._wakeups = wakeups = Wakeups()
        # The loop appends, this side pops: none is lost or seen half.
        self._notes: deque[dict[int, EnvNotes]] = deque()
        kept = self._notes  # and not `self`, which could never be forgotten then
        self._tasks = EnvTasks(
            cast("Sequence[AsyncEnvFactory]", factories),
            keep_notes=lambda notes: kept.append(own_notes(notes)),
            notify=lambda all_done: wakeups.notify(all_done=all_done),
        )
        self._thread = EventLoopThread("shoal-coroutines")
        self._finalizer = weakref.finalize(self, _close_forgotten, self._tasks, self._thread)
        try:
            self._start(deadline)
            envs = [cast("Env", env) for env in self._tasks.envs]
            self.spec = agree_on_spec([env.spec for env in envs], mixed=mixed_specs)
            layout = plan_layout(self.spec, len(envs), 1)
            self.arrays = view_arrays(layout, np.zeros(layout.nbytes, np.uint8))
            host = Host(envs, 0, self.arrays, self.spec, keep_infos=keep_infos)
            self._tasks.serve(host, self.arrays)
        except BaseException:
            # What went wrong first is told, and nothing besides.
            self._finalizer.detach()
            _close(self._tasks, self._thread, Deadline.after(_GRACE_AFTER_FAILURE_S))
            raise

    def _start(self, deadline: Deadline) -> None:
        """Starts the thread and waits for the envs."""
        tasks = self._tasks
        try:
            self._thread.start(tasks.run, on_death=tasks.die, at_end=self._wakeups.close)
        except RuntimeError as exc:
            raise StartError(f"The envs could not have a thread for their loop: {exc}") from exc
        self._wait_built(deadline)

    def _wait_built(self, deadline: Deadline) -> None:
        tasks = self._tasks
        if not self._wakeups.wait(tasks.has_started, deadline):
            waiting = [env_id for env_id, env in enumerate(tasks.envs) if env is None]
            ids = ", ".join(map(str, waiting[:8])) + (", ..." if len(waiting) > 8 else "")
            raise StartTimeout(
                f"Envs {ids} were not built within {deadline.timeout_s:g} s. One of them may"
                " block the event loop. Allow more with start_timeout.",
                env_id=waiting[0] if waiting else None,
            )
        if tasks.death is not None:
            exc = tasks.death[0]
            raise StartError(f"{type(exc).__name__} was raised while envs were built") from exc
        if tasks.build_failures:
            raise start_error(min(tasks.build_failures, key=lambda failure: failure.env_id))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """There are no worker processes."""
        return ()

    def worker_of(self, env_id: int) -> int:
        """All envs are with worker 0, the loop."""
        return 0

    # --- rows ----------------------------------------------------------------------

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Has the loop carry out the op rows of these envs (``None``: all)."""
        self._tasks.put(RunRows(env_ids))
        self._thread.post(self._tasks.take_requests)

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Has the loop reset envs with seeds or keyword arguments."""
        self._tasks.put(
            ResetEnvs(tuple(env_ids), tuple(seeds), tuple(kwargs), tuple(undo_prepared))
        )
        self._thread.post(self._tasks.take_requests)

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Hands over copies: what the caller does with his own later is his business."""
        copies = {
            env_id: {path: own_copy(value) for path, value in leaves.items()}
            for env_id, leaves in actions.items()
        }
        self._tasks.put(SetActions(copies))

    def resubmit(self, deadline: Deadline) -> None:
        """Asks again for everything; what is under way is not started twice."""
        self.submit(None)

    # --- waiting -------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Waits until ``done()``; returns whether it is.

        Raises:
            WorkerDied: an env has raised what ends a worker.
            BrokenError: this is a fork of the process that has the loop.
        """
        tasks = self._tasks
        if done():
            return True
        if not self._thread.is_here:
            raise BrokenError(
                "The event loop of the envs runs in the process that opened the engine, and"
                " this is a fork of it. Open another engine here."
            )
        self._wakeups.wait(lambda: done() or tasks.death is not None, deadline, for_all=for_all)
        if done():
            return True
        self._raise_death()
        return False

    def _raise_death(self) -> None:
        if self._tasks.death is not None:
            exc, during = self._tasks.death
            raise WorkerDied(
                worker_id=0,
                env_ids=range(self._num_envs),
                exitcode=_exitcode_of(exc),
                during=during,
                kind="loop",
            ) from exc

    def wake_fds(self) -> Sequence[int]:
        """See `Backend.wake_fds`."""
        return self._wakeups.fds()

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """See `Backend.arm`."""
        self._wakeups.arm(armed, watched=watched, is_due=is_due)

    def doze(self, deadline: Deadline) -> list[int]:
        """See `Backend.doze`."""
        return self._wakeups.doze(deadline)

    def poke(self) -> None:
        """See `Backend.poke`."""
        self._wakeups.poke()

    def take_news(self, news: list[int]) -> None:
        """Takes in what ended a `doze`: rows are there already.

        Raises:
            WorkerDied: an env has raised what ends a worker.
        """
        self._raise_death()

    def all_done(self) -> bool:
        """Returns whether every row that was submitted is ready."""
        return self._tasks.all_done()

    # --- notes and calls -----------------------------------------------------------

    def has_notes(self) -> bool:
        """Returns whether `take_notes` would return something."""
        return bool(self._notes)

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns what results hold beside their rows, and forgets it."""
        taken: dict[int, EnvNotes] = {}
        # The loop may add some meanwhile; those are taken now or the next time.
        while self._notes:
            taken.update(self._notes.popleft())
        return taken

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Has the envs answer, all at once, and waits for the answers."""
        calls = [Call(command, len(command.env_ids)) for _, command in commands]
        for call in calls:
            self._tasks.put(call)
        self._thread.post(self._tasks.take_requests)
        if not self.wait(lambda: not any(call.num_left for call in calls), deadline):
            during = "seed" if isinstance(calls[0].command, SeedEnvs) else "call"
            ids = [i for call in calls for i in _missing_in(call)]
            raise RecvTimeout(waiting_for=ids, timeout=deadline.timeout_s, during=during)
        return [Returned(call.command.call_id, call.values, tuple(call.failures)) for call in calls]

    # --- end -----------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Cancels what is under way, closes the envs, ends the loop. May be called again."""
        if self._finalizer.detach() is not None:
            complaint = _close(self._tasks, self._thread, deadline)
            if complaint:
                warnings.warn(complaint, RuntimeWarning, stacklevel=3)


def _close(tasks: EnvTasks, thread: EventLoopThread, deadline: Deadline) -> str | None:
    """Ends everything in time; returns what did not end, in words."""
    if not thread.is_here:
        return None  # a fork of it has a copy of everything but the thread
    thread.post(tasks.begin_close, deadline)
    if not thread.join(Deadline.after(deadline.left_s() + _GRACE_AFTER_CLOSE_S)):
        return (
            "Envs did not end when they were closed: one of them blocks the event loop, or work"
            " in its executor goes on. The thread is left behind; it ends with the process, or"
            " when it gets back to the loop."
        )
    unended = ", ".join(map(str, tasks.find_unended()))
    tasks.let_go()
    if unended:
        return f"Envs {unended} went on when they were cancelled, and were given up."
    return None


def _close_forgotten(tasks: EnvTasks, thread: EventLoopThread) -> None:
    """Runs when the backend was forgotten, or the interpreter ends."""
    complaint = _close(tasks, thread, Deadline.after(2))
    if complaint:
        warnings.warn(complaint, RuntimeWarning, stacklevel=2)


def _missing_in(call: Call) -> list[int]:
    """Returns the envs that have not answered yet. Some may do so meanwhile."""
    answered = {*list(call.values), *(failure.env_id for failure in list(call.failures))}
    return [i for i in call.command.env_ids if i not in answered]


def _exitcode_of(exc: BaseException) -> int:
    """Returns the exit code of a process that ends this way."""
    if isinstance(exc, SystemExit):
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 1
