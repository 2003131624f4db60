"""Moves rows between the engine and its backend: start, wait, take back.

Knows the slot table, the predictor of resets, and one backend. Does not know what
callers may ask for, or in which words; that is `api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.actions import ActionWriter
from shoal.engine.backends.common import env_error
from shoal.engine.core.layout import Op, Status
from shoal.engine.core.lifecycle import EngineState
from shoal.engine.core.prefetch import ResetPredictor
from shoal.engine.core.slots import SlotTable
from shoal.engine.gather import Gatherer
from shoal.errors import (
    BrokenError,
    ClosedError,
    EnvError,
    PendingCallError,
    RecvTimeout,
    UsageError,
    WorkerDied,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shoal.engine.backends.base import Backend
    from shoal.engine.core.deadline import Deadline
    from shoal.engine.core.messages import EnvFailure

__all__ = ["Driver"]

Array = np.ndarray[Any, Any]
_READY, _RESET_DONE = int(Status.READY), int(Status.RESET_DONE)
_STEP, _PREPARE = int(Op.STEP), int(Op.STEP_PREPARE)
_AUTORESET, _RESET = int(Op.STEP_AUTORESET), int(Op.RESET)


class Driver:
    """The state of an engine between calls.

    Attributes:
        state: open, broken or closed.
        slots: which envs are in flight.
        gather: builds batches, and knows where present observations lie.
        is_claimed: bool ``[num_envs]``: who is in flight for somebody that an interrupt of
            another's call does not concern.
    """

    def __init__(
        self, backend: Backend, num_envs: int, *, keep_infos: bool, prefetch_resets: bool
    ) -> None:
        self.backend = backend
        self.arrays = backend.arrays
        self.state = EngineState.OPEN
        self.slots = SlotTable(num_envs)
        self.actions = ActionWriter(backend.spec, backend.arrays, num_envs)
        self.gather = Gatherer(backend.spec, backend.arrays, num_envs, keep_infos=keep_infos)
        self.predictor = ResetPredictor(enabled=prefetch_resets)
        self._last_op = np.zeros(num_envs, np.uint8)
        # The op of all envs, where they were handed over together: nearly always.
        self._common_op: int | None = None
        self._all_ready = bytes([_READY]) * num_envs
        self._prepared = np.zeros(num_envs, np.bool_)
        self._any_prepared = False
        # Resets that were prepared and may not be used: they have to be undone first.
        self._spoiled = np.zeros(num_envs, np.bool_)
        self._failures: dict[int, EnvFailure] = {}
        # The synchronous call whose results were not received, after a timeout.
        self._unfinished: tuple[Any, Any] | None = None
        # An interrupt came while rows were in flight: their results belong to nobody.
        self._interrupted = False
        self.is_claimed = np.zeros(num_envs, np.bool_)

    # --- before a call -------------------------------------------------------------

    def check_usable(self, verb: str, deadline: Deadline) -> None:
        """Refuses a closed or broken engine; clears up after an interrupt."""
        if self.state is EngineState.CLOSED:
            raise ClosedError(f"cannot {verb}: the engine is closed; open a new one")
        if self.state is EngineState.BROKEN:
            raise BrokenError(f"cannot {verb}: a worker has died; close the engine")
        if self._interrupted:
            self.drop_in_flight(deadline)

    def drop_in_flight(self, deadline: Deadline) -> None:
        """Waits for everything in flight and drops the results that nobody claims.

        Raises:
            RecvTimeout: they did not come in time; the next call tries again.
        """
        self._interrupted = True
        # Nobody knows how far the interrupted call came; asking again is harmless.
        self.backend.resubmit(deadline)
        self._wait(self.backend.all_done, deadline, "finish what was interrupted", for_all=True)
        self._take_rows(np.flatnonzero(self.slots.in_flight & ~self.is_claimed))
        self.slots.recount()  # that may have been interrupted, too
        self._interrupted = False

    def drop_unfinished(self, deadline: Deadline) -> None:
        """Waits for the synchronous call that ran out of time, and drops its results.

        Raises:
            RecvTimeout: they did not come in time either.
        """
        assert self._unfinished is not None
        ids, status = self._unfinished[1], self.arrays.status
        where: Any = slice(None) if ids is None else ids
        self._wait(lambda: bool(status[where].all()), deadline, "finish what was interrupted")
        self._take_rows(ids)

    def note_interrupt(self) -> None:
        """Notes that a message to a worker was cut off; the next call sends its rest.

        It concerned idle envs: the results of those in flight are waited for as before.
        """
        self.is_claimed |= self.slots.in_flight
        self._interrupted = True

    # --- steps ---------------------------------------------------------------------

    def choose_op(self, *, autoreset: bool) -> int:
        """Returns the op of a step of all envs."""
        if autoreset:
            return _AUTORESET
        return _PREPARE if self.predictor.predicts_reset else _STEP

    def start_step(self, actions: Any, ids: Array | None, op: int) -> None:
        """Writes actions and hands idle envs (``None``: all) over to their workers."""
        objects = self.actions.write(actions, ids)
        try:
            self._start_step(ids, op, objects)
        except UsageError:
            raise  # objects that cannot be sent; nothing was handed over
        except BaseException as exc:
            self._note_break(exc)
            raise

    def _note_break(self, exc: BaseException) -> None:
        """Notes that a call was cut off: what is in flight now belongs to nobody."""
        self._interrupted = True
        if isinstance(exc, BrokenError):
            self.state = EngineState.BROKEN

    def _start_step(self, ids: Array | None, op: int, objects: Any) -> None:
        if objects is not None:
            # Before the ops: a worker that is busy with other envs may see those now.
            self.backend.send_action_objects(objects)
        if (
            self._any_prepared
            and (self._prepared | self._spoiled)[... if ids is None else ids].any()
        ):
            # Stepped on past an end whose reset was prepared.
            self._set_prepared(ids, False)
            self.predictor.note_wrong_guess()
        else:
            self.predictor.note_step()
        self._hand_over(ids, op)
        self.backend.submit(None if ids is None else ids.tolist())

    def _hand_over(self, ids: Array | None, op: int, *, in_rows: bool = True) -> None:
        """Hands envs over; ``in_rows``: the worker finds the op in their rows."""
        if ids is None:
            self._common_op = op
            self.arrays.status.fill(0)
            self.arrays.op.fill(op if in_rows else 0)
        else:
            if self._common_op is not None:
                self._last_op.fill(self._common_op)
                self._common_op = None
            self.arrays.status[ids] = 0
            self.arrays.op[ids] = op if in_rows else 0
            self._last_op[ids] = op
        self.slots.hand_over(ids)

    def step(
        self,
        actions: Any,
        ids: Array | None,
        op: int,
        deadline: Deadline,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[EnvFailure]:
        """Steps envs (``None``: all) and waits for them; returns failures.

        ``meanwhile`` is called, if ever, when the steps are in the rows and resets are under
        way.

        After a timeout, the same call goes on waiting for the step under way.
        """
        call = ("step", op == _AUTORESET)
        if self.slots.num_in_flight:
            self._check_resumes(call, actions, ids)
        try:
            if not self.slots.num_in_flight:
                self.start_step(actions, ids, op)
            if meanwhile is not None and (steps_done := self.backend.steps_done) is not None:
                self._wait(steps_done, deadline, "step")
                if not self.backend.all_done():
                    meanwhile()
            self._wait(self.backend.all_done, deadline, "step", for_all=True)
            return self.take(ids)
        except RecvTimeout:
            self._unfinished = (call, ids)
            raise
        except UsageError:
            raise  # nothing was handed over
        except BaseException as exc:
            self._note_break(exc)
            raise

    def _check_resumes(self, call: tuple[str, bool], actions: Any, ids: Array | None) -> None:
        """Checks that a step is the one whose results are still awaited."""
        if self._unfinished is None or self._unfinished[0] != call:
            self.check_no_reset("step")
            self.slots.check_idle(None, "step")
        under_way = self.slots.in_flight
        same = under_way.all() if ids is None else (np.flatnonzero(under_way).tolist() == list(ids))
        if not same or not self.actions.holds(actions, ids):
            raise PendingCallError(
                "a step with other actions is still under way after its timeout; call step"
                " with the same actions to get its results, or reset to drop them"
            )

    # --- resets --------------------------------------------------------------------

    def check_no_reset(self, verb: str) -> None:
        """Raises `PendingCallError` if a reset is under way after its timeout."""
        if self._unfinished is not None and self._unfinished[0][0] == "reset":
            raise PendingCallError(
                f"cannot {verb}: a reset is still under way after its timeout; call reset"
                " again to wait for it"
            )

    def reset(
        self,
        ids: Array | None,
        seeds: Sequence[int | None] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
        deadline: Deadline,
    ) -> list[EnvFailure]:
        """Resets envs (``None``: all) and waits for them; returns failures."""
        call = ("reset", None if ids is None else ids.tolist(), seeds, kwargs)
        started: Array | None = None
        if self._unfinished is not None and _are_same(self._unfinished[0], call):
            started = self._unfinished[1]
        else:
            if self._unfinished is not None:
                self.drop_unfinished(deadline)
            self.slots.check_idle(ids, "reset")
        try:
            if started is None:
                started = self._start_reset(ids, seeds, kwargs)
            if not len(started):
                return []
            # Others that are in flight need not be ready then.
            alone = len(started) == self.slots.num_in_flight
            status = self.arrays.status
            self._wait(lambda: bool(status[started].all()), deadline, "reset", for_all=alone)
            return self.take(started)
        except RecvTimeout:
            self._unfinished = (call, started)
            raise
        except UsageError:
            raise  # options that cannot be sent; nothing was handed over
        except BaseException as exc:
            self._note_break(exc)
            raise

    def _start_reset(
        self,
        ids: Array | None,
        seeds: Sequence[int | None] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> Array:
        """Starts what a reset needs; returns the envs that have to be waited for."""
        every = np.arange(self.slots.num_envs) if ids is None else ids
        plain = seeds is None and kwargs is None
        self.predictor.note_reset(plain=plain)
        prepared = self._prepared[every]
        spoiled = self._spoiled[every]
        self._set_prepared(every, False)
        if plain and not spoiled.any():
            if prepared.any():
                self.gather.set_fresh(every[prepared], True)
                every = every[~prepared]
            if len(every):
                whole = len(every) == self.slots.num_envs
                self._hand_over(None if whole else every, _RESET)
                self.backend.submit(None if whole else every.tolist())
            return every
        count = len(every)
        self._hand_over(every, _RESET, in_rows=False)
        try:
            self.backend.submit_resets(
                every.tolist(),
                [None] * count if seeds is None else seeds,
                [{}] * count if kwargs is None else kwargs,
                (prepared | spoiled).tolist(),
            )
        except UsageError:
            self.slots.take_back(every)
            self._set_prepared(every, prepared)
            self._spoiled[every] = spoiled
            raise
        return every

    def start_resets(
        self,
        ids: Array,
        seeds: Sequence[int | None] | None,
        kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Starts resets of idle envs that will be taken back one by one."""
        try:
            started = self._start_reset(ids, seeds, kwargs)
        except UsageError:
            raise  # options that cannot be sent; nothing was handed over
        except BaseException as exc:
            self._note_break(exc)
            raise
        if len(started) < len(ids):
            # The others were reset ahead of time: they are ready.
            ready = ids[~np.isin(ids, started)]
            self._hand_over(ready, _RESET, in_rows=False)
            self.arrays.status[ready] = _READY

    def spoil_prepared(self, ids: Array | None) -> None:
        """Gives up the prepared resets of these envs (``None``: all): they may have changed."""
        if self._any_prepared:
            where: Any = slice(None) if ids is None else ids
            self._spoiled[where] |= self._prepared[where]
            self._prepared[where] = False

    def forget_prepared(self, ids: Array | None) -> None:
        """Drops prepared resets: these envs (``None``: all) are about to be seeded."""
        self._set_prepared(ids, False)
        self.predictor.note_reset(plain=False)

    def _set_prepared(self, ids: Array | None, value: Array | bool) -> None:
        self._prepared[... if ids is None else ids] = value
        self._spoiled[... if ids is None else ids] = False
        self._any_prepared = bool(self._prepared.any() or self._spoiled.any())

    # --- waiting and taking --------------------------------------------------------

    def wait_ready(self, wanted: int, deadline: Deadline) -> Array:
        """Waits until ``wanted`` envs in flight are ready; returns all that are."""
        status, flags = self.arrays.status, self.slots.in_flight

        def enough() -> bool:
            return int(np.count_nonzero(status[flags])) >= wanted

        self._wait(enough, deadline, "step", for_all=wanted == self.slots.num_in_flight)
        return np.flatnonzero(flags & (status != 0))

    def _wait(
        self, done: Callable[[], bool], deadline: Deadline, during: str, *, for_all: bool = False
    ) -> None:
        try:
            came = self.backend.wait(done, deadline, for_all=for_all)
        except WorkerDied as died:
            self.state = EngineState.BROKEN
            if not self._interrupted:
                self._keep_finished(died, after_reset=during == "reset")
            raise
        if not came:
            missing = np.flatnonzero(self.slots.in_flight & (self.arrays.status == 0))
            raise RecvTimeout(
                waiting_for=missing.tolist(), timeout=deadline.timeout_s, during=during
            )

    def _keep_finished(self, died: WorkerDied, *, after_reset: bool) -> None:
        """Gives the error what other envs had finished by then."""
        ready = np.flatnonzero(self.slots.in_flight & ((self.arrays.status & _READY) != 0))
        ops = self._last_op[ready] if self._common_op is None else self._common_op
        ready = ready[np.broadcast_to((ops == _RESET) == after_reset, ready.shape)]
        failures = self._take_rows(ready)
        died.failures = tuple(env_error(failure) for failure in failures)
        well = ready[~np.isin(ready, [failure.env_id for failure in failures])]
        if len(well):
            died.batch = self.gather.batch(well, after_reset=after_reset)

    def take(self, ids: Array | None, *, foretells: bool = True) -> list[EnvFailure]:
        """Takes ready envs (``None``: all) back; returns what failed.

        ``foretells``: the predictor learns from it. Not where it depends on the order of
        arrival which envs are taken together.
        """
        if ids is not None and len(ids) == self.slots.num_envs:
            ids = None
        try:
            return self._take_rows(ids, foretells=foretells)
        except RecvTimeout:
            raise
        except BaseException as exc:
            self._note_break(exc)
            raise

    def _take_rows(self, ids: Array | None, *, foretells: bool = False) -> list[EnvFailure]:
        if self._unfinished is not None and self._concerns_unfinished(ids):
            self._unfinished = None
        failures: list[EnvFailure] = []
        if self.backend.has_notes():
            notes = self.backend.take_notes()
            self.gather.note(notes)
            for env_id, note in notes.items():
                if note.failure is not None:
                    self._failures[env_id] = note.failure
        if self._failures:
            # Those of envs that are not taken yet stay for the call that takes them.
            taken = range(self.slots.num_envs) if ids is None else ids.tolist()
            failures = [self._failures.pop(i) for i in taken if i in self._failures]
        self.slots.take_back(ids)
        self.is_claimed[... if ids is None else ids] = False
        if ids is None and self._common_op is not None:
            self._note_result(None, self._common_op, foretells=foretells)
            return failures
        if self._common_op is not None:
            self._last_op.fill(self._common_op)
        every = np.arange(self.slots.num_envs) if ids is None else ids
        ops = self._last_op[every]
        kinds = set(ops.tobytes())
        if len(kinds) == 1:
            self._note_result(every, kinds.pop(), foretells=foretells)
            return failures
        for op in sorted(kinds):
            self._note_result(every[ops == op], op, foretells=foretells)
        return failures

    def _concerns_unfinished(self, ids: Array | None) -> bool:
        assert self._unfinished is not None
        others = self._unfinished[1]
        return ids is None or others is None or bool(np.isin(ids, others).any())

    def _note_result(self, ids: Array | None, op: int, *, foretells: bool) -> None:
        """Notes what the results of one op mean for the next call."""
        status = self.arrays.status
        gather = self.gather
        if op == _AUTORESET:
            if ids is not None:
                gather.set_fresh(ids, (status[ids] & _RESET_DONE) != 0)
            elif status.tobytes() != self._all_ready:
                gather.set_fresh(None, (status & _RESET_DONE) != 0)
            elif gather.any_fresh:
                gather.set_fresh(None, False)
        elif op == _RESET:
            gather.set_fresh(ids, True)
        else:
            gather.set_fresh(ids, False)
            where: Any = slice(None) if ids is None else ids
            arrays = self.arrays
            if foretells:
                ended = arrays.terminated[where].any() or arrays.truncated[where].any()
                self.predictor.note_ends(any_finished=bool(ended))
            if op == _PREPARE:
                self._set_prepared(ids, (status[where] & _RESET_DONE) != 0)

    def failure(
        self, ids: Array | None, failures: list[EnvFailure], *, after_reset: bool
    ) -> EnvError:
        """Returns the error for envs that raised, with the results of the others."""
        error = EnvError.of_many([env_error(failure) for failure in failures])
        failed = {failure.env_id for failure in failures}
        every = range(self.slots.num_envs) if ids is None else ids.tolist()
        well = np.asarray([env_id for env_id in every if env_id not in failed], np.int64)
        if len(well):
            error.batch = self.gather.batch(well, after_reset=after_reset)
        return error


def _are_same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - border: foreign objects; arrays and tensors have no answer
        return False
