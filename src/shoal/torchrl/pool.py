"""`AsyncEnvPool`: envs that are sent and received each on its own.

Knows EnvBase, TensorDicts, the batched envs and the engine's verbs. Does not know
backends.

A pool is a batched env whose engine may be used by many at once. Its synchronous verbs
are those of the batched envs; the others hand rows over and take ready ones back.
"""

from __future__ import annotations

import contextlib
import threading
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, NonTensor
from torchrl.envs.async_envs import AsyncEnvPool as _TorchRLPool
from torchrl.envs.async_envs import ProcessorAsyncEnvPool as _TorchRLProcessorPool
from torchrl.envs.async_envs import ThreadingAsyncEnvPool as _TorchRLThreadingPool

from shoal.adapters.gymnasium import GymnasiumDescription
from shoal.engine.concurrent import ConcurrentEngine
from shoal.torchrl.base import BatchedMeta
from shoal.torchrl.batched import BatchedEnv
from shoal.torchrl.children import children_in
from shoal.torchrl.pool_children import (
    AsyncChildren,
    GivenEnv,
    async_factories,
    makers_of,
    masks_of,
    num_processes_for,
    share_spaces,
    wrapping_factories,
)
from shoal.torchrl.pool_index import ENV_INDEX, EnvIndices
from shoal.torchrl.pool_requests import Requests
from shoal.torchrl.pool_rows import SentRows, as_rows
from shoal.torchrl.pool_stats import PoolStats
from shoal.torchrl.pool_verbs import PoolVerbs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrl.envs import EnvBase

__all__ = [
    "AsyncEnvPool",
    "AsyncioAsyncEnvPool",
    "ProcessorAsyncEnvPool",
    "SerialAsyncEnvPool",
    "ThreadingAsyncEnvPool",
]

Array = np.ndarray[Any, Any]
Pair = tuple[TensorDictBase, TensorDictBase]
_STACKS = ("dense", "maybe_dense", "lazy")


class PoolMeta(BatchedMeta):
    """Lets ``AsyncEnvPool(..., backend=...)`` be the pool of that backend."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cls, "backend_name"):
            return super().__call__(*args, **kwargs)
        name = kwargs.get("backend") or "threading"
        if name not in _POOLS:
            raise NotImplementedError(
                f"backend is one of {', '.join(sorted(_POOLS))}; not {name!r}"
            )
        pool = _POOLS[name]
        if cls is not AsyncEnvPool:
            # A subclass that leaves the backend open gets the members of that one's pool.
            return type(cls.__name__, (cls, pool), {"__module__": cls.__module__})(*args, **kwargs)
        return pool(*args, **kwargs)


class AsyncEnvPool(PoolVerbs, BatchedEnv, metaclass=PoolMeta):
    """Envs that are sent and received each on its own, or all together as one batch.

    ``AsyncEnvPool(makers, backend=...)`` returns a `ThreadingAsyncEnvPool`, a
    `ProcessorAsyncEnvPool`, an `AsyncioAsyncEnvPool` or a `SerialAsyncEnvPool`.

    A TensorDict that is sent says in ``env_index`` which env each of its rows is for;
    results say it, too, and are sorted by it. An env takes one call at a time. Whatever is
    returned is the caller's and never changes.

    Several threads and event loops may use a pool at once. The synchronous verbs of
    `BatchedEnv` keep the others waiting.

    Attributes:
        env_makers: one maker per env.
        num_envs: how many envs there are.
        backend: ``"threading"``, ``"multiprocessing"``, ``"asyncio"`` or ``"serial"``.
        stack: ``"dense"``, ``"maybe_dense"`` or ``"lazy"``: what results are.
        min_get: how many results a receive waits for if it is not told.
        envs_per_worker: envs in each worker process; several run on threads of it.

    Example:
        >>> pool = AsyncEnvPool(["CartPole-v1"] * 4)
        >>> root = pool.reset()
        >>> pool.async_step_and_maybe_reset_send(pool.rand_action(root))
        >>> stepped, root = pool.async_step_and_maybe_reset_recv(min_get=2)
        >>> pool.close()
    """

    _engine_class = ConcurrentEngine
    _defers_values = False
    _env_idx_key = ENV_INDEX

    def __init__(
        self,
        env_makers: str | Callable[..., Any] | EnvBase | Sequence[Any],
        *,
        backend: str | None = None,
        stack: str = "dense",
        exchange: str | None = None,
        worker_affinity: Sequence[Sequence[int]] | Callable[[int], Sequence[int]] | None = None,
        envs_per_worker: int = 1,
        env_threads: bool = True,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        lazy_start: bool = False,
        **options: Any,
    ) -> None:
        """Builds the envs.

        Args:
            env_makers: one per env: a Gymnasium id, a callable that returns a
                ``gymnasium.Env`` or an ``EnvBase``, or an env (which cannot be started again
                after `close`). Anything but a list or tuple stands for one env.
            backend: where the envs run. ``"threading"``: each is built, stepped and closed on
                a thread of its own. ``"multiprocessing"``: in worker processes.
                ``"asyncio"``: on one event loop, for envs whose ``reset`` and ``step`` are
                ``async def``. ``"serial"``: in the thread that sends.
            stack: what batches are: ``"dense"`` TensorDicts, ``"lazy"`` stacks of one
                TensorDict per env, or ``"maybe_dense"``: dense where the envs are alike.
            exchange: accepted as in TorchRL; entries of fixed shape always travel through
                shared memory, and others by messages.
            worker_affinity: the cores of each worker process, or a function from the number of
                a worker to its cores. Linux only.
            envs_per_worker: envs of each worker process.
            env_threads: several envs of a worker run each on a thread of it, so that their
                waits overlap. False steps them in turn, which is quicker for envs that take
                microseconds and do not wait.
            create_env_kwargs: keyword arguments for the makers, one mapping or one per env.
            lazy_start: start with the first call; the specs are then read from an env that is
                built for it.
            **options: the fields of `BatchOptions`, such as ``timeout``.

        Raises:
            NotImplementedError: an unknown ``stack`` or ``backend``.
            ValueError: ``lazy_start`` with envs instead of makers; ``create_env_kwargs`` or
                ``worker_affinity`` of the wrong length, or a wrong number.
            RuntimeError: ``stack="dense"``, and the envs cannot be stacked.
            TypeError: something that makes no env of this backend.
        """
        if stack not in _STACKS:
            raise NotImplementedError(f"stack is one of {', '.join(_STACKS)}; not {stack!r}")
        if exchange not in (None, "queue", "shm", "auto"):
            raise ValueError(f"exchange is 'queue', 'shm' or 'auto', not {exchange!r}")
        if backend not in (None, self.backend_name):
            raise ValueError(f"{type(self).__name__} has backend {self.backend_name!r} only")
        if self.backend_name != "multiprocessing" and (
            envs_per_worker != 1 or worker_affinity is not None
        ):
            raise ValueError(
                "envs_per_worker and worker_affinity are for backend='multiprocessing'"
            )
        makers = makers_of(env_makers)
        if not makers:
            raise ValueError("a pool needs at least one env")
        if lazy_start and any(isinstance(maker, GivenEnv) for maker in makers):
            raise ValueError(
                "lazy_start=True builds an env to read its specs and builds others later: give"
                " functions that make envs, or leave it out"
            )
        if isinstance(create_env_kwargs, list | tuple) and len(create_env_kwargs) != len(makers):
            raise ValueError(
                f"create_env_kwargs has {len(create_env_kwargs)} entries for {len(makers)} envs;"
                " give one per env, or one for all"
            )
        num_processes = num_processes_for(len(makers), envs_per_worker)
        self._affinity = masks_of(worker_affinity, num_processes)
        self.worker_affinity = worker_affinity
        self._start_lock = threading.RLock()
        self.exchange = exchange or "auto"
        self._lazy_start = lazy_start
        self._env_threads = env_threads
        self.min_get = 1
        self.num_envs = len(makers)
        self.backend = self.backend_name
        self.stack = stack
        self.envs_per_worker = envs_per_worker
        options.setdefault("num_processes", num_processes)
        super().__init__(
            len(makers),
            makers,
            create_env_kwargs=create_env_kwargs,
            metadata_from_workers=not lazy_start,
            **options,
        )
        self.env_makers = makers

    backend_name: ClassVar[str]

    # --- what it is made of ----------------------------------------------------------

    def _find_children(self) -> Any:
        if self.backend_name == "asyncio":
            children: Any = self._find_async_children()
        elif self._lazy_start:
            children = super()._find_children()
        else:
            children = self._find_running_children()
        if self.stack == "dense" and not children.are_stackable:
            raise RuntimeError(
                "the entries of the envs differ in keys or shapes, and stack='dense' was asked for;"
                " use stack='maybe_dense' or 'lazy'"
            )
        return children

    def _find_running_children(self) -> Any:
        makers, kwargs, options = self.create_env_fn, self.create_env_kwargs, self._options
        answers = self._ask_workers()
        described = [answer for answer in answers if isinstance(answer, GymnasiumDescription)]
        if described and (len(described) < len(answers) or not share_spaces(described)):
            # Envs of Gymnasium that differ need TorchRL's wrapper, which they do not have.
            self.close()
            answers = self._ask(wrapping_factories(makers, kwargs))
        return children_in(answers, options, single_task=self._single_task)

    def _find_async_children(self) -> Any:
        answers = self._ask(async_factories(self.create_env_fn, self.create_env_kwargs))
        if not share_spaces(answers):
            raise RuntimeError(
                "the envs of backend='asyncio' differ in their spaces; make one pool per kind"
            )
        if self._lazy_start:
            self.close()
        return AsyncChildren(answers[0], self._options)

    def _ask(self, factories: list[Any]) -> list[Any]:
        answers: list[Any] = self._open(factories, {"mixed_specs": True}).call("?describe")
        return answers

    def _more_options(self) -> dict[str, Any]:
        if self._backend != "processes":
            return {}
        return {
            "caller_steps": False,
            "env_threads": self._env_threads and self.envs_per_worker > 1,
            "worker_affinity": self._affinity,
        }

    def _open(self, factories: list[Any], more: dict[str, Any]) -> Any:
        engine: Any = super()._open(factories, more)
        stats = PoolStats(self.num_envs, engine.rows.ready_at)
        engine.on_rows = stats.note_rows
        self.__dict__.update(
            _requests=Requests(self.num_envs),
            _sent=SentRows(self.num_envs),
            _stats=stats,
            _indices=None,
        )
        return engine

    def _set_specs(self) -> None:
        super()._set_specs()
        state: Composite = self.full_state_spec  # type: ignore[has-type]
        state[ENV_INDEX] = NonTensor(example_data=0, shape=self.batch_size)
        self.full_state_spec = state

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for name in ("_requests", "_sent", "_stats", "_indices", "_start_lock"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__["_start_lock"] = threading.RLock()

    # --- its life, with several threads around -----------------------------------------

    def _running(self) -> Any:
        engine = self.__dict__["_engine"]
        if engine is not None:
            return engine
        with self._start_lock:  # two threads shall not start it twice
            return super()._running()

    def _started(self) -> Any:
        rows = self.__dict__["_rows"]
        if rows is not None and self.__dict__["_owner"] is None:
            return rows
        with self._start_lock:
            return super()._started()

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends all envs, also while others wait for them: these get a `ClosedError`.

        Results that nobody has received are lost. The next reset starts new envs.

        Raises:
            RuntimeError: it is closed already, and ``raise_if_closed`` is true.
        """
        engine = self.__dict__["_engine"]
        if engine is None:
            super().close(raise_if_closed=raise_if_closed)
            return
        with engine.exclusive():  # who is in the middle of a verb shall not start others
            super().close(raise_if_closed=raise_if_closed)

    @contextlib.contextmanager
    def _alone(self, verb: str) -> Iterator[None]:
        engine = self._engine_now()
        with engine.exclusive():
            engine.check_open(verb)
            yield

    @property
    def env_batch_sizes(self) -> list[torch.Size]:
        """The batch size of each env."""
        return [torch.Size(self.batch_size[1:])] * self.num_envs

    @property
    def resolved_exchange(self) -> str:
        """How results travel: ``"shm"``, through shared memory, or ``"queue"``, by messages."""
        apart = self._backend == "processes"
        return "shm" if apart and not self._children.is_dynamic else "queue"

    @property
    def exchange_keys(self) -> tuple[Any, ...]:
        """The keys of what a step takes, if it travels through shared memory; else empty."""
        if self.resolved_exchange == "queue":
            return ()
        specs = (self.full_action_spec, self.full_state_spec)
        keys = chain(*(spec.keys(True, True) for spec in specs))
        return tuple(key for key in keys if key != ENV_INDEX)

    # --- synchronous verbs -----------------------------------------------------------

    def _engine_now(self) -> ConcurrentEngine:
        self._started()
        engine: ConcurrentEngine = self._running()
        return engine

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        with self._alone("step"):
            return super()._step(tensordict)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        with self._alone("reset"):
            root = super()._reset(_without_index(tensordict), **kwargs)
            return self._with_index(root, self._every)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Steps all envs and waits for all; arguments and results as in ``EnvBase.step``.

        Raises: `PendingCallError` if some are in flight.
        """
        with self._alone("step"):
            return self._with_index(super().step(tensordict), self._every)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> Pair:
        """Steps all envs and resets those whose episode ended.

        Raises: `PendingCallError` if some are in flight.
        """
        with self._alone("step_and_maybe_reset"):
            index = tensordict.pop(ENV_INDEX, None)
            try:
                stepped, root = super().step_and_maybe_reset(tensordict)
            except BaseException:
                if index is not None:
                    tensordict.set(ENV_INDEX, index)
                raise
            every = self._every
            return (
                self._with_index(self._as_asked(stepped), every),
                self._with_index(self._as_asked(root), every),
            )

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Resets all envs, or those in the ``_reset`` mask, and no others.

        Raises: `PendingCallError` if some are in flight.
        """
        with self._alone("reset"):
            root = super().reset(_without_index(tensordict), **kwargs)
            return self._with_index(self._as_asked(root), self._every)

    @property
    def _every(self) -> Array:
        return np.arange(self.num_workers)

    def _with_index(self, made: TensorDictBase, env_ids: Array) -> TensorDictBase:
        indices = self._indices_now()
        if isinstance(made, TensorDict):
            made._set_str(
                ENV_INDEX, indices.of(env_ids), validated=True, inplace=False, non_blocking=False
            )
            return made
        for row, env_id in zip(as_rows(made), env_ids.tolist(), strict=True):
            row.set(ENV_INDEX, indices.one(env_id))
        return made

    def _indices_now(self) -> EnvIndices:
        indices = self.__dict__.get("_indices")
        if indices is None:
            indices = self.__dict__["_indices"] = EnvIndices(self.env_batch_sizes)
        return indices

    def shutdown(self) -> None:
        """Ends all envs; does nothing if they do not run. As `close`."""
        self.close(raise_if_closed=False)

    def _maybe_shutdown(self) -> None:
        self.shutdown()


class ThreadingAsyncEnvPool(AsyncEnvPool):
    """Each env on a thread of its own: built, stepped, reset and closed there.

    For envs that wait, or that release the interpreter's lock; and for those that are bound
    to a thread.
    """

    _backend = "threads"
    backend_name = "threading"


class ProcessorAsyncEnvPool(AsyncEnvPool):
    """Envs in worker processes, for those that compute."""

    _backend = "processes"
    _defers_values = True
    backend_name = "multiprocessing"


class AsyncioAsyncEnvPool(AsyncEnvPool):
    """Envs whose ``reset`` and ``step`` are ``async def``, hundreds on one event loop.

    The loop runs in a thread of the pool's own. One env that blocks it holds up all others.
    """

    _backend = "coroutines"
    backend_name = "asyncio"


class SerialAsyncEnvPool(AsyncEnvPool):
    """Envs in the thread that sends; the reference of the others."""

    _backend = "serial"
    backend_name = "serial"


def _without_index(tensordict: TensorDictBase | None) -> TensorDictBase | None:
    if tensordict is None or ENV_INDEX not in tensordict.keys():  # noqa: SIM118
        return tensordict
    return tensordict.exclude(ENV_INDEX)


_POOLS: dict[str, Any] = {
    pool.backend_name: pool
    for pool in (
        ThreadingAsyncEnvPool,
        ProcessorAsyncEnvPool,
        AsyncioAsyncEnvPool,
        SerialAsyncEnvPool,
    )
}
_TorchRLPool.register(AsyncEnvPool)
_TorchRLThreadingPool.register(ThreadingAsyncEnvPool)
_TorchRLProcessorPool.register(ProcessorAsyncEnvPool)
