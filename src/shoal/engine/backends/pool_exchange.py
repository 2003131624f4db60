"""What goes into a native pool and what comes out of it, env by env.

Knows the contract of a native pool, rows, and how a caller is woken. Does not know what an
engine asks of a backend; that is `envpool`.

Where an env is lies in one array, `Exchange.phase`, and each change of it is one assignment
that numpy carries out whole. With results that stay in a list until they have been noted,
and requests that leave a trace as they go out, an interrupt at any place loses and repeats
nothing: what it cut off is done again from what these say.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.core.deadline import stopwatch
from shoal.engine.core.layout import Status
from shoal.engine.env import PoolResults

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.engine.backends.waking import Wakeups
    from shoal.engine.core.deadline import Deadline
    from shoal.engine.core.layout import Arrays
    from shoal.engine.env import NativePool

__all__ = ["IDLE", "NEW", "Exchange", "Receiver"]

Array = np.ndarray[Any, Any]
_READY, _RESET_DONE = int(Status.READY), int(Status.RESET_DONE)


class Phase(IntEnum):
    """Where an env is. Those that wait for their turn, then those that are in the pool."""

    RUNNING = 0  # idle, in the middle of an episode
    ENDED = 1  # idle, and its episode is over
    NEW = 2  # idle, and was never reset
    WAITS_TO_STEP = 3
    WAITS_TO_STEP_AUTORESET = 4
    WAITS_TO_RESET = 5
    WAITS_TO_RESET_AFTER = 6  # the end of an episode, in the same call
    WAITS_TO_RESET_FIRST = 7  # and to step then: it was never reset
    WAITS_TO_RESET_FIRST_AUTORESET = 8
    STEPS = 9
    STEPS_AUTORESET = 10
    RESETS = 11
    RESETS_AFTER = 12
    RESETS_FIRST = 13
    RESETS_FIRST_AUTORESET = 14


_RUNNING, _ENDED, NEW = int(Phase.RUNNING), int(Phase.ENDED), int(Phase.NEW)
IDLE = NEW  # the last phase of those that are idle
_STEPS, _STEPS_AUTORESET = int(Phase.STEPS), int(Phase.STEPS_AUTORESET)
_RESETS, _RESETS_AFTER = int(Phase.RESETS), int(Phase.RESETS_AFTER)
_WAITS_TO_RESET, _IN_POOL = int(Phase.WAITS_TO_RESET), int(Phase.STEPS)
_WAITS_TO_RESET_AFTER = int(Phase.WAITS_TO_RESET_AFTER)
_AFTER_END = np.uint8(_WAITS_TO_RESET_AFTER)
_FIRST = int(Phase.WAITS_TO_RESET_FIRST)
_WAIT_TO_GO = _STEPS - int(Phase.WAITS_TO_STEP)  # from waiting to being in the pool
_BOTH_FIRST = int(Phase.RESETS_FIRST) - int(Phase.WAITS_TO_STEP)  # from there to a step
# The phases of envs whose step is in their rows.
_AFTER_STEPS = bytes([_RUNNING, _ENDED, NEW, _WAITS_TO_RESET_AFTER, _RESETS_AFTER])
_LARGE = 1 << 14  # bytes
_ONCE: tuple[tuple[()], ...] = ((),)


class Exchange:
    """What goes into the pool and what comes out of it. Not for two threads at once.

    Attributes:
        pool: the pool.
        phase: `Phase` per env.
        num_waiting: how many envs wait for their turn. It and the next follow from
            `phase`, and are wrong after an interrupt until `recount`.
        num_in_pool: how many envs are in the pool.
        observation: of the last step, in arrays that the pool has given away; ``None`` if it
            was not one of all envs, or is small: copies cost less than the question.
    """

    def __init__(self, pool: NativePool, arrays: Arrays) -> None:
        self.pool = pool
        self.num_waiting = self.num_in_pool = 0
        self._is_writing = False  # results that have left the pool are not in the rows yet
        self.phase = np.full(pool.num_envs, NEW, np.uint8)
        self.observation: Sequence[Array] | None = None
        self._arrays = arrays
        spec = pool.spec
        self._step_rows = [arrays.observation[path] for path in spec.observation]
        self._is_large = sum(rows.nbytes for rows in self._step_rows) >= _LARGE
        self._reset_rows = [arrays.reset_observation[path] for path in spec.observation]
        self._info_rows = [arrays.info[path] for path in spec.info]
        self._one_at_a_time = pool.waits_for_all
        self._min_receivable = 1 if pool.waits_for_all else pool.batch_size
        self._every = np.arange(pool.num_envs)
        self._in_order = self._every.astype(np.int32).tobytes()
        self._all_running = bytes([_RUNNING]) * pool.num_envs
        self._box: list[Any] = []
        self._sent: list[None] = []
        self._request: tuple[Any, Any] = (self._every[:0], NEW)

    # --- what may be asked of it ---------------------------------------------------

    def all_done(self) -> bool:
        """Returns whether no env is busy."""
        return not (self.num_in_pool or self.num_waiting or self._is_writing)

    def steps_done(self) -> bool:
        """Returns whether all rows hold their step; some may be reset after its end now."""
        return not self.phase.tobytes().translate(None, _AFTER_STEPS)

    def can_receive(self) -> bool:
        """Returns whether `receive` would return at last."""
        return self.num_in_pool >= self._min_receivable

    def is_stuck(self) -> bool:
        """Returns whether nothing more will come unless more is sent.

        Also right without the lock: an env that comes out of the pool and has to go back
        is counted among those that wait before it is no longer counted there.
        """
        return not (self.num_waiting or self._is_writing or self.can_receive())

    def recount(self) -> None:
        """Makes up for what an interrupt may have cut off."""
        self._note_sent()
        self._is_writing = False
        self.num_in_pool = int((self.phase >= _IN_POOL).sum())
        self.num_waiting = int((self.phase > IDLE).sum()) - self.num_in_pool

    # --- in ------------------------------------------------------------------------

    def begin_resets(self, env_ids: Array | None) -> None:
        """Starts resets of idle envs."""
        self.phase[... if env_ids is None else env_ids] = _WAITS_TO_RESET
        self.num_waiting += len(self.phase) if env_ids is None else len(env_ids)
        self.pump()

    def begin_steps(self, env_ids: Array | None, *, autoreset: bool) -> None:
        """Starts steps of idle envs with the actions in their rows."""
        self.observation = None
        going = _STEPS_AUTORESET if autoreset else _STEPS
        if env_ids is None and self.phase.tobytes() == self._all_running:
            packed = self.pool.pack(self._arrays.action, None)
            self._transmit(self.pool.send, packed, slice(None), going)
            self.num_in_pool = len(self.phase)
            return
        ids = self._every if env_ids is None else env_ids
        phases = self.phase[ids]
        codes = np.where(phases == NEW, going + _FIRST - _STEPS, going - _WAIT_TO_GO)
        over = ids[phases == _ENDED]
        if len(over):
            # The pool would start the next episode and call that a step. An env that is
            # not reset stays where it is, and gains nothing.
            codes[phases == _ENDED] = _WAITS_TO_RESET_AFTER if autoreset else _ENDED
            self._arrays.reward[over] = 0
            for rows in self._info_rows:
                rows[over] = 0
            if not autoreset:
                self._publish(over, _READY)
        self.phase[ids] = codes
        self.num_waiting += int((codes > IDLE).sum())
        self.pump()

    def pump(self) -> None:
        """Sends what waits, as far as the pool can take it now."""
        if not self.num_waiting or (self._one_at_a_time and self.num_in_pool):
            return
        phase = self.phase
        waits = phase >= _WAITS_TO_RESET
        if self.num_in_pool:
            waits &= phase < _IN_POOL
        resets = waits.nonzero()[0]
        if len(resets):
            codes = phase[resets] + _WAIT_TO_GO
            self._transmit(self.pool.reset, resets.astype(np.int32), resets, codes)
            self._count_sent(len(resets))
            if self._one_at_a_time:
                return
        if self.num_waiting:
            steps = ((phase > IDLE) & (phase < _WAITS_TO_RESET)).nonzero()[0]
            packed = self.pool.pack(self._arrays.action, steps.astype(np.int32))
            self._transmit(self.pool.send, packed, steps, phase[steps] + _WAIT_TO_GO)
            self._count_sent(len(steps))

    def _count_sent(self, count: int) -> None:
        # In this order: who looks without the lock must not take them for done.
        self.num_in_pool += count
        self.num_waiting -= count

    def _transmit(self, call: Callable[[Any], None], what: Any, where: Any, codes: Any) -> None:
        self.observation = None
        self._request = (where, codes)
        # One call into C and nothing else: either it has left its trace, or nothing was sent.
        self._sent.extend(starmap(call, ((what,),)))
        self._note_sent()

    def _note_sent(self) -> None:
        if self._sent:
            where, codes = self._request
            self.phase[where] = codes
            self._sent.clear()

    # --- out -----------------------------------------------------------------------

    def receive(self) -> None:
        """Waits for results. Only if `can_receive`."""
        if not self._box:
            self._box.extend(starmap(self.pool.recv, _ONCE))  # as in `_transmit`

    def settle(self, *, goes_on: bool = True) -> None:
        """Writes what was received into the rows, and sends what follows if it ``goes_on``."""
        if self._box:
            self._note_results(self.pool.unpack(self._box[0]), goes_on=goes_on)
            self._is_writing = False

    def _note_results(self, results: PoolResults, *, goes_on: bool) -> None:
        ids = results.env_ids
        where: Any = slice(None) if ids.tobytes() == self._in_order else ids
        raw = self.phase[where].tobytes()
        first = raw[0]
        if first < _IN_POOL:
            self._box.clear()  # it was noted, and an interrupt came before this
            return
        self._is_writing = True
        if raw.count(raw[:1]) == len(raw):
            codes, num_waiting = _following(first, results)
            groups = [(first, where, results, codes)]
        else:
            codes, num_waiting, groups = np.zeros(len(ids), np.uint8), 0, []
            doing = np.frombuffer(raw, np.uint8)
            for code in sorted(set(raw)):
                mine = doing == code
                some = _picked(results, mine)
                codes[mine], num_more = _following(code, some)
                num_waiting += num_more
                groups.append((code, ids[mine], some, codes[mine]))
        for group in groups:
            if group[0] != _STEPS_AUTORESET:
                self._write(*group)
        self.num_waiting += num_waiting
        self.phase[where] = codes
        self._box.clear()  # some of the envs may go back into the pool now
        self.num_in_pool -= len(ids)
        if goes_on and self.num_waiting:
            self.pump()
        # The pool resets while these are written. An interrupt may lose them, as it loses
        # their step; what others say of an end must not be lost.
        for group in groups:
            if group[0] == _STEPS_AUTORESET:
                self._write(*group)
        is_whole = self._is_large and len(groups) == 1 and isinstance(where, slice)
        if is_whole and first in (_STEPS, _STEPS_AUTORESET) and self._are_plain(results):
            self.observation = results.observation

    def _are_plain(self, results: PoolResults) -> bool:
        """Returns whether an observation is such that a front may hand it on as it is."""
        return all(
            leaf.dtype == rows.dtype and leaf.flags.c_contiguous and leaf.flags.writeable
            for leaf, rows in zip(results.observation, self._step_rows, strict=True)
        )

    def _write(self, code: int, where: Any, results: PoolResults, codes: Any) -> None:
        """Writes results of envs that were in one phase; ``codes``: what they are in now."""
        arrays = self._arrays
        if code >= _RESETS:
            for rows, leaf in zip(self._reset_rows, results.observation, strict=True):
                rows[where] = leaf
            if code <= _RESETS_AFTER:
                self._publish(where, _READY if code == _RESETS else _READY | _RESET_DONE)
            return
        for rows, leaf in zip(self._step_rows, results.observation, strict=True):
            rows[where] = leaf
        for rows, leaf in zip(self._info_rows, results.info, strict=True):
            rows[where] = leaf
        arrays.reward[where] = results.reward
        arrays.terminated[where] = results.terminated
        arrays.truncated[where] = results.truncated
        # Those that are reset now are not ready yet; true is `Status.READY`.
        self._publish(where, _READY if code == _STEPS else codes == _RUNNING)

    def _publish(self, where: Any, status: Any) -> None:
        if self._arrays.timed[0]:
            self._arrays.ready_at[where] = stopwatch()
        self._arrays.status[where] = status


def _following(code: int, results: PoolResults) -> tuple[Any, int]:
    """Returns the phases after results in phase ``code``, and how many of them wait."""
    if code > _RESETS_AFTER:
        return code - _BOTH_FIRST, len(results.env_ids)
    if code >= _RESETS:
        return _RUNNING, 0
    ended = results.terminated | results.truncated
    if code == _STEPS:
        return ended, 0  # true is `Phase.ENDED`, false `Phase.RUNNING`
    count = int(np.count_nonzero(ended))
    return (ended * _AFTER_END if count else _RUNNING), count


def _picked(results: PoolResults, mine: Array) -> PoolResults:
    return PoolResults(
        results.env_ids[mine],
        [leaf[mine] for leaf in results.observation],
        results.reward[mine],
        results.terminated[mine],
        results.truncated[mine],
        [leaf[mine] for leaf in results.info],
    )


class Receiver:
    """A thread that receives, so that others can wait as long as they like."""

    def __init__(self, exchange: Exchange, lock: threading.Lock, wakeups: Wakeups) -> None:
        self.error: BaseException | None = None
        self._exchange = exchange
        self._wakeups = wakeups
        self._changed = threading.Condition(lock)
        self._is_closing = self._is_over = False
        self._at_end: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-envpool", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Says that there may be something to receive; the lock is held."""
        self._changed.notify()

    def stop(self, deadline: Deadline, at_end: Callable[[], None]) -> bool:
        """Ends the thread once nothing can be received, and calls ``at_end`` then.

        Returns:
            Whether that has happened by the deadline; it will in any case.
        """
        with self._changed:
            self._is_closing = True
            is_over, self._at_end = self._is_over, at_end
            self._changed.notify()
        if is_over:
            at_end()
        self._thread.join(min(deadline.left_s(), threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._receive_all()
        finally:
            with self._changed:
                at_end = self._at_end
                self._is_over = True
            if at_end is not None:
                at_end()

    def _receive_all(self) -> None:
        exchange = self._exchange
        try:
            while True:
                with self._changed:
                    while not exchange.can_receive():
                        if self._is_closing:
                            return
                        self._changed.wait()
                exchange.receive()
                with self._changed:
                    exchange.settle(goes_on=not self._is_closing)
                    is_over = not exchange.can_receive()
                self._wakeups.notify(all_done=is_over)
        except BaseException as exc:  # noqa: BLE001 - border: told to whoever waits
            self.error = exc
            self._wakeups.notify(all_done=True)
