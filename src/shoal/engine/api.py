"""The engine: checks calls, keeps the slot table, drives one backend.

Knows the tables of `core` and the contract of a backend. Does not know the
operating system or any framework.

Everything is one protocol: `Engine.send` hands envs over to their workers,
`Engine.recv` takes ready ones back. A synchronous step sends all and receives all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.backends.common import env_error
from shoal.engine.backends.opening import open_backend
from shoal.engine.config import EngineConfig
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.layout import Op
from shoal.engine.core.lifecycle import EngineState
from shoal.engine.core.messages import CallEnvs, SeedEnvs
from shoal.engine.core.seeds import seed_chain, spread_seed
from shoal.engine.driver import Driver
from shoal.errors import BrokenError, EnvError, NoPendingCallError, SpecError, UsageError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from shoal.engine.backends.base import Backend
    from shoal.engine.batch import Batch
    from shoal.engine.core.layout import Arrays
    from shoal.engine.env import AsyncEnvFactory, EnvFactory
    from shoal.engine.gather import Gatherer
    from shoal.engine.spec import EnvSpec, LeafPath

__all__ = ["Engine"]

Array = np.ndarray[Any, Any]
_CONFIGURED: Any = object()  # "the timeout of the configuration"
_STEP, _AUTORESET = int(Op.STEP), int(Op.STEP_AUTORESET)


class Engine:
    """Runs many envs at once. Numpy in, numpy out; never imports torch.

    The envs are built at once, in their workers. Use it as a context manager, or call
    `close`. One thread at a time may use an engine.

    Attributes:
        num_envs: how many envs there are; their ids go from 0 to ``num_envs - 1``.
        spec: the leaves of each env's observations, actions and infos.
        config: the options it was opened with.

    Example:
        >>> from shoal.adapters.gymnasium import GymnasiumFactory
        >>> factory = GymnasiumFactory.of("CartPole-v1")
        >>> with Engine([factory] * 4, backend="serial") as engine:
        ...     batch = engine.reset(seed=0)
        ...     batch = engine.step(np.ones(4, np.int64))
        >>> batch.observation[()].shape
        (4, 4)
    """

    def __init__(
        self, factories: Sequence[EnvFactory] | Sequence[AsyncEnvFactory], **options: Any
    ) -> None:
        """Builds the envs and waits until they stand.

        Args:
            factories: one per env; each is called in the worker that holds the env and
                returns an object with the members of `shoal.engine.Env`, or of
                `shoal.engine.AsyncEnv` for the backend of coroutines.
            **options: the fields of `EngineConfig`.

        Raises:
            UsageError: a wrong option, no factory, or one that cannot be pickled.
            StartError: an env could not be built.
            SpecError: the envs do not share their leaves.
            StartTimeout: they did not stand within ``start_timeout``.
        """
        self.config = EngineConfig.of(options)
        given: list[Any] = list(factories)
        self.num_envs = len(given)
        if not given or not all(map(callable, given)):
            raise UsageError("an engine needs one callable per env, and at least one env")
        self._backend: Backend = open_backend(given, self.config)
        self.spec: EnvSpec = self._backend.spec
        self._driver = Driver(
            self._backend,
            self.num_envs,
            keep_infos=self.config.keep_infos,
            prefetch_resets=self.config.prefetch_resets and self.spec.undoes_resets,
        )
        self._next_call_id = 1

    # --- state ---------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._driver.state is EngineState.CLOSED

    @property
    def is_broken(self) -> bool:
        """Whether a worker has died; only `close` is left then."""
        return self._driver.state is EngineState.BROKEN

    @property
    def num_in_flight(self) -> int:
        """How many envs were sent and not yet received."""
        return self._driver.slots.num_in_flight

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers; empty for the serial backend."""
        return self._backend.worker_pids

    @property
    def rows(self) -> Arrays:
        """Live views of the rows, for front ends that copy for themselves.

        What they hold after `step_rows` or `reset_rows` stays until the next call.
        """
        return self._driver.arrays

    def take_observation(self) -> Mapping[LeafPath, Array] | None:
        """Gives away the observation of the last step of all envs, if it lies besides `rows`.

        For front ends, which save a copy. ``None`` mostly, and the second time.
        """
        return self._backend.take_observation()

    @property
    def gatherer(self) -> Gatherer:
        """Where each env's present observation lies; for front ends, as `rows`."""
        return self._driver.gather

    def __repr__(self) -> str:
        return (
            f"Engine(num_envs={self.num_envs}, backend={self.config.backend!r},"
            f" num_workers={max(1, len(self.worker_pids))}, state={self._driver.state.value},"
            f" in_flight={self.num_in_flight})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """Ends the envs, the workers, and everything shared. From any state, any time.

        Args:
            timeout: seconds that the envs may take to end before they are killed;
                ``None`` for ``close_timeout``.
        """
        if self._driver.state is EngineState.CLOSED:
            return
        deadline = Deadline.after(self.config.close_timeout if timeout is None else timeout)
        self._driver.state = EngineState.CLOSED
        self._backend.close(deadline)

    # --- the protocol --------------------------------------------------------------

    def send(
        self, actions: Any, env_ids: Sequence[int] | None = None, *, autoreset: bool = True
    ) -> None:
        """Starts a step of some envs. Does not wait.

        Args:
            actions: ``[n, *shape]``, or a mapping from leaf path to such arrays.
            env_ids: the envs, in any order; rows of ``actions`` are in the same order.
                ``None`` for all.
            autoreset: reset an env at once when its episode ends.

        Raises:
            SpecError: the actions do not fit. Nothing was sent.
            PendingCallError: one of the envs has not been received yet.
            UsageError: an unknown env, or one named twice.
        """
        driver = self._driver
        driver.check_usable("send", self._deadline(_CONFIGURED))
        ids = None
        if env_ids is not None:
            given = np.asarray(list(env_ids))
            ids = driver.slots.check_ids(env_ids)
            if not np.array_equal(given, ids):
                actions = _reordered(actions, np.argsort(given), "action")
        driver.slots.check_idle(ids, "send")
        driver.start_step(actions, ids, _AUTORESET if autoreset else _STEP)

    def recv(
        self,
        min_envs: int | None = None,
        max_envs: int | None = None,
        timeout: float | None = _CONFIGURED,
    ) -> Batch:
        """Waits for results of envs that were sent, and returns those that are ready.

        Args:
            min_envs: wait for at least this many; ``None`` for all that are in flight.
            max_envs: return at most this many, lowest ids first; ``None`` for no limit.
            timeout: seconds; 0 polls, ``None`` waits without limit.

        Returns:
            The results, which are the caller's.

        Raises:
            RecvTimeout: not enough was ready in time; nothing has changed.
            NoPendingCallError: fewer envs are in flight than asked for.
            EnvError: some envs raised; the others are in its ``batch``.
            WorkerDied: a worker has ended; the engine is broken.
        """
        driver, deadline = self._driver, self._deadline(timeout)
        driver.check_usable("recv", deadline)
        driver.check_no_reset("recv")
        in_flight = driver.slots.num_in_flight
        wanted = in_flight if min_envs is None else min_envs
        if wanted < 1 or wanted > in_flight:
            raise NoPendingCallError(
                f"cannot receive {wanted} envs: {in_flight} are in flight; send first"
            )
        if max_envs is not None and max_envs < wanted:
            raise UsageError(f"max_envs ({max_envs}) is less than min_envs ({wanted})")
        ids = driver.wait_ready(wanted, deadline)[:max_envs]
        if failures := driver.take(ids, foretells=False):
            raise driver.failure(ids, failures, after_reset=False)
        return driver.gather.batch(None if len(ids) == self.num_envs else ids)

    # --- synchronous verbs ---------------------------------------------------------

    def step(
        self, actions: Any, *, autoreset: bool = True, timeout: float | None = _CONFIGURED
    ) -> Batch:
        """Steps all envs once and waits for all. Equals `send` and `recv` of all.

        Raises: as `send` and `recv`. After `RecvTimeout`, the same call with the same
        actions goes on waiting; after an interrupt the step's results are dropped.
        """
        self.step_rows(actions, autoreset=autoreset, timeout=timeout)
        return self._driver.gather.batch(None)

    def step_rows(
        self,
        actions: Any,
        env_ids: Array | None = None,
        *,
        autoreset: bool,
        timeout: float | None = _CONFIGURED,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Steps envs; the results stay in `rows` until the next call.

        ``env_ids`` are ascending; ``None`` means all. ``meanwhile`` is called if the rows
        hold the steps some time before the resets after them: a good moment to read them.

        Without ``autoreset``, resets are prepared where they have been seen to follow
        the ends of episodes; `reset_rows` then answers from memory.

        Raises: as `step`.
        """
        driver, deadline = self._driver, self._deadline(timeout)
        driver.check_usable("step", deadline)
        op = driver.choose_op(autoreset=autoreset)
        if failures := driver.step(actions, env_ids, op, deadline, meanwhile):
            raise driver.failure(env_ids, failures, after_reset=False)

    def reset(
        self,
        *,
        env_ids: Sequence[int] | None = None,
        seed: int | Sequence[int | None] | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float | None = _CONFIGURED,
    ) -> Batch:
        """Resets envs and waits for all of them.

        Args:
            env_ids: which; ``None`` for all.
            seed: as in Gymnasium's vector envs: one per env named, or a number to which
                the position is added, or ``None``.
            options: handed to every env's reset.
            timeout: seconds; ``None`` waits without limit.

        Returns:
            The first observations, in ascending order of env id.

        Raises: as `recv`; `PendingCallError` if one of the envs is in flight.
        """
        ids = None if env_ids is None else self._driver.slots.check_ids(env_ids)
        count = self.num_envs if ids is None else len(ids)
        seeds: list[int | None] | None = None
        if seed is not None:
            seeds = spread_seed(seed, count)
            if env_ids is not None:
                seeds = [seeds[k] for k in np.argsort(np.asarray(list(env_ids)))]
        kwargs = None if options is None else [{"options": dict(options)}] * count
        self.reset_rows(ids, seeds=seeds, kwargs=kwargs, timeout=timeout)
        return self._driver.gather.batch(ids, after_reset=True)

    def reset_rows(
        self,
        env_ids: Array | None,
        *,
        seeds: Sequence[int | None] | None = None,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        timeout: float | None = _CONFIGURED,
    ) -> None:
        """Resets envs; the results stay in `rows` until the next call.

        Args:
            env_ids: ascending ids, or ``None`` for all.
            seeds: one per env, or ``None``.
            kwargs: keyword arguments of each env's reset, or ``None``.
            timeout: seconds.

        Raises: as `reset`.
        """
        driver, deadline = self._driver, self._deadline(timeout)
        driver.check_usable("reset", deadline)
        if failures := driver.reset(env_ids, seeds, kwargs, deadline):
            raise driver.failure(env_ids, failures, after_reset=True)

    # --- calls ---------------------------------------------------------------------

    def seed(
        self,
        seed: int,
        *,
        static: bool = False,
        env_ids: Sequence[int] | None = None,
        timeout: float | None = _CONFIGURED,
    ) -> tuple[list[int], int]:
        """Seeds all envs in one round trip, by TorchRL's chain.

        An env whose ``seed`` returns another seed for the env after it than the chain has
        is believed: those after it are seeded once more.

        Args:
            seed: of the first env.
            static: give all the same seed.
            env_ids: which, in the order of the chain; ``None`` for all.
            timeout: seconds.

        Returns:
            The seed of each env, and the one that follows the last.

        Raises:
            UsageError: the seed is no integer >= 0.
            EnvError: envs raised.
        """
        driver, deadline = self._driver, self._deadline(timeout)
        driver.check_usable("seed", deadline)
        checked = None if env_ids is None else driver.slots.check_ids(env_ids)
        driver.slots.check_idle(checked, "seed")
        order = list(range(self.num_envs)) if env_ids is None else [int(i) for i in env_ids]
        seeds, following = seed_chain(seed, len(order), static=static)
        driver.forget_prepared(checked)
        done = 0
        while done < len(order):
            given = dict(zip(order[done:], seeds[done:], strict=True))

            def command(call_id: int, ids: tuple[int, ...], given: Any = given) -> SeedEnvs:
                return SeedEnvs(call_id, ids, tuple(given[i] for i in ids))

            answers = self._call(np.sort(order[done:]), command, deadline)
            expected = [*seeds[1:], following]
            for k in range(done, len(order)):
                done = k + 1
                if not static and answers[order[k]] not in (None, expected[k]):
                    seeds[done:], following = seed_chain(answers[order[k]], len(order) - done)
                    break
        return seeds, following

    def call(
        self,
        name: str,
        *args: Any,
        env_ids: Sequence[int] | None = None,
        timeout: float | None = _CONFIGURED,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls a method of each env, or reads an attribute that is not callable.

        Args:
            name: the attribute, dots allowed. One that begins with ``?`` is a question to
                the adapter, which changes nothing.
            *args: positional arguments of the method.
            env_ids: which envs; ``None`` for all.
            timeout: seconds.
            **kwargs: keyword arguments of the method.

        Returns:
            One value per env, in ascending order of env id.

        Raises:
            EnvError: envs raised; nothing else has changed.
        """
        self._driver.check_usable("call", self._deadline(timeout))
        ids = None if env_ids is None else self._driver.slots.check_ids(env_ids)
        self._driver.slots.check_idle(ids, "call")
        if not name.startswith("?"):
            # The method may change what the next reset returns.
            self._driver.spoil_prepared(ids)
        values = self._call(
            ids,
            lambda call_id, mine: CallEnvs(call_id, mine, name, args, kwargs),
            self._deadline(timeout),
        )
        return [values[env_id] for env_id in sorted(values)]

    def _call(
        self,
        ids: Array | None,
        command: Callable[[int, tuple[int, ...]], CallEnvs | SeedEnvs],
        deadline: Deadline,
    ) -> dict[int, Any]:
        by_worker: dict[int, list[int]] = {}
        for env_id in range(self.num_envs) if ids is None else ids.tolist():
            by_worker.setdefault(self._backend.worker_of(env_id), []).append(env_id)
        call_id, self._next_call_id = self._next_call_id, self._next_call_id + 1
        commands = ((worker, command(call_id, tuple(mine))) for worker, mine in by_worker.items())
        try:
            answers = self._backend.call(commands, deadline)
        except BrokenError:
            self._driver.state = EngineState.BROKEN
            raise
        except Exception:
            raise  # nothing was sent, or the answers that come later are dropped
        except BaseException:
            self._driver.note_interrupt()
            raise
        failures = [failure for answer in answers for failure in answer.failures]
        if failures:
            raise EnvError.of_many([env_error(failure) for failure in failures])
        return {env_id: value for answer in answers for env_id, value in answer.values.items()}

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self.config.timeout if timeout is _CONFIGURED else timeout)


def _reordered(actions: Any, order: Array, key: str) -> Any:
    if isinstance(actions, Mapping):
        return {path: _reordered(values, order, key) for path, values in actions.items()}
    try:
        num_rows = len(actions)
    except TypeError:
        return actions  # no rows to bring into order; refused later
    if num_rows != len(order):
        raise SpecError(
            key=key, expected=f"{len(order)} rows, one per env", actual=f"{num_rows} rows"
        )
    if isinstance(actions, np.ndarray):
        return actions[order]
    return [actions[k] for k in order]
