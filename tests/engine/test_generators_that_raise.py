"""Envs that raise when their random generator is read or put back: they fail as any other."""

from __future__ import annotations

import numpy as np
import pytest
from async_envs import AsyncShellFactory

from shoal.engine import Engine
from shoal.errors import EnvError
from shoal.testing import ScriptedFactory
from shoal.testing.scripted import ScriptedEnv

NOW = np.zeros(2, int)
BACKENDS = {
    "serial": {"backend": "serial"},
    "threads": {"backend": "threads"},
    "processes": {"num_processes": 1},
    "coroutines": {"backend": "coroutines"},
}


class Stubborn(ScriptedEnv):
    """Its first env has a generator that cannot be put back, or not even be read."""

    def save_rng(self):
        if self.factory.name == "unread" and self.episode > 1:
            raise ValueError("nobody reads it")
        return super().save_rng()

    def load_rng(self, state):
        if self.factory.name == "unset":
            raise ValueError("nobody sets it")
        super().load_rng(state)


class StubbornFactory(ScriptedFactory):
    def __call__(self):
        return Stubborn(self)


def _open_foreseen(name, backend):
    """Returns an engine whose resets are prepared, and one of them is now."""
    factories = [
        StubbornFactory(name=name, episode_length=1),
        StubbornFactory(name="well", episode_length=1),
    ]
    if backend == "coroutines":
        factories = [AsyncShellFactory(factory) for factory in factories]
    engine = Engine(factories, **BACKENDS[backend])
    engine.reset(seed=0)
    for _ in range(10):
        engine.step(NOW, autoreset=False)
        engine.reset()
    engine.step(NOW, autoreset=False)
    return engine


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_cannot_be_put_back(backend):
    with _open_foreseen("unset", backend) as engine:
        assert engine._driver._prepared.all()
        with pytest.raises(EnvError, match=r"Env 0 raised during reset.*nobody sets it") as caught:
            engine.reset(options={"level": 1})
        assert [failure.env_id for failure in caught.value.failures] == [0]
        assert len(engine.step(NOW)) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_cannot_be_read_is_not_reset_ahead(backend):
    with _open_foreseen("unread", backend) as engine:
        assert engine._driver._prepared.tolist() == [False, True]
        assert len(engine.reset()) == 2
        assert len(engine.step(NOW)) == 2
