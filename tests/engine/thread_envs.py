"""Envs that say on which thread they are, and gates that they wait at."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from shoal.testing import Fault, How, ScriptedFactory
from shoal.testing.scripted import ScriptedEnv


@dataclass(frozen=True, kw_only=True)
class TracedFactory(ScriptedFactory):
    """Builds scripted envs that keep a record of the threads they were used on."""

    record: list = field(default_factory=list)

    def __call__(self):
        return TracedEnv(self)


class TracedEnv(ScriptedEnv):
    def __init__(self, factory):
        self._note(factory, "build")
        super().__init__(factory)

    def _note(self, factory, verb):
        factory.record.append((verb, threading.get_ident()))

    def reset(self, seed=None, options=None):
        self._note(self.factory, "reset")
        return super().reset(seed, options)

    def step(self, action):
        self._note(self.factory, "step")
        return super().step(action)

    def seed(self, seed):
        self._note(self.factory, "seed")
        super().seed(seed)

    def call(self, name, args, kwargs):
        self._note(self.factory, "call")
        return super().call(name, args, kwargs)

    def close(self):
        self._note(self.factory, "close")
        super().close()

    def threads(self):
        """Returns the threads of this process it was used on so far."""
        return sorted({ident for _, ident in self.factory.record})

    def native_cores(self):
        """Returns the cores this thread may use."""
        import os

        return sorted(os.sched_getaffinity(0))


def factories_with(faults, num_envs=4, kind=ScriptedFactory, **script):
    """Returns factories; ``faults`` maps env ids to their faults."""
    return [
        replace(kind(name=f"env{i}", **script), faults=faults.get(i, ())) for i in range(num_envs)
    ]


def at_gate(gate, at="step", number=1):
    """Returns faults: wait at the gate."""
    return [Fault(how=How.GATE, at=at, number=number, gate=gate)]
