"""Envs in worker processes, over one shared block of memory.

Knows the crew and the slab's control words. Does not know env internals, or any
framework.

The hand-over of rows: the engine writes actions and ops, then raises a worker's
request word, then wakes it if it sleeps. The worker writes results, then statuses,
then its reply word, then wakes the engine if that sleeps. Data first, flag last.
"""

from __future__ import annotations

import platform
import threading
import weakref
from itertools import count
from typing import TYPE_CHECKING, Any

from shoal.engine.backends.crew import Crew
from shoal.engine.core.deadline import Deadline, stopwatch
from shoal.engine.core.layout import Word, view_arrays
from shoal.engine.core.messages import (
    CallEnvs,
    Command,
    EnvNotes,
    Notes,
    ResetEnvs,
    Returned,
    SeedEnvs,
    SetActions,
)
from shoal.engine.core.plan import assign_envs
from shoal.engine.core.spinning import (
    SpinBudget,
    count_spinning_workers,
    engine_may_spin,
    spinning_is_safe,
)
from shoal.engine.system.channel import ChannelClosed
from shoal.engine.system.cores import count_usable_cores
from shoal.errors import BrokenError, RecvTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine.env import EnvFactory
    from shoal.engine.spec import EnvSpec, LeafPath
    from shoal.engine.system.process import StartMethod

__all__ = ["ProcessBackend"]

_STRIDE = 8
_REQUEST, _REPLY, _ASLEEP = int(Word.REQUEST), int(Word.REPLY), int(Word.ASLEEP)
_NOTES, _MAIL = int(Word.NOTES), int(Word.MAIL)


class _Inbox:
    """What workers have said that nobody has asked for yet.

    An object of its own, because the crew holds on to it: a backend that the crew
    held on to could never be forgotten.
    """

    def __init__(self, num_workers: int) -> None:
        self.notes: dict[int, EnvNotes] = {}
        self.notes_taken = [0] * num_workers
        self.returned: dict[int, list[Returned]] = {}

    def take(self, worker_id: int, message: Any) -> None:
        """Keeps one message of a worker."""
        match message:
            case Notes(envs):
                self.notes_taken[worker_id] += 1
                self.notes.update(envs)
            case Returned(call_id):
                # Answers to calls that nobody waits for any more are dropped here.
                if call_id in self.returned:
                    self.returned[call_id].append(message)


class ProcessBackend:
    """Runs envs in worker processes, several in each."""

    def __init__(
        self,
        factories: Sequence[EnvFactory],
        *,
        num_workers: int,
        method: StartMethod,
        keep_infos: bool,
        on_disk: bool,
        more_specs: Sequence[EnvSpec] = (),
        deadline: Deadline,
    ) -> None:
        num_cores = count_usable_cores()
        ranges = assign_envs(len(factories), num_workers)
        trust_flags = spinning_is_safe(platform.machine())
        spinning = count_spinning_workers(num_workers, num_cores) if trust_flags else 0
        self._crew = Crew.start(
            factories,
            ranges,
            method=method,
            keep_infos=keep_infos,
            num_spinning=spinning,
            on_disk=on_disk,
            more_specs=more_specs,
            deadline=deadline,
        )
        self._finalizer = weakref.finalize(self, _close_forgotten, self._crew)
        self._inbox = _Inbox(num_workers)
        self._crew.on_message = self._inbox.take
        crew = self._crew
        assert crew.layout is not None
        assert crew.slab is not None
        assert crew.spec is not None
        self.spec = crew.spec
        self.arrays = view_arrays(crew.layout, crew.slab.memory)
        self._words = memoryview(self.arrays.words.reshape(-1))  # type: ignore[arg-type]
        self._engine_asleep = memoryview(self.arrays.engine_asleep)  # type: ignore[arg-type]
        self._worker_of = [w for w, env_ids in enumerate(ranges) for _ in env_ids]
        self._trust_flags = trust_flags
        self._spin = SpinBudget(enabled=trust_flags and engine_may_spin(num_workers, num_cores))
        self._fence = threading.Lock()
        self._pairs = [(_STRIDE * w + _REQUEST, _STRIDE * w + _REPLY) for w in range(num_workers)]
        self._every_worker = [
            (_STRIDE * w + _REQUEST, _STRIDE * w + _ASLEEP, crew.bells[w])
            for w in range(num_workers)
        ]
        self._notes_words = [_STRIDE * w + _NOTES for w in range(num_workers)]
        self._call_ids = count(1)
        self._during = "idle"

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by worker number."""
        return tuple(w.pid for w in self._crew.workers if w.pid is not None)

    def worker_of(self, env_id: int) -> int:
        """Returns the worker that holds an env."""
        return self._worker_of[env_id]

    # --- rows ----------------------------------------------------------------------

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Asks the workers of these envs (``None``: all) to carry out the op rows."""
        if env_ids is None:
            workers = self._every_worker
        else:
            ids = {self._worker_of[env_id] for env_id in env_ids}
            workers = [self._every_worker[worker_id] for worker_id in sorted(ids)]
        self._during = "step"
        words = self._words
        for request, _, _ in workers:
            words[request] += 1
        self._full_fence()
        for _, asleep, bell in workers:
            if words[asleep] or not self._trust_flags:
                bell.ring()

    def resubmit(self) -> None:
        """Asks every worker again; rows that were carried out have no op any more."""
        self.submit(None)

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Sends resets with seeds or keyword arguments, one message per worker."""
        by_worker: dict[int, list[int]] = {}
        for k, env_id in enumerate(env_ids):
            by_worker.setdefault(self._worker_of[env_id], []).append(k)
        for worker_id, ks in by_worker.items():
            command = ResetEnvs(
                tuple(int(env_ids[k]) for k in ks),
                tuple(seeds[k] for k in ks),
                tuple(kwargs[k] for k in ks),
                tuple(undo_prepared[k] for k in ks),
            )
            self._post(worker_id, command, Deadline.after(60))
        self._during = "reset"

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Sends action leaves without a fixed shape, before `submit`."""
        by_worker: dict[int, dict[int, Mapping[LeafPath, Any]]] = {}
        for env_id, leaves in actions.items():
            by_worker.setdefault(self._worker_of[env_id], {})[env_id] = leaves
        for worker_id, mine in by_worker.items():
            self._post(worker_id, SetActions(mine), Deadline.after(60))

    def _post(self, worker_id: int, command: Command, deadline: Deadline) -> None:
        self._crew.announce_mail(worker_id)
        # It wakes up from the socket alone, and reads while we still write.
        try:
            self._crew.channels[worker_id].send(command, deadline)
        except ChannelClosed:
            self._raise_death(deadline)
            raise
        except TimeoutError as exc:
            raise BrokenError(
                f"Worker {worker_id} did not take a message within {deadline.timeout_s:g} s:"
                " an environment is stuck. The engine is broken: close it."
            ) from exc

    # --- waiting -------------------------------------------------------------------

    def all_done(self) -> bool:
        """Returns whether every worker has replied to the last request."""
        words = self._words
        # A loop, not a generator: this runs once per spin.
        for request, reply in self._pairs:  # noqa: SIM110
            if words[request] != words[reply]:
                return False
        return True

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Waits until ``done()``: spins for a bounded time, then blocks."""
        if done():
            return True
        clock, spin = stopwatch, self._spin
        started = clock()
        if spin.budget_s:
            until = started + spin.budget_s
            while not done():
                if clock() > until:
                    break
            else:
                spin.note_wait(clock() - started)
                return True
        asleep = self._engine_asleep
        try:
            while True:
                asleep[0] = 2 if for_all and self._trust_flags else 1
                self._full_fence()
                if done():
                    break
                came = self._crew.wait(deadline)
                if done():
                    break
                if self._crew.first_death() is not None:
                    self._raise_death(deadline)
                if not came and deadline.expired():
                    return False
        finally:
            asleep[0] = 0
        spin.note_wait(clock() - started)
        return True

    def _full_fence(self) -> None:
        # "I sleep" must be visible before the last look at the words, else a reply
        # could slip between the two. Taking a lock is a full barrier.
        self._fence.acquire(blocking=False)
        self._fence.release()

    def _raise_death(self, deadline: Deadline) -> None:
        """Raises for a worker that has died; waits a moment for its exit code."""
        soon = deadline.at_most(1.0)
        while self._crew.first_death() is None and not soon.expired():
            self._crew.wait(soon)
        worker = self._crew.first_death()
        if worker is not None:
            raise self._crew.death_of(worker, self._during)

    # --- messages ------------------------------------------------------------------

    def has_notes(self) -> bool:
        """Returns whether a worker has announced notes that were not taken."""
        if self._inbox.notes:
            return True
        words = self._words
        for worker_id, word in enumerate(self._notes_words):
            if words[word] != self._inbox.notes_taken[worker_id]:
                return True
        return False

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns the notes of all rows published so far, and forgets them."""
        deadline = Deadline.after(60)
        words = self._words
        for worker_id, word in enumerate(self._notes_words):
            # Announced before the rows were published, so what is missing is on its way.
            while self._inbox.notes_taken[worker_id] < words[word]:
                self._crew.wait(deadline)
                if self._crew.workers[worker_id].has_ended:
                    break
                if deadline.expired():
                    raise RecvTimeout(waiting_for=(), timeout=60, during=self._during)
        notes, self._inbox.notes = self._inbox.notes, {}
        return notes

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Sends one command per worker, then waits for all the answers."""
        pending = list(commands)
        call_id = pending[0][1].call_id
        answers = self._inbox.returned[call_id] = []
        try:
            self._during = "seed" if isinstance(pending[0][1], SeedEnvs) else "call"
            for worker_id, command in pending:
                self._post(worker_id, command, deadline)
            if not self.wait(lambda: len(answers) == len(pending), deadline):
                heard = {env_id for answer in answers for env_id in answer.values}
                ids = [i for _, command in pending for i in command.env_ids if i not in heard]
                raise RecvTimeout(waiting_for=ids, timeout=deadline.timeout_s, during=self._during)
        finally:
            del self._inbox.returned[call_id]
        return answers

    # --- end -----------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Ends workers and frees everything. May be called again."""
        if self._finalizer.detach() is not None:
            self._words.release()
            self._engine_asleep.release()
            self._crew.close(deadline)


def _close_forgotten(crew: Crew) -> None:
    """Runs when the backend was forgotten, or the interpreter ends."""
    crew.close(Deadline.after(2))
