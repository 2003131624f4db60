"""Envs that are sent and received each on its own: which envs, who runs them, and how.

The ``env_id`` of these contenders is a key of `ENVS`. Knows the pools of shoal and of
TorchRL; no item and no bar.

Envs that wait are told apart from envs that compute: what they could supply is what one
of them does alone, times their number, however few cores there are.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from benchmarks.contenders import RawEverywhere
from shoal._compare.contenders import Contender

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "COROUTINE",
    "ENVS",
    "SLEEPER",
    "STILL",
    "UNEVEN",
    "BareCoroutine",
    "BareCoroutines",
    "BareThreads",
    "BareWaiting",
    "BareWaitingEverywhere",
    "FirstHalf",
    "ShoalPool",
    "Synchronous",
    "SynchronousParallel",
    "TorchRLPool",
]

SLEEPER_STEP_S = 1e-3
SLEEPER_RESET_S = 0.2
SLEEPER_EPISODE = 200
COROUTINE_STEP_S = 50e-3
UNEVEN_STEP_S = (1e-3, 50e-3)


# --- envs ------------------------------------------------------------------------------


class StillEnv(gymnasium.Env[Any, Any]):
    """Returns the same observation at once: what a step costs is what its pool costs."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self._observation = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observation, 0.0, False, False, {}


class SleeperEnv(StillEnv):
    """Sleeps 1 ms in a step and 200 ms in a reset, which comes every 200 steps."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        # As unlike in phase as envs that have run for some time are.
        self._num_steps = 37 * index % SLEEPER_EPISODE
        self._was_reset = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if self._was_reset:
            time.sleep(SLEEPER_RESET_S)
        self._was_reset = True
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(SLEEPER_STEP_S)
        self._num_steps += 1
        is_over = self._num_steps % SLEEPER_EPISODE == 0
        return self._observation, 0.0, False, is_over, {}


class UnevenEnv(StillEnv):
    """Sleeps between 1 ms and 50 ms in a step; all orders of magnitude are as likely."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._lengths = np.random.default_rng(index)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        low, high = map(math.log, UNEVEN_STEP_S)
        time.sleep(math.exp(self._lengths.uniform(low, high)))
        return self._observation, 0.0, False, False, {}


class CoroutineEnv:
    """Awaits 50 ms in a step: an env for an event loop."""

    observation_space = StillEnv.observation_space
    action_space = StillEnv.action_space

    def __init__(self, index: int = 0) -> None:
        self._observation = np.zeros(4, np.float32)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        return self._observation, {}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(COROUTINE_STEP_S)
        return self._observation, 0.0, False, False, {}


def make_still() -> Any:
    """Makes a `StillEnv` in TorchRL's wrapper, as TorchRL's pools need it."""
    from torchrl.envs import GymWrapper

    return GymWrapper(StillEnv())


STILL = "no work"
SLEEPER = "1 ms steps"
UNEVEN = "1 to 50 ms"
COROUTINE = "50 ms coroutines"
# Those that differ from env to env take the number of the env.
ENVS: dict[str, Callable[[int], Any]] = {
    SLEEPER: SleeperEnv,
    UNEVEN: UnevenEnv,
    COROUTINE: CoroutineEnv,
}
# Of envs that work in a rhythm, rounds are whole episodes.
_EPISODES = {SLEEPER: SLEEPER_EPISODE}


def makers_of(env_id: str, num_envs: int) -> list[Callable[[], Any]]:
    """Returns one maker per env."""
    if env_id == STILL:
        return [make_still] * num_envs
    return [partial(ENVS[env_id], index) for index in range(num_envs)]


# --- bare envs -------------------------------------------------------------------------


class BareWaiting(Contender):
    """One env in this process, resets included: what an env supplies at best."""

    name = "bare env"

    def __init__(self, env_id: str) -> None:
        super().__init__(env_id, 1)

    def open(self) -> None:
        self._env = ENVS[self.env_id](0)
        self._env.reset()

    def run(self, num_steps: int) -> float:
        num_steps, share = _whole_episodes(self.env_id, num_steps)
        step, reset = self._env.step, self._env.reset
        action = np.zeros(1, np.float32)
        started_at = perf_counter()
        for _ in range(num_steps):
            _, _, _, truncated, _ = step(action)
            if truncated:
                reset()
        return (perf_counter() - started_at) * share

    def close(self) -> None:
        self._env.close()


class BareWaitingEverywhere(RawEverywhere):
    """All envs at the same time, a process each, without anybody who asks them."""

    def __init__(self, env_id: str, num_envs: int) -> None:
        super().__init__(env_id, BareWaiting, num_processes=num_envs)
        self.name = "bare envs, a process each"

    def run(self, num_steps: int) -> float:
        num_steps, share = _whole_episodes(self.env_id, num_steps)
        return super().run(num_steps) * share


class BareCoroutines(Contender):
    """All envs at the same time on one event loop, without anybody who asks them."""

    name = "bare envs, one event loop"

    def open(self) -> None:
        self._envs = [ENVS[self.env_id](index) for index in range(self.num_envs)]

    def run(self, num_steps: int) -> float:
        started_at = perf_counter()
        asyncio.run(self._run_all(num_steps))
        return perf_counter() - started_at

    async def _run_all(self, num_steps: int) -> None:
        await asyncio.gather(*(self._run_one(env, num_steps) for env in self._envs))

    async def _run_one(self, env: Any, num_steps: int) -> None:
        action = np.zeros(1, np.float32)
        await env.reset()
        for _ in range(num_steps):
            await env.step(action)

    def close(self) -> None:
        pass


class BareThreads(Contender):
    """All envs on threads of one process, each asked again through a queue when it is done.

    No batches, no tensors, no checks: what one interpreter's lock leaves of the limit.
    """

    name = "bare envs on threads, queues"

    def open(self) -> None:
        self._results: SimpleQueue[int] = SimpleQueue()
        self._asked: list[SimpleQueue[bool]] = [SimpleQueue() for _ in range(self.num_envs)]
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), daemon=True)
            for index in range(self.num_envs)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, index: int) -> None:
        env = ENVS[self.env_id](index)
        env.reset()
        action = np.zeros(1, np.float32)
        while self._asked[index].get():
            _, _, _, truncated, _ = env.step(action)
            if truncated:
                env.reset()
            self._results.put(index)

    def run(self, num_steps: int) -> float:
        num_steps, share = _whole_episodes(self.env_id, num_steps)
        started_at = perf_counter()
        for asked in self._asked:
            asked.put(True)
        for _ in range((num_steps - 1) * self.num_envs):
            self._asked[self._results.get()].put(True)
        for _ in range(self.num_envs):
            self._results.get()
        return (perf_counter() - started_at) * share

    def close(self) -> None:
        for asked in self._asked:
            asked.put(False)
        for thread in self._threads:
            thread.join()


class BareCoroutine(BareCoroutines):
    """One of them."""

    name = "bare env"

    def __init__(self, env_id: str) -> None:
        super().__init__(env_id, 1)


def _whole_episodes(env_id: str, num_steps: int) -> tuple[int, float]:
    """Returns the next whole number of episodes, in steps, and the share asked for."""
    episode = _EPISODES.get(env_id, 1)
    whole = -(-num_steps // episode) * episode
    return whole, num_steps / whole


# --- pools -----------------------------------------------------------------------------


class Harvest(Contender):
    """A pool in its plainest loop: receive ready rows, write an action, send them.

    The clock starts with all envs idle and stops when ``num_steps * num_envs`` results
    have come; what is in flight then is received without the clock.
    """

    min_get: int | None = None

    def make(self) -> Any:
        """Returns the pool."""
        raise NotImplementedError

    def open(self) -> None:
        import torch

        self._pool = self.make()
        self._actions = [torch.zeros(n, 1) for n in range(self.num_envs + 1)]
        self._pool.async_reset_send(env_index=list(range(self.num_envs)))
        # The rows of all envs, in as many parts as they came in.
        self._roots = [self._pool.async_reset_recv(min_get=self.num_envs)]

    def run(self, num_steps: int) -> float:
        num_steps, share = _whole_episodes(self.env_id, num_steps)
        pool, actions, min_get = self._pool, self._actions, self.min_get
        send = pool.async_step_and_maybe_reset_send
        recv = pool.async_step_and_maybe_reset_recv
        num_left = num_steps * self.num_envs
        started_at = perf_counter()
        for root in self._roots:
            root["action"] = actions[root.shape[0]]
            send(root)
        while True:
            _, root = recv(min_get=min_get)
            num_left -= root.shape[0]
            if num_left <= 0:
                break
            root["action"] = actions[root.shape[0]]
            send(root)
        elapsed_s = perf_counter() - started_at
        self._roots = [root]
        if (num_in_flight := self.num_envs - root.shape[0]) > 0:
            self._roots.append(recv(min_get=num_in_flight)[1])
        return elapsed_s * share

    def close(self) -> None:
        self._pool.close()


class TorchRLPool(Harvest):
    """TorchRL's ``AsyncEnvPool``; a process per env is its default."""

    def __init__(self, env_id: str, num_envs: int, *, label: str, **options: Any) -> None:
        super().__init__(env_id, num_envs)
        self.name = f"TorchRL AsyncEnvPool, {label}"
        self._options = options

    def make(self) -> Any:
        from torchrl.envs import AsyncEnvPool

        return AsyncEnvPool(makers_of(self.env_id, self.num_envs), **self._options)


class ShoalPool(Harvest):
    """``shoal.AsyncEnvPool``."""

    def __init__(
        self, env_id: str, num_envs: int, *, label: str, min_get: int | None = None, **options: Any
    ) -> None:
        super().__init__(env_id, num_envs)
        self.name = f"shoal AsyncEnvPool, {label}"
        self.min_get = min_get
        self._options = options

    def make(self) -> Any:
        from shoal import AsyncEnvPool

        return AsyncEnvPool(makers_of(self.env_id, self.num_envs), **self._options)


class FirstHalf(ShoalPool):
    """The same, each receive waiting for half of the envs, whichever are ready first."""

    def __init__(self, env_id: str, num_envs: int, *, label: str, **options: Any) -> None:
        super().__init__(env_id, num_envs, label=label, min_get=num_envs // 2, **options)


class Synchronous(Contender):
    """Batched envs that are stepped all together: each step takes as long as its longest."""

    def __init__(self, env_id: str, num_envs: int, *, label: str, **options: Any) -> None:
        super().__init__(env_id, num_envs)
        self.name = f"shoal {label}"
        self._options = options

    def make(self) -> Any:
        """Returns the batched env."""
        from shoal import AsyncEnvPool

        return AsyncEnvPool(makers_of(self.env_id, self.num_envs), **self._options)

    def open(self) -> None:
        import torch

        self._env = self.make()
        self._root = self._env.reset()
        self._action = torch.zeros(self.num_envs, 1)

    def run(self, num_steps: int) -> float:
        step, root = self._env.step_and_maybe_reset, self._root
        started_at = perf_counter()
        for _ in range(num_steps):
            root["action"] = self._action
            _, root = step(root)
        elapsed_s = perf_counter() - started_at
        self._root = root
        return elapsed_s

    def close(self) -> None:
        self._env.close()


class SynchronousParallel(Synchronous):
    """``shoal.ParallelEnv``, a process per env, so that waits overlap."""

    def __init__(self, env_id: str, num_envs: int) -> None:
        super().__init__(env_id, num_envs, label="ParallelEnv, a process each")

    def make(self) -> Any:
        from shoal import ParallelEnv

        return ParallelEnv(
            self.num_envs, makers_of(self.env_id, self.num_envs), num_processes=self.num_envs
        )
