"""Each env on a thread of its own, in the process of the caller.

Knows the crew of threads and the wake-ups. Does not know processes or env internals.

For envs that spend their time waiting, or in native code that lets other threads run. One
that hangs cannot be killed, and one that crashes takes the caller with it.
"""

from __future__ import annotations

import os
import warnings
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.backends.common import OneBreath, own_notes, start_error
from shoal.engine.backends.waking import Wakeups
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.layout import plan_layout, view_arrays
from shoal.engine.core.merge import agree_on_spec
from shoal.engine.core.messages import EnvFailure, SeedEnvs
from shoal.engine.spec import EnvSpec
from shoal.engine.worker.env_threads import EnvThreads
from shoal.engine.worker.host import own_copy
from shoal.errors import (
    BrokenError,
    RecvTimeout,
    StartError,
    StartTimeout,
    WorkerDied,
    describe_exit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine.core.messages import CallEnvs, EnvNotes, Returned
    from shoal.engine.env import EnvFactory
    from shoal.engine.spec import LeafPath
    from shoal.engine.worker.env_threads import Death
    from shoal.engine.worker.host import Host

__all__ = ["ThreadBackend"]

# Envs that were built may close when another one could not be.
_GRACE_AFTER_FAILURE_S = 2.0


class _Desk:
    """Takes what the threads of the envs hand over.

    An object of its own, because the threads hold on to it: a backend that they held on
    to could never be forgotten.

    Attributes:
        notes: what results hold beside their rows. Written and emptied entry by entry,
            which the interpreter's lock makes one step each.
    """

    def __init__(self) -> None:
        self.notes: dict[int, EnvNotes] = {}
        self.wakeups = Wakeups()
        self.all_done: Callable[[], bool] = bool

    def publish(self, host: Host, indices: Sequence[int]) -> None:
        """Keeps the notes of one env, then hands its row over."""
        if host.notes:
            self.notes.update(own_notes(host.notes))
        host.publish(indices)
        host.notes = {}

    def on_done(self, env_id: int) -> None:
        """Wakes the caller, if he waits for this."""
        self.wakeups.notify(all_done=self.all_done)

    def on_death(self) -> None:
        """Wakes the caller, whatever he waits for."""
        self.wakeups.notify(all_done=True)


class ThreadBackend(OneBreath):
    """Runs every env on a thread that is its own for ever."""

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        *,
        keep_infos: bool,
        mixed_specs: bool = False,
        deadline: Deadline,
    ) -> None:
        self._desk = _Desk()
        self._crew = EnvThreads(range(len(factories)), self._desk)
        self._desk.all_done = self._crew.all_done
        self._during = "idle"
        self._owner_pid = os.getpid()
        with ExitStack() as undo:
            undo.callback(self._desk.wakeups.close)
            undo.callback(lambda: self._crew.close(Deadline.after(_GRACE_AFTER_FAILURE_S)))
            try:
                self._crew.start(factories)
            except RuntimeError as exc:
                raise StartError(f"An env could not have a thread of its own: {exc}") from exc
            specs = list(self._wait_for_each(deadline).values())
            self.spec = agree_on_spec(
                [spec for spec in specs if isinstance(spec, EnvSpec)], mixed=mixed_specs
            )
            layout = plan_layout(self.spec, len(factories), 1)
            self.arrays = view_arrays(layout, np.zeros(layout.nbytes, np.uint8))
            self._crew.attach(self.arrays, self.spec, keep_infos=keep_infos)
            self._wait_for_each(deadline)
            self._finalizer = weakref.finalize(
                self, _close_forgotten, self._crew, self._desk.wakeups
            )
            undo.pop_all()

    def _wait_for_each(self, deadline: Deadline) -> dict[int, EnvSpec | None]:
        """Waits until each thread has reported; returns what they say, in env order."""
        reports = self._crew.take_reports(deadline)
        if self._crew.deaths:
            death = min(self._crew.deaths.values(), key=lambda death: death.env_id)
            raise StartError(
                f"The thread of env {death.env_id} {describe_exit(death.exitcode)} while it"
                " built its env.",
                env_id=death.env_id,
                worker_traceback=death.traceback,
            ) from death.cause
        good: dict[int, EnvSpec | None] = {}
        for env_id, report in sorted(reports.items()):
            if isinstance(report, EnvFailure):
                raise start_error(report)
            good[env_id] = report
        if missing := [env_id for env_id in self._crew.env_ids if env_id not in good]:
            raise StartTimeout(
                f"Envs {missing} were not ready within {deadline.timeout_s:g} s."
                " Allow more with start_timeout.",
                env_id=missing[0],
            )
        return good

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """There are no worker processes."""
        return ()

    def worker_of(self, env_id: int) -> int:
        """Each env is a worker of its own."""
        return env_id

    # --- rows ----------------------------------------------------------------------

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Asks the threads of these envs (``None``: all) to carry out the op rows."""
        self._during = "step"
        self._crew.run(env_ids)

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Asks for resets with seeds or keyword arguments."""
        self._during = "reset"
        for k, env_id in enumerate(env_ids):
            self._crew.reset(env_id, seeds[k], kwargs[k], undo_prepared=undo_prepared[k])

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Hands over copies: what the caller does with his own later is his business."""
        self._crew.set_action_objects(
            {i: {path: own_copy(value) for path, value in a.items()} for i, a in actions.items()}
        )

    def resubmit(self, deadline: Deadline) -> None:
        """Asks every env again; a row that was carried out has no op any more."""
        self._crew.run(None)

    def has_notes(self) -> bool:
        """Returns whether `take_notes` would return something."""
        return bool(self._desk.notes)

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns the notes of all rows published so far, and forgets them."""
        notes = self._desk.notes
        # One by one: an env that publishes meanwhile adds to this dict, and a note that it
        # put into one that was taken away would be lost.
        return dict(notes.popitem() for _ in range(len(notes)))

    # --- waiting -------------------------------------------------------------------

    def all_done(self) -> bool:
        """Returns whether every env has carried out all that was submitted."""
        return self._crew.all_done()

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Waits until ``done()``, or until a thread has ended by itself."""
        if done():
            return True
        if os.getpid() != self._owner_pid:
            raise BrokenError(
                "The threads of the envs are in the process that opened the engine, and"
                " this is a fork of it. Open another engine here."
            )
        deaths = self._crew.deaths
        came = self._desk.wakeups.wait(lambda: done() or bool(deaths), deadline, for_all=for_all)
        if deaths and not done():
            raise self._died()
        return came

    def _died(self) -> WorkerDied:
        death: Death = min(self._crew.deaths.values(), key=lambda death: death.env_id)
        error = WorkerDied(
            worker_id=death.env_id,
            env_ids=(death.env_id,),
            exitcode=death.exitcode,
            during=self._during,
            kind="thread",
        )
        error.add_note(f"In the env's thread:\n{death.traceback.rstrip()}")
        error.__cause__ = death.cause
        return error

    def wake_fds(self) -> Sequence[int]:
        """See `Backend.wake_fds`."""
        return self._desk.wakeups.fds()

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """See `Backend.arm`."""
        self._desk.wakeups.arm(armed, watched=watched, is_due=is_due)

    def doze(self, deadline: Deadline) -> list[int]:
        """See `Backend.doze`."""
        return self._desk.wakeups.doze(deadline)

    def poke(self) -> None:
        """See `Backend.poke`."""
        self._desk.wakeups.poke()

    def take_news(self, news: list[int]) -> None:
        """Raises if a thread has ended by itself; everything else is in the rows."""
        if self._crew.deaths:
            raise self._died()

    # --- calls ---------------------------------------------------------------------

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Hands each env its command, then waits for all the answers."""
        pending = dict(commands)
        # Answers that come when nobody waits any more are told to a dict that nobody has.
        answers: dict[int, Returned] = {}
        wakeups, num_asked = self._desk.wakeups, len(pending)

        def reply_for(env_id: int) -> Callable[[Returned], None]:
            def reply(answer: Returned) -> None:
                answers[env_id] = answer
                wakeups.notify(all_done=len(answers) == num_asked)

            return reply

        for env_id, command in pending.items():
            self._during = "seed" if isinstance(command, SeedEnvs) else "call"
            self._crew.ask(command, reply_for(env_id))
        if not self.wait(lambda: len(answers) == num_asked, deadline, for_all=True):
            missing = [env_id for env_id in pending if env_id not in answers]
            raise RecvTimeout(waiting_for=missing, timeout=deadline.timeout_s, during=self._during)
        return [answers[env_id] for env_id in pending]

    # --- end -----------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Lets each thread close its env. May be called again.

        Warns of those that have not ended by the deadline: they cannot be killed.
        """
        if self._finalizer.detach() is None:
            return
        try:
            left = self._crew.close(deadline)
        finally:
            self._desk.wakeups.close()
        if left:
            warnings.warn(
                f"Envs {left} did not end within {deadline.timeout_s:g} s. Their threads are"
                " left alone; each closes its env when that comes back to it.",
                RuntimeWarning,
                stacklevel=3,
            )


def _close_forgotten(crew: EnvThreads, wakeups: Wakeups) -> None:
    """Runs when the backend was forgotten, or the interpreter ends."""
    try:
        crew.close(Deadline.after(2))
    finally:
        wakeups.close()
