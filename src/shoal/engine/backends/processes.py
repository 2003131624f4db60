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
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.backends.common import OneBreath
from shoal.engine.backends.crew import Crew
from shoal.engine.core.deadline import Deadline, stopwatch
from shoal.engine.core.layout import Word, view_arrays
from shoal.engine.core.messages import (
    CallEnvs,
    Command,
    EnvNotes,
    PackedNotes,
    PackedReturned,
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
from shoal.engine.system.channel import ChannelClosed, dumps, loads
from shoal.engine.system.cores import count_usable_cores
from shoal.engine.worker.host import describe_failure
from shoal.errors import BrokenError, RecvTimeout, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

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
        self.notes_taken = np.zeros(num_workers, np.uint64)
        self.returned: dict[int, dict[int, Returned]] = {}

    def take(self, worker_id: int, message: Any) -> None:
        """Keeps one message of a worker; once more, after an interrupt, does no harm."""
        match message:
            case PackedNotes(number, env_ids, notes):
                if number > self.notes_taken[worker_id]:
                    self.notes.update(_unpack_notes(env_ids, notes))
                    self.notes_taken[worker_id] = number
            case PackedReturned(call_id):
                # Answers to calls that nobody waits for any more are dropped here.
                if call_id in self.returned:
                    self.returned[call_id][worker_id] = _unpack_returned(message)


def _unpack_notes(env_ids: Sequence[int], packed: bytes) -> Mapping[int, EnvNotes]:
    try:
        notes: Mapping[int, EnvNotes] = loads(packed)
    except Exception as exc:  # noqa: BLE001 - border: foreign objects are rebuilt here
        return {
            env_id: EnvNotes(failure=describe_failure(env_id, "receive its result", exc))
            for env_id in env_ids
        }
    return notes


def _unpack_returned(answer: PackedReturned) -> Returned:
    try:
        return Returned(answer.call_id, loads(answer.values), answer.failures)
    except Exception as exc:  # noqa: BLE001 - border: foreign objects are rebuilt here
        failed = [describe_failure(i, "receive the call's result", exc) for i in answer.env_ids]
        return Returned(answer.call_id, {}, (*answer.failures, *failed))


class ProcessBackend(OneBreath):
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
        mixed_specs: bool = False,
        env_threads: bool = False,
        affinity: Sequence[Collection[int]] | None = None,
        deadline: Deadline,
    ) -> None:
        num_cores = count_usable_cores()
        ranges = assign_envs(len(factories), num_workers)
        trust_flags = spinning_is_safe(platform.machine())
        spinning = 0
        # With threads a worker that spins would keep its own envs from running.
        if trust_flags and not env_threads:
            their_cores = num_cores if affinity is None else len(set().union(*affinity))
            spinning = count_spinning_workers(num_workers, min(num_cores, their_cores))
        self._crew = Crew.start(
            factories,
            ranges,
            method=method,
            keep_infos=keep_infos,
            num_spinning=spinning,
            on_disk=on_disk,
            more_specs=more_specs,
            mixed_specs=mixed_specs,
            env_threads=env_threads,
            affinity=affinity,
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
        self._notes_announced = self.arrays.words.reshape(-1)[_NOTES::_STRIDE]
        self._at_rest = 0
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

    def resubmit(self, deadline: Deadline) -> None:
        """Asks every worker again; rows that were carried out have no op any more."""
        for worker_id, channel in enumerate(self._crew.channels):
            # A message that was cut off in the middle; the worker waits for its rest.
            if channel.has_unsent:
                self._flush(worker_id, deadline)
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
        commands = {
            worker_id: ResetEnvs(
                tuple(int(env_ids[k]) for k in ks),
                tuple(seeds[k] for k in ks),
                tuple(kwargs[k] for k in ks),
                tuple(undo_prepared[k] for k in ks),
            )
            for worker_id, ks in by_worker.items()
        }
        self._during = "reset"
        self._post_all(commands.items(), "the arguments of reset", Deadline.after(60))

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Sends action leaves without a fixed shape, before `submit`."""
        by_worker: dict[int, dict[int, Mapping[LeafPath, Any]]] = {}
        for env_id, leaves in actions.items():
            by_worker.setdefault(self._worker_of[env_id], {})[env_id] = leaves
        commands = [(worker_id, SetActions(mine)) for worker_id, mine in by_worker.items()]
        self._post_all(commands, "the actions", Deadline.after(60))

    def _post_all(
        self, commands: Iterable[tuple[int, Command]], what: str, deadline: Deadline
    ) -> None:
        """Sends one message per worker, or none at all.

        Raises:
            UsageError: they cannot be pickled. Nothing was sent.
        """
        try:
            packed = [(worker_id, dumps(command)) for worker_id, command in commands]
        except Exception as exc:
            raise UsageError(
                f"{what} cannot be sent to a worker process: {type(exc).__name__}: {exc}"
            ) from exc
        for worker_id, body in packed:
            self._crew.channels[worker_id].queue_bytes(body)
            self._flush(worker_id, deadline)

    def _flush(self, worker_id: int, deadline: Deadline) -> None:
        channel = self._crew.channels[worker_id]
        # It wakes up from the socket alone, and reads while we still write.
        try:
            self._crew.announce_mail(worker_id)
            channel.flush(deadline)
            # What it said meanwhile was read here, and will not wake us any more.
            self._crew.read_channel(worker_id)
        except ChannelClosed as exc:
            self._raise_death(deadline)
            raise BrokenError(
                f"Worker {worker_id} has hung up. The engine is broken: close it."
            ) from exc
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
        # Once armed, each result makes a noise, whoever else waits for all of them.
        kind = 2 if for_all and self._trust_flags and not self._at_rest else 1
        try:
            while True:
                asleep[0] = kind
                self._full_fence()
                if done():
                    break
                # Before the wait: an earlier call may have seen it and not minded.
                if self._crew.first_death() is not None:
                    self._raise_death(deadline)
                came = self._crew.wait(deadline)
                if not came and deadline.expired() and self._crew.first_death() is None:
                    if done():
                        break
                    return False
        finally:
            asleep[0] = self._at_rest
            if self._at_rest:
                self.poke()  # what was heard here may have been meant for who dozes
        spin.note_wait(clock() - started)
        return True

    def wake_fds(self) -> Sequence[int]:
        """See `Backend.wake_fds`."""
        return self._crew.wake_fds()

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """Says to the workers whether the engine sleeps, as far as they are concerned."""
        if self._finalizer.alive:  # who dozed while it was closed may still say so
            self._engine_asleep[0] = self._at_rest = int(armed)
            self._full_fence()

    def doze(self, deadline: Deadline) -> list[int]:
        """See `Backend.doze`."""
        return self._crew.doze(deadline)

    def poke(self) -> None:
        """Rings the bell that the workers ring."""
        if self._finalizer.alive:
            self._crew.engine_bell.ring()

    def take_news(self, news: list[int]) -> None:
        """Takes in messages and deaths."""
        self._crew.take_news(news)
        worker = self._crew.first_death()
        if worker is not None:
            raise self._crew.death_of(worker, self._during)

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
        announced: bytes = self._notes_announced.tobytes()
        taken: bytes = self._inbox.notes_taken.tobytes()
        return announced != taken

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns the notes of all rows published so far, and forgets them."""
        deadline = Deadline.after(60)
        words = self._words
        for worker_id, word in enumerate(self._notes_words):
            # Announced before the rows were published, so what is missing is on its way.
            while self._inbox.notes_taken[worker_id] < words[word]:
                # Perhaps it was read already, and will not wake us.
                self._crew.read_channel(worker_id)
                if self._inbox.notes_taken[worker_id] == words[word]:
                    break
                if self._crew.workers[worker_id].has_ended:
                    break  # what it said before was read when its end was
                self._crew.wait(deadline)
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
        answers = self._inbox.returned[call_id] = {}
        try:
            self._during = "seed" if isinstance(pending[0][1], SeedEnvs) else "call"
            self._post_all(pending, "the arguments of the call", deadline)
            if not self.wait(lambda: len(answers) == len(pending), deadline):
                ids = [i for w, command in pending if w not in answers for i in command.env_ids]
                raise RecvTimeout(waiting_for=ids, timeout=deadline.timeout_s, during=self._during)
        finally:
            del self._inbox.returned[call_id]
        return list(answers.values())

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
