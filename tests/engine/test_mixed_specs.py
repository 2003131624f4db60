"""Engines whose envs do not have the same leaves; action leaves that need not be given."""

from __future__ import annotations

import numpy as np
import pytest
from backends import ALL

from shoal.engine.spec import ABSENT, ArraySpec, EnvSpec, ObjectSpec
from shoal.errors import SpecError

INT = ArraySpec((), np.dtype(np.int64))
PAIR = ArraySpec((2,), np.dtype(np.float32))


class Echo:
    """Returns what it was given, under its own names."""

    def __init__(self, observation, action):
        self.spec = EnvSpec(observation=observation, action=action)
        self.count = 0

    def flatten_observation(self, observation):
        return [observation[path] for path in self.spec.observation]

    def build_action(self, leaves):
        return dict(zip(self.spec.action, leaves, strict=True))

    def _observe(self, given):
        values = {("count",): self.count, ("pair",): np.full(2, self.count, np.float32)}
        return {p: values.get(p, given) for p in self.spec.observation}

    def reset(self, seed=None, options=None):
        self.count = 0
        return self._observe("fresh"), {}

    def step(self, action):
        self.count += 1
        return self._observe(action), 0.0, False, False, {}

    def save_rng(self):
        return None

    def load_rng(self, state):
        pass

    def call(self, name, args, kwargs):
        raise AttributeError(name)

    def close(self):
        pass


class EchoFactory:
    def __init__(self, observation, action):
        self.given = observation, action

    def __call__(self):
        return Echo(*self.given)


SEEN = {("count",): INT, ("given",): ObjectSpec()}
DIFFERENT = [
    EchoFactory({**SEEN, ("pair",): PAIR}, {("go",): INT}),
    EchoFactory(SEEN, {("go",): INT, ("where",): PAIR}),
    EchoFactory({**SEEN, ("pair",): INT}, {("go",): INT}),
]


@pytest.mark.parametrize("backend", ALL)
def test_each_env_gets_and_gives_its_own_leaves(open_engine, backend):
    engine = open_engine(DIFFERENT, **ALL[backend], mixed_specs=True)
    assert engine.spec.observation[("count",)] == INT
    assert isinstance(engine.spec.observation[("pair",)], ObjectSpec)
    first = engine.reset().observation
    assert first[("count",)].tolist() == [0, 0, 0]
    assert first[("pair",)][1] is ABSENT
    where = [ABSENT, np.array([1, 2], np.float32), ABSENT]
    batch = engine.step({("go",): np.array([7, 8, 9]), ("where",): where})
    given = batch.observation[("given",)]
    assert given[0] == {("go",): 7}
    assert given[1][("go",)] == 8
    assert given[1][("where",)].tolist() == [1, 2]
    assert given[2] == {("go",): 9}
    assert batch.observation[("pair",)][0].tolist() == [1, 1]


@pytest.mark.parametrize("backend", ALL)
def test_differences_are_refused_if_nobody_asked_for_them(open_engine, backend):
    with pytest.raises(SpecError, match="pair"):
        open_engine(DIFFERENT, **ALL[backend])


@pytest.mark.parametrize("backend", ALL)
def test_an_optional_leaf_is_there_for_one_step_only(open_engine, backend):
    action = {("go",): INT, ("more",): ObjectSpec(is_optional=True)}
    engine = open_engine([EchoFactory(SEEN, action)] * 3, **ALL[backend])
    engine.reset()
    go = {("go",): np.array([1, 2, 3])}
    for more in ([None, "a", {"b": 1}], None, ["c", None, None], None):
        given = engine.step(go if more is None else {**go, ("more",): more})
        found = [row[("more",)] for row in given.observation[("given",)]]
        assert found == ([None] * 3 if more is None else more)
    engine.send({("go",): np.array([5]), ("more",): ["d"]}, env_ids=[1])
    assert engine.recv().observation[("given",)][0] == {("go",): 5, ("more",): "d"}
    with pytest.raises(SpecError, match="action/go should be given"):
        engine.step({("more",): ["x"] * 3})
