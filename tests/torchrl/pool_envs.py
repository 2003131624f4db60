"""Envs for pools: they say who they are, wait at gates, and fail where they are told.

Workers import this module, so it must not need torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

RAISE, DIE, WAIT = 90, 91, 92
"""Actions that mean something else than a number to add to the reward."""


class Named(gymnasium.Env[Any, Any]):
    """Observes ``[name, resets so far, steps of the episode]``; the reward is the action.

    With ``reuse`` it hands out the same array each time, and spoils it before the next; a
    ``tame`` one takes every action as a number.
    """

    observation_space = spaces.Box(-(10**6), 10**6, (3,), np.int64)
    action_space = spaces.Discrete(100)

    def __init__(
        self,
        name: int = 0,
        length: int = 10**6,
        *,
        gate: Any = None,
        reuse: bool = False,
        tame: bool = False,
    ) -> None:
        self.name, self.length, self.gate, self.reuse = name, length, gate, reuse
        self.tame = tame
        self.resets = self.count = 0
        self.closed = 0
        self.buffer = np.zeros(3, np.int64)

    def _observe(self) -> Any:
        now = [self.name, self.resets, self.count]
        if not self.reuse:
            return np.array(now, np.int64)
        self.buffer[:] = now
        return self.buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.buffer[:] = -1
        if (options or {}).get("wait"):
            self.gate.enter()
        if (options or {}).get("fail"):
            raise ValueError(f"no reset of {self.name}")
        self.resets += 1
        self.count = (options or {}).get("count", 0)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.buffer[:] = -1
        if self.tame:
            pass
        elif action == RAISE:
            raise ValueError(f"no step of {self.name}")
        elif action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == WAIT:
            self.gate.enter()
        self.count += 1
        return self._observe(), float(action), self.count >= self.length, False, {}

    def add(self, a: int, b: int = 0) -> int:
        return self.name + a + b

    def close(self) -> None:
        self.closed += 1


class AsyncNamed:
    """The same, with coroutines."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.env = Named(*args, **kwargs)
        self.observation_space = self.env.observation_space
        self.action_space = self.env.action_space
        self.name, self.add = self.env.name, self.env.add
        self.loop = asyncio.get_running_loop()

    async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if (options or {}).get("wait"):
            await self.loop.run_in_executor(None, self.env.gate.enter)
            options = {**options, "wait": False}
        await asyncio.sleep(0)
        return self.env.reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        if action == WAIT and not self.env.tame:
            await self.loop.run_in_executor(None, self.env.gate.enter)
            result = self.env.step(0)
            return (result[0], float(WAIT), *result[2:])
        await asyncio.sleep(0)
        return self.env.step(action)

    async def close(self) -> None:
        self.env.close()


class Talker(gymnasium.Env[Any, Any]):
    """Says a text of its own and repeats what it was told: leaves without a fixed shape."""

    observation_space = spaces.Dict(
        {"said": spaces.Text(10**7), "heard": spaces.Text(10**7), "number": spaces.Discrete(1000)}
    )
    action_space = spaces.Text(10**7)

    def __init__(self, name: int = 0, size: int = 1) -> None:
        self.name, self.size, self.count = name, size, 0

    def _observe(self, heard: str) -> Any:
        return {"said": f"{self.name}" * self.size, "heard": heard, "number": self.count}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self._observe(""), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observe(action), 1.0, False, False, {}


class Bulky(gymnasium.Env[Any, Any]):
    """Hands back the large array that it was given, one added."""

    def __init__(self, size: int) -> None:
        self.observation_space = spaces.Box(0, 255, (size,), np.uint8)
        self.action_space = spaces.Box(0, 255, (size,), np.uint8)
        self.size = size

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(self.size, np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action + np.uint8(1), 0.0, False, False, {}
