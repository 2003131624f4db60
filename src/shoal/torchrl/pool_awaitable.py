"""The awaitable verbs of a pool: they wait, and let the event loop run meanwhile.

Knows TensorDicts, requests and the engine's way to wait. Does not know EnvBase or what
the envs are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.core.deadline import Deadline
from shoal.errors import NoPendingCallError
from shoal.torchrl.pool_index import is_one
from shoal.torchrl.pool_requests import RESET, STEP, STEP_AND_RESET, VERBS, wanted_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tensordict import TensorDictBase

    from shoal.engine.concurrent import ConcurrentEngine
    from shoal.torchrl.options import BatchOptions
    from shoal.torchrl.pool_requests import Requests

__all__ = ["PoolAwaitables"]

Array = np.ndarray[Any, Any]
Index = int | list[int] | None
Pair = tuple["TensorDictBase", "TensorDictBase"]


class PoolAwaitables:
    """Coroutines over the verbs of `PoolVerbs`; see `AsyncEnvPool`."""

    min_get: int
    _options: BatchOptions
    _requests: Requests
    _send: Callable[..., tuple[Array, bool]]
    _engine_of: Callable[..., ConcurrentEngine]
    _pick_these: Callable[..., tuple[Callable[[], Any], Callable[[], bool]]]
    _pick_ready: Callable[..., tuple[Callable[[], Any], Callable[[], bool]]]
    _timed_out: Callable[..., Exception]

    async def astep(
        self, tensordict: TensorDictBase, env_index: Index = None, *, timeout: float | None = None
    ) -> TensorDictBase:
        """Steps some envs and waits for all of them, while the event loop runs.

        If it is cancelled or runs out of time, the envs stay in flight: `astep_recv` with
        their numbers goes on waiting.

        Args:
            tensordict: as for `async_step_send`.
            env_index: as for `async_step_send`.
            timeout: seconds; ``None`` for the pool's own.

        Returns: as `async_step_recv` for these envs.

        Raises: as `async_step_send` and `async_step_recv`.
        """
        found: TensorDictBase = await self._acall(STEP, tensordict, env_index, timeout)
        return found

    async def astep_and_maybe_reset(
        self, tensordict: TensorDictBase, env_index: Index = None, *, timeout: float | None = None
    ) -> Pair:
        """Steps some envs, resets them where an episode ends, and waits; see `astep`."""
        found: Pair = await self._acall(STEP_AND_RESET, tensordict, env_index, timeout)
        return found

    async def areset(
        self,
        tensordict: TensorDictBase | None = None,
        env_index: Index = None,
        *,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Resets some envs and waits for them; see `astep` and `async_reset_send`."""
        found: TensorDictBase = await self._acall(RESET, tensordict, env_index, timeout, kwargs)
        return found

    async def astep_recv(
        self,
        min_get: int | None = None,
        env_index: Index = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Does what `async_step_recv` does, while the event loop runs."""
        found: TensorDictBase = await self._arecv(STEP, min_get, env_index, max_get, timeout)
        return found

    async def astep_and_maybe_reset_recv(
        self,
        min_get: int | None = None,
        env_index: Index = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> Pair:
        """Does what `async_step_and_maybe_reset_recv` does, while the event loop runs."""
        found: Pair = await self._arecv(STEP_AND_RESET, min_get, env_index, max_get, timeout)
        return found

    async def areset_recv(
        self,
        min_get: int | None = None,
        env_index: Index = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> TensorDictBase:
        """Does what `async_reset_recv` does, while the event loop runs."""
        found: TensorDictBase = await self._arecv(RESET, min_get, env_index, max_get, timeout)
        return found

    async def arecv(
        self,
        min_get: int | None = None,
        *,
        max_get: int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Pair]:
        """Yields results of `async_step_and_maybe_reset_send` as they come.

        Ends when nothing is in flight any more: the loop sends the next steps.

        Args:
            min_get: as for `async_step_recv`; fewer if fewer are in flight.
            max_get: as for `async_step_recv`.
            timeout: as for `async_step_recv`, for each result.
        """
        wanted = wanted_count(min_get, max_get, timeout, self.min_get)
        self._engine_of("receive for step_and_maybe_reset")
        requests = self._requests
        while (left := requests.count(STEP_AND_RESET)) > 0:
            try:
                found = await self._arecv(STEP_AND_RESET, min(wanted, left), None, max_get, timeout)
            except NoPendingCallError:
                continue  # another one has taken some
            yield found

    async def _acall(
        self,
        kind: int,
        tensordict: TensorDictBase | None,
        env_index: Index,
        timeout: float | None,
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        ids, is_single = self._send(kind, tensordict, env_index, kwargs=kwargs, is_private=True)
        named: Any = int(ids[0]) if is_single else ids
        return await self._arecv(kind, None, named, None, timeout)

    async def _arecv(
        self, kind: int, min_get: Any, env_index: Any, max_get: Any, timeout: float | None
    ) -> Any:
        wanted = wanted_count(min_get, max_get, timeout, self.min_get)
        engine = self._engine_of(f"receive for {VERBS[kind]}")
        limit = self._options.timeout if timeout is None else timeout
        if env_index is not None:
            pick, is_ready = self._pick_these(engine, kind, env_index)
        else:
            pick, is_ready = self._pick_ready(
                engine, kind, wanted, max_get, timeout, Deadline.after(limit)
            )
        only = int(env_index) if is_one(env_index) else None
        found = await engine.wait_async(pick, is_ready, limit, env_id=only)
        if found is None:
            raise self._timed_out(kind, env_index, Deadline.after(limit).timeout_s)
        return found
