"""Sending to some envs of a pool and receiving from those that are ready.

Knows TensorDicts, requests and the engine's verbs. Does not know EnvBase or what the
envs are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from shoal.engine.core.deadline import Deadline, stopwatch
from shoal.engine.core.layout import Status
from shoal.errors import ClosedError, RecvTimeout, SpecError, UsageError
from shoal.torchrl.pool_awaitable import PoolAwaitables
from shoal.torchrl.pool_index import ENV_INDEX, as_made, flat, is_one
from shoal.torchrl.pool_requests import RESET, STEP, STEP_AND_RESET, VERBS, wanted_count
from shoal.torchrl.pool_rows import first_row, joined, stack_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.engine.concurrent import ConcurrentEngine
    from shoal.torchrl.options import BatchOptions
    from shoal.torchrl.pool_index import EnvIndices
    from shoal.torchrl.pool_requests import Requests
    from shoal.torchrl.pool_rows import SentRows
    from shoal.torchrl.pool_stats import PoolStats
    from shoal.torchrl.rows import Rows

__all__ = ["PoolVerbs"]

Array = np.ndarray[Any, Any]
Index = int | list[int] | None
Pair = tuple[TensorDictBase, TensorDictBase]
_FAILED = int(Status.FAILED)


class PoolVerbs(PoolAwaitables):
    """The asynchronous verbs of a pool; see `AsyncEnvPool`.

    Each kind of call has three: ``async_*_send`` hands rows over and does not wait,
    ``async_*_recv`` waits for ready ones, and a coroutine does both and lets the event loop
    run meanwhile.
    """

    min_get: int
    stack: str
    num_envs: int
    is_closed: bool
    batch_size: torch.Size
    _options: BatchOptions
    _requests: Requests
    _sent: SentRows
    _stats: PoolStats
    _started: Callable[[], Rows]
    _engine_now: Callable[[], ConcurrentEngine]
    _indices_now: Callable[[], EnvIndices]
    _with_index: Callable[[TensorDictBase, Array], TensorDictBase]
    _td: Callable[[TensorDictBase], TensorDictBase]

    def _engine_of(self, verb: str, *, starts: bool = False) -> ConcurrentEngine:
        """Returns the engine that runs.

        Raises:
            ClosedError: none does, and this verb does not start one.
            UsageError: this is a view of some envs.
        """
        if self.__dict__["_owner"] is not None:
            raise UsageError(
                f"cannot {verb}: a view of a pool has the synchronous verbs only; send to the pool"
                " itself, and name the envs with env_index"
            )
        if self.is_closed and not starts:
            raise ClosedError(
                f"cannot {verb}: the envs of the pool do not run. They were closed, or have not"
                " been started: reset them first"
            )
        return self._engine_now()

    # --- send ------------------------------------------------------------------------

    def async_step_send(self, tensordict: TensorDictBase, env_index: Index = None) -> None:
        """Starts a step of some envs.

        Args:
            tensordict: one row per env, with its action; of the batch size of one env if
                ``env_index`` is an integer.
            env_index: which envs. ``None``: the ``env_index`` entry of the TensorDict says it.

        Raises:
            PendingCallError: one of them is busy. Nothing was sent.
            SpecError: the actions do not fit. Nothing was sent.
            UsageError: an unknown env, or one named twice.
            ClosedError: the envs do not run. A reset starts them.
        """
        self._send(STEP, tensordict, env_index)

    def async_step_and_maybe_reset_send(
        self, tensordict: TensorDictBase, env_index: Index = None
    ) -> None:
        """Starts a step of some envs, and a reset right after it where an episode ends.

        Arguments and errors as for `async_step_send`.
        """
        self._send(STEP_AND_RESET, tensordict, env_index)

    def async_reset_send(
        self, tensordict: TensorDictBase | None = None, env_index: Index = None, **kwargs: Any
    ) -> None:
        """Starts a reset of some envs; and the envs, if they do not run.

        Args:
            tensordict: entries that the resets may read; may be left out if ``env_index`` says
                which envs.
            env_index: as for `async_step_send`; all envs if there is no TensorDict either.
            **kwargs: handed to the reset of each env.

        Raises:
            PendingCallError: one of them is busy. Nothing was sent.
            UsageError: as `async_step_send`; a ``_reset`` mask that leaves some of them out.
        """
        self._send(RESET, tensordict, env_index, kwargs=kwargs)

    def _send(
        self,
        kind: int,
        tensordict: TensorDictBase | None,
        env_index: Any,
        *,
        kwargs: dict[str, Any] | None = None,
        is_private: bool | None = None,
    ) -> tuple[Array, bool]:
        """Sends; returns the ids, ascending, and whether a single row was sent."""
        engine = self._engine_of(VERBS[kind], starts=kind == RESET)
        ids, order, rows, is_single = self._addressed(tensordict, env_index)
        if order is not None:
            rows = None if rows is None else rows[torch.from_numpy(order)]
            kwargs = _in_order(kwargs, order)
        with engine.lock:
            # From here on nobody else closes the envs, or starts others.
            engine.check_open(VERBS[kind])
            began = stopwatch()
            self._requests.check_idle(ids)
            some = self._started().some(ids)
            if kind == RESET:
                _check_mask(rows, len(ids))
                request = some.reset_request(rows, kwargs or {})
                self._sent.keep(ids, rows)
                engine.send_resets(ids, kwargs=None if request is None else request[1])
            else:
                assert rows is not None
                actions = some.encode(rows)
                self._sent.keep(ids, rows)
                engine.send_steps(actions, ids, autoreset=kind == STEP_AND_RESET)
            private = is_single and env_index is not None if is_private is None else is_private
            self._requests.note(ids, kind, is_private=private)
            self._stats.note_sent(ids, began)
        return ids, is_single

    def _addressed(
        self, tensordict: TensorDictBase | None, env_index: Any
    ) -> tuple[Array, Array | None, TensorDictBase | None, bool]:
        """Returns which envs are meant, and their rows.

        Returns:
            The ids, ascending; the order that sorts the rows, ``None`` if they are sorted;
            the rows; and whether there is a single unbatched one.
        """
        inner = self.batch_size[1:]
        if tensordict is None:
            if env_index is None:
                return np.arange(self.num_envs), None, None, False
            ids, order = self._sorted(flat(env_index))
            return ids, order, None, is_one(env_index)
        shape = tensordict.shape
        if env_index is None:
            is_plain = type(tensordict) is TensorDict
            entry = (
                tensordict._tensordict.get(ENV_INDEX)
                if is_plain
                else tensordict.get(ENV_INDEX, None)
            )
            if entry is None:
                raise UsageError(
                    "the TensorDict has no 'env_index' entry that says which envs its rows are"
                    " for; set one, or pass env_index"
                )
            known = as_made(entry)
            if known is not None and shape == (len(known), *inner) and known[-1] < self.num_envs:
                return known, None, tensordict, False
            env_index = self._indices_now().read(entry)
        is_single = is_one(env_index) and shape == inner
        named = flat(env_index)
        if is_single:
            tensordict = _with_lead(tensordict)
            shape = tensordict.shape
        if shape != (len(named), *inner):
            raise SpecError(
                key="env_index",
                expected=f"a TensorDict of shape {(len(named), *inner)} for envs {list(named)}",
                actual=f"one of shape {tuple(shape)}",
            )
        return *self._sorted(named), tensordict, is_single

    def _sorted(self, named: Sequence[int]) -> tuple[Array, Array | None]:
        """Returns ids in ascending order, and the order that sorts them, if they were not."""
        ids, order = np.asarray(named), None
        if len(ids) > 1 and np.count_nonzero(ids[1:] <= ids[:-1]):
            order = np.argsort(ids, kind="stable")
            ids = ids[order]
            if (ids[1:] == ids[:-1]).any():
                raise UsageError(f"env_index names an env twice: {list(named)}")
        self._check_range(ids, named)
        return ids, order

    # --- receive ---------------------------------------------------------------------

    def async_step_recv(
        self,
        min_get: int | None = None,
        env_index: Index = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Waits for results of `async_step_send`.

        Args:
            min_get: wait for at least this many; ``None`` for the pool's `min_get`. What else
                is ready comes along.
            env_index: wait for this env, or for all of these, instead. They need not have
                been sent by number; but those that were are received only so.
            max_get: return at most this many, lowest env index first; ``None`` for no limit.
            timeout: seconds for the whole call; 0 polls. With one, the call goes on waiting
                after the first ``min_get`` for others, up to ``max_get``, until the time is
                up. ``None``: the pool's own ``timeout``, and no longer than needed.

        Returns:
            What was sent, with ``next`` and ``env_index``, ``[n, *batch of one env]``, sorted
            by env. For an integer ``env_index`` a single row without a dimension for it.

        Raises:
            RecvTimeout: fewer than ``min_get`` came in time; nothing is lost. It is a
                ``TimeoutError``.
            NoPendingCallError: fewer than ``min_get`` are in flight for this.
            EnvError: envs raised. They can be sent to again; results of others stay.
            ValueError: a number that makes no sense.
            WorkerDied: a worker has ended, and not enough is ready.
        """
        found: TensorDictBase = self._recv(STEP, min_get, env_index, max_get, timeout)
        return found

    def async_step_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: Index = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> Pair:
        """Waits for results of `async_step_and_maybe_reset_send`.

        Returns:
            What was sent with ``next``, terminal observations included; and new roots to act
            on. Arguments and errors as for `async_step_recv`.
        """
        found: Pair = self._recv(STEP_AND_RESET, min_get, env_index, max_get, timeout)
        return found

    def async_reset_recv(
        self,
        min_get: int | None = None,
        env_index: Index = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Waits for results of `async_reset_send`; as `async_step_recv`."""
        found: TensorDictBase = self._recv(RESET, min_get, env_index, max_get, timeout)
        return found

    def _recv(
        self, kind: int, min_get: Any, env_index: Any, max_get: Any, timeout: float | None
    ) -> Any:
        wanted = wanted_count(min_get, max_get, timeout, self.min_get)
        engine = self._engine_of(f"receive for {VERBS[kind]}")
        deadline = Deadline.after(self._options.timeout if timeout is None else timeout)
        if env_index is not None:
            pick, is_ready = self._pick_these(engine, kind, env_index)
        else:
            pick, is_ready = self._pick_ready(engine, kind, wanted, max_get, timeout, deadline)
        # For a single one of any, every noise is enough, and asking would cost each row more
        # than a look in vain now and then.
        takes_any = env_index is None and wanted == 1 and timeout is None
        found = engine.wait(pick, deadline, None if takes_any else is_ready)
        if found is None:
            raise self._timed_out(kind, env_index, deadline.timeout_s)
        return found

    def _timed_out(self, kind: int, env_index: Any, timeout_s: float) -> RecvTimeout:
        waiting = np.flatnonzero(self._requests.kinds == kind).tolist()
        if env_index is not None:
            waiting = flat(env_index)
        return RecvTimeout(waiting_for=waiting, timeout=timeout_s, during=VERBS[kind])

    def _pick_ready(
        self,
        engine: ConcurrentEngine,
        kind: int,
        wanted: int,
        max_get: int | None,
        timeout: float | None,
        deadline: Deadline,
    ) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """Returns what takes ready envs if there are enough, and what says whether there are."""
        requests, status = self._requests, engine.rows.status

        def enough() -> int:
            if timeout is None or deadline.expired():
                return wanted
            return min(requests.count(kind), max_get or self.num_envs)

        def pick() -> Any:
            ids = requests.ready(kind, status)
            if len(ids) < wanted:
                requests.check_enough(wanted, kind)
            self._take_failed(engine, ids)
            if len(ids) < enough():
                return None
            chosen = ids if max_get is None else ids[:max_get]
            return self._collected(engine, kind, chosen)

        def is_ready() -> bool:
            ids = requests.ready(kind, status)
            if len(ids) >= enough() or bool((status[ids] & _FAILED).any()):
                return True
            return requests.count(kind) < wanted  # others have taken what was waited for

        return pick, is_ready

    def _pick_these(
        self, engine: ConcurrentEngine, kind: int, env_index: Any
    ) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """Returns what takes these envs if all are ready, and what says whether they are."""
        is_single = is_one(env_index)
        ids = np.unique(flat(env_index))
        self._check_range(ids, env_index)
        requests, status = self._requests, engine.rows.status

        def pick() -> Any:
            requests.check_sent(ids.tolist(), kind)
            if not status[ids].all():
                return None
            self._take_failed(engine, ids)
            return self._collected(engine, kind, ids, is_single=is_single)

        def is_ready() -> bool:
            return bool(status[ids].all() or (requests.kinds[ids] != kind).any())

        return pick, is_ready

    def _check_range(self, ids: Array, named: Any) -> None:
        """Raises `UsageError` for ids, ascending, that are not those of envs."""
        if not len(ids) or ids[0] < 0 or ids[-1] >= self.num_envs:
            raise UsageError(
                f"env_index names envs from 0 to {self.num_envs - 1}, at least one; not"
                f" {named if isinstance(named, int) else list(named)}"
            )

    def _take_failed(self, engine: ConcurrentEngine, ids: Array) -> None:
        """Takes those of ready envs that raised.

        Raises: `EnvError` if there are any.
        """
        failed = engine.rows.status[ids] & _FAILED
        if np.count_nonzero(failed):
            self._take(engine, ids[failed != 0])

    def _take(self, engine: ConcurrentEngine, ids: Array) -> None:
        self._requests.forget(ids)
        engine.take(ids)

    def _collected(
        self, engine: ConcurrentEngine, kind: int, ids: Array, *, is_single: bool = False
    ) -> Any:
        """Takes ready envs and returns their results."""
        in_flight = self._requests.count_all(kind)
        self._take(engine, ids)
        self._stats.note_received(ids, kind, in_flight)
        some = self._started().some(ids)
        before = self._td(self._sent.take(ids, torch.Size((len(ids), *self.batch_size[1:]))))
        following = None if kind == RESET else self._td(some.stepped())
        root = None
        if kind != STEP:
            root = self._td(some.present(none_at_end=kind == STEP_AND_RESET))
        stepped, root = joined(before, following, root)
        if kind == STEP:
            return self._finished(stepped, ids, is_single=is_single)
        assert root is not None
        new_root = self._finished(root, ids, is_single=is_single)
        if kind == RESET:
            return new_root
        return self._finished(stepped, ids, is_single=is_single), new_root

    def _finished(self, made: TensorDictBase, ids: Array, *, is_single: bool) -> TensorDictBase:
        if is_single:
            row = first_row(made)
            return row.set(ENV_INDEX, self._indices_now().one(int(ids[0])))
        return self._with_index(self._as_asked(made), ids)

    def _as_asked(self, made: TensorDictBase) -> TensorDictBase:
        """Returns a batch as a lazy stack, if all are to be."""
        if self.stack == "lazy" and not isinstance(made, LazyStackedTensorDict):
            return stack_rows(list(made.unbind(0)), "lazy")
        return made

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """Returns how busy the envs and the caller are, since the start or the last reset.

        Args:
            reset: count from zero again afterwards.

        Returns:
            ``steps``, ``resets``, ``items`` (both), ``batches`` and ``elapsed_s``;
            ``steps_per_s``; ``avg_batch_size``; ``batch_fill_ratio``: what was received of
            what was in flight then; ``partial_batch_fraction``: receives that left some in
            flight. In milliseconds: ``avg_env_ms`` with the env, from its send until its
            result was ready; ``avg_observation_to_batch_ms`` until it was received;
            ``avg_batch_to_action_ms`` until it was sent again. ``consumer_busy_fraction`` of
            the time the caller held at least one env. ``slowest_envs``: pairs of env and mean
            ``avg_env_ms``, slowest first. ``per_env``: lists of ``steps``, ``resets`` and the
            seconds ``busy_s``, ``dwell_s`` and ``waiting_s`` of the three spans above.
            Empty if the envs do not run.
        """
        if self.is_closed:
            return {}
        with self._engine_now().lock:
            return self._stats.snapshot(reset=reset)


def _in_order(kwargs: dict[str, Any] | None, order: Array) -> dict[str, Any] | None:
    """Returns arguments of a reset with those of single envs in another order."""
    listed = (kwargs or {}).get("list_of_kwargs")
    if kwargs is None or listed is None or len(listed) != len(order):
        return kwargs  # one of another length is refused later
    return {**kwargs, "list_of_kwargs": [listed[k] for k in order.tolist()]}


def _check_mask(rows: TensorDictBase | None, count: int) -> None:
    """Raises `UsageError` if a mask leaves out envs that are to be reset."""
    mask = None if rows is None else rows.get("_reset", None)
    if mask is not None and not mask.reshape(count, -1).any(-1).all():
        raise UsageError("the _reset mask leaves out envs that are sent: send those to be reset")


def _with_lead(tensordict: TensorDictBase) -> TensorDictBase:
    """Returns a single row as a batch of one."""
    if type(tensordict) is TensorDict and all(
        type(value) is torch.Tensor for value in tensordict._tensordict.values()
    ):
        entries = {key: value.unsqueeze(0) for key, value in tensordict._tensordict.items()}
        return TensorDict._new_unsafe(entries, batch_size=torch.Size((1, *tensordict.shape)))
    return tensordict.unsqueeze(0)
