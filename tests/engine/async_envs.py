"""Envs for the backend of coroutines: scripted ones in an async shell, and ones that wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.engine import ArraySpec, Engine, EnvSpec


class AsyncShell:
    """A plain env whose reset and step are coroutines that let others run in between."""

    def __init__(self, env):
        self.env = env
        self.spec = env.spec
        self.flatten_observation = env.flatten_observation
        self.build_action = env.build_action
        self.save_rng = env.save_rng
        self.load_rng = env.load_rng
        self.call = env.call  # these two stay plain
        self.seed = env.seed

    async def reset(self, **kwargs):
        await asyncio.sleep(0)
        result = self.env.reset(**kwargs)
        await asyncio.sleep(0)
        return result

    async def step(self, action):
        await asyncio.sleep(0)
        result = self.env.step(action)
        await asyncio.sleep(0)
        return result

    async def close(self):
        await asyncio.sleep(0)
        self.env.close()


@dataclass(frozen=True)
class AsyncShellFactory:
    """Puts the env of a plain factory into a shell."""

    factory: Any

    def __call__(self):
        return AsyncShell(self.factory())


def open_shells(factories, **options):
    """Opens an engine over the backend of coroutines, for plain factories."""
    factories = [AsyncShellFactory(f) if callable(f) else f for f in factories]
    return Engine(factories, backend="coroutines", **options)


SPEC = EnvSpec(
    observation={(): ArraySpec((), np.dtype(np.int64))},
    action={(): ArraySpec((), np.dtype(np.int64))},
)


class WaitingEnv:
    """Counts its steps. Each waits at `gate`, which a call or the test opens."""

    spec = SPEC
    flatten_observation = None
    build_action = None

    def __init__(self, journal=None):
        self.loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()
        self.at_gate = asyncio.Event()
        self.journal = [] if journal is None else journal
        self.count = 0
        self.gate.set()

    async def reset(self, seed=None, options=None):
        self.count = 0
        return self.count, {}

    async def step(self, action):
        self.at_gate.set()
        try:
            await self.gate.wait()
        finally:
            self.journal.append("left the step")
        self.at_gate.clear()
        self.count += 1
        return self.count, float(action), False, False, {}

    def seed(self, seed):
        pass

    def save_rng(self):
        return None

    def load_rng(self, state):
        pass

    def call(self, name, args, kwargs):
        found = getattr(self, name)
        return found(*args, **kwargs) if callable(found) else found

    async def close(self):
        self.journal.append("closed")

    # --- what tests ask for --------------------------------------------------------

    def shut(self):
        self.gate.clear()

    def open_from_outside(self):
        """Returns what opens the gate, from any thread."""
        return lambda: self.loop.call_soon_threadsafe(self.gate.set)

    async def wait_until_at_gate(self):
        await self.at_gate.wait()

    async def wait_for_ever(self):
        await asyncio.Event().wait()
