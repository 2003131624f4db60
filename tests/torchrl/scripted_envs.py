"""Envs that do as they are told. Workers import this module, so it must not need torch."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class CountingEnv(gymnasium.Env[Any, Any]):
    """Counts from ``start``; each reset takes 100 more. Ends after ``length`` steps."""

    def __init__(self, start: int = 0, length: int = 3, *, reuse: bool = False) -> None:
        self.observation_space = spaces.Box(-(10**6), 10**6, (1,), np.int64)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.num_resets = start // 100
        self.is_closed = False
        self._buffer = np.zeros(1, np.int64) if reuse else None

    def _observe(self) -> Any:
        value = 100 * self.num_resets + self.count
        if self._buffer is None:
            return np.array([value], np.int64)
        self._buffer[0] = value
        return self._buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = (options or {}).get("count", 0)
        self.num_resets += 1
        return self._observe(), {"count": self.count, "seed": -1 if seed is None else seed}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        ended = self.count >= self.length
        info = {"count": self.count, "text": f"{self.count}"}
        return self._observe(), float(action), ended, False, info

    def add(self, a: int, b: int = 0) -> int:
        return self.num_resets + a + b

    def close(self) -> None:
        self.is_closed = True


def counting_from_a_table(table: Any) -> CountingEnv:
    return CountingEnv(start=int(table.sum()))


class FaultyEnv(CountingEnv):
    """Raises or dies where its action or its options say so."""

    def __init__(self, fails_in: str = "", **kwargs: Any) -> None:
        if fails_in == "build":
            raise ValueError("cannot be built")
        super().__init__(length=10**6, **kwargs)
        self.action_space = spaces.Discrete(10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if (options or {}).get("fail"):
            raise ValueError("no reset today")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 9:
            raise ValueError("no step today")
        return super().step(action)


class SpaceEnv(gymnasium.Env[Any, Any]):
    """Draws observations from its space; hands back what it was given as an action."""

    def __init__(self, observation_space: Any, action_space: Any = None, length: int = 3) -> None:
        # A copy, so that envs in one process do not draw from the same generator.
        self.observation_space = copy.deepcopy(observation_space)
        self.action_space = action_space or spaces.Discrete(2)
        self.length = length
        self.actions: list[Any] = []
        self.observations: list[Any] = []

    def _observe(self) -> Any:
        self.observations.append(self.observation_space.sample())
        return self.observations[-1]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        self.actions.append(action)
        return self._observe(), 0.5, False, self.count >= self.length, {}

    def last_action(self) -> Any:
        return self.actions[-1]

    def all_observations(self) -> list[Any]:
        return self.observations


class SuicidalEnv(CountingEnv):
    def step(self, action: Any) -> Any:
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class SlowEnv(CountingEnv):
    """Waits in its step until there is a file of the given name."""

    def __init__(self, path: str) -> None:
        super().__init__(length=10**6)
        self.path = path

    def step(self, action: Any) -> Any:
        if action == 1:
            while not os.path.exists(self.path):
                time.sleep(0.005)
        return super().step(action)


class ColourSpace(spaces.Space[Any]):
    """A space that nobody but its author knows."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        return ("red", "green", "blue")[int(self.np_random.integers(3))]

    def contains(self, x: Any) -> bool:
        return x in ("red", "green", "blue")


class InfoEnv(CountingEnv):
    """Its infos hold numbers, arrays, text, and entries that come and go."""

    number: Any = np.int64  # TorchRL's reader wants numpy's

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset(seed=seed, options=options)
        return observation, self._info(reset=True)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        return (*result[:4], self._info(reset=False))

    def _info(self, *, reset: bool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "count": self.number(self.count),
            "vector": np.full(3, self.count + 0.5, np.float32),
            "flag": np.bool_(self.count % 2 == 0),
            "text": f"at {self.count}",
        }
        if not reset:
            info["only in steps"] = float(self.count)
        return info


class PlainInfoEnv(InfoEnv):
    """Its infos hold Python's own numbers."""

    number = int


class KeepingEnv(CountingEnv):
    """Keeps every action it gets, and changes it afterwards."""

    def __init__(self) -> None:
        super().__init__(length=10**6)
        self.action_space = spaces.Box(-1, 1, (2,))
        self.actions: list[Any] = []

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        result = super().step(0)
        action += 1
        return result

    def all_actions(self) -> list[Any]:
        return self.actions


class GlobalDice(gymnasium.Env[Any, Any]):
    """Draws from numpy's global generator, in steps and in resets; episodes of three steps."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return np.random.random_sample(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return np.random.random_sample(1), 0.0, self._steps >= 3, False, {}


class Echo(gymnasium.Env[Any, Any]):
    """Says what it was told."""

    observation_space = spaces.Text(8)
    action_space = spaces.Text(8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return "start", {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action, 0.0, False, False, {}
