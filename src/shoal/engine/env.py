"""The narrow contract between the engine and one environment.

Knows `spec`. Does not know any env library, batches or processes. Adapters turn a
library's env into an object with these members; the engine uses nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shoal.engine.spec import EnvSpec

__all__ = ["AsyncEnv", "AsyncEnvFactory", "Env", "EnvFactory", "find_plain_methods"]


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


def find_plain_methods(env: object) -> list[str]:
    """Returns which of ``reset`` and ``step`` are no coroutine functions."""
    return [name for name in ("reset", "step") if not _is_coroutine_function(env, name)]


def _is_coroutine_function(env: object, name: str) -> bool:
    found = getattr(env, name, None)
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004 - an object with an `async def __call__`
    )
