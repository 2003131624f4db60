"""The narrow contract between the engine and one environment.

Knows `spec`. Does not know any env library, batches or processes. Adapters turn a
library's env into an object with these members; the engine uses nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from shoal.engine.spec import EnvSpec, LeafPath

__all__ = [
    "AsyncEnv",
    "AsyncEnvFactory",
    "Env",
    "EnvFactory",
    "NativePool",
    "NativePoolFactory",
    "PoolResults",
    "find_plain_methods",
]

Array = np.ndarray[Any, Any]


class Env(Protocol):
    """One environment, as the engine sees it.

    Attributes:
        spec: the leaves of its observations, actions and infos.
        reset: ``reset(seed=None, options=None) -> (observation, info)``.
        step: ``step(action) -> (observation, reward, terminated, truncated, info)``.
            Both may be bound methods of the library's own env: the engine calls them
            without anything in between.
        flatten_observation: turns an observation into its leaf values, in the order
            of ``spec.observation``; raises `SpecError` for a missing or an extra key.
            ``None`` where the observation is itself the only leaf (path ``()``).
        build_action: turns leaf values, in the order of ``spec.action``, into an
            action. ``None`` where the action is itself the only leaf.
    """

    spec: EnvSpec
    reset: Callable[..., tuple[Any, dict[str, Any]]]
    step: Callable[[Any], tuple[Any, Any, Any, Any, dict[str, Any]]]
    flatten_observation: Callable[[Any], Sequence[Any]] | None
    build_action: Callable[[Sequence[Any]], Any] | None

    def seed(self, seed: int | None) -> None:
        """Seeds the env; the next reset without a seed goes on from there."""

    def save_rng(self) -> object:
        """Returns the state of the env's random generator, or ``None`` if unknown."""

    def load_rng(self, state: object) -> None:
        """Puts back what `save_rng` returned."""

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the library's env, or returns a plain attribute."""

    def close(self) -> None:
        """Frees what the env holds."""


EnvFactory = Callable[[], Env]
"""Builds one env, in the worker that will hold it.

It may have some attributes: ``preload``, names of modules to import before workers are
forked, and ``is_cheap``, true if a step is known to take microseconds. One with a true
``shares_memory`` may hold shared tensors or values of ``multiprocessing``, which stay
shared in the workers.
"""


class AsyncEnv(Protocol):
    """One environment that waits rather than computes, for the backend ``"coroutines"``.

    As `Env`, except that ``reset`` and ``step`` are coroutine functions, and that what
    ``seed``, ``call`` and ``close`` return is awaited where it can be. All of it runs in
    one asyncio task per env, from the factory to ``close``, so context variables, cancel
    scopes and task groups may stay open between the calls.

    Every env shares one event loop with all others: one that blocks it, as with
    ``time.sleep``, delays them all. ``asyncio.to_thread`` is the way to call what blocks.
    """

    spec: EnvSpec
    reset: Callable[..., Awaitable[tuple[Any, dict[str, Any]]]]
    step: Callable[[Any], Awaitable[tuple[Any, Any, Any, Any, dict[str, Any]]]]
    flatten_observation: Callable[[Any], Sequence[Any]] | None
    build_action: Callable[[Sequence[Any]], Any] | None

    def seed(self, seed: int | None) -> Awaitable[None] | None:
        """Seeds the env; the next reset without a seed goes on from there."""

    def save_rng(self) -> object:
        """Returns the state of the env's random generator, or ``None`` if unknown."""

    def load_rng(self, state: object) -> None:
        """Puts back what `save_rng` returned."""

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the library's env, or returns a plain attribute."""

    def close(self) -> Awaitable[None] | None:
        """Frees what the env holds."""


AsyncEnvFactory = Callable[[], AsyncEnv | Awaitable[AsyncEnv]]
"""Builds one env on the running event loop; may itself be a coroutine function."""


class PoolResults(NamedTuple):
    """What a `NativePool` returned for some envs, in its own order.

    Attributes:
        env_ids: the envs.
        observation: one array per leaf, in the order of ``spec.observation``.
        reward: one per env.
        terminated: one per env.
        truncated: one per env.
        info: one array per leaf, in the order of ``spec.info``.
    """

    env_ids: Array
    observation: Sequence[Array]
    reward: Array
    terminated: Array
    truncated: Array
    info: Sequence[Array] = ()


class NativePool(Protocol):
    """Many envs in one object with threads of its own, for the backend ``"envpool"``.

    An env that was sent to, or reset, is busy until a `recv` has returned its results. The
    three of them are builtins, or as good as: an interrupt comes before or after one of
    them, never within.

    Attributes:
        spec: the leaves of one env.
        num_envs: how many envs there are.
        batch_size: how many results a `recv` waits for; fewer than that cannot be had.
        num_threads: how many threads step its envs; 0 if nobody knows.
        waits_for_all: a `recv` waits for all that are busy instead, however many. Only one
            `send` or `reset` may be under way then.
        send: starts steps; takes what `pack` returned.
        reset: starts resets; takes ids as int32.
        recv: waits for results; `unpack` reads them.
    """

    spec: EnvSpec
    num_envs: int
    batch_size: int
    num_threads: int
    waits_for_all: bool
    send: Callable[[Any], None]
    reset: Callable[[Array], None]
    recv: Callable[[], Any]

    def pack(self, actions: Mapping[LeafPath, Array], env_ids: Array | None) -> Any:
        """Returns what `send` takes for these envs (``None``: all), ids as int32.

        Args:
            actions: the rows of all envs, per leaf. Copied.
            env_ids: the envs.
        """

    def unfit(self, actions: Mapping[LeafPath, Array], env_ids: Array | None) -> Array | None:
        """Returns the ids among these envs whose actions the pool does not survive."""

    def unpack(self, received: Any) -> PoolResults:
        """Returns what a `recv` returned in the engine's form."""

    def seed(self, seeds: Sequence[int]) -> None:
        """Seeds all envs; none may be busy. Each has to be reset after that."""

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the pool, or returns an attribute, for all envs at once."""

    def close(self) -> None:
        """Frees what the pool holds. None may be busy."""


NativePoolFactory = Callable[[], NativePool]
"""Builds a pool. It has an attribute ``num_envs``, and stands for each of its envs."""


def find_plain_methods(env: object) -> list[str]:
    """Returns which of ``reset`` and ``step`` are no coroutine functions."""
    return [name for name in ("reset", "step") if not _is_coroutine_function(env, name)]


def _is_coroutine_function(env: object, name: str) -> bool:
    found = getattr(env, name, None)
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004 - an object with an `async def __call__`
    )
