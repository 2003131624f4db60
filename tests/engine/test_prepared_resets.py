"""Prepared resets and what makes them invalid; seeds with rules of the env's own."""

from __future__ import annotations

import numpy as np
import pytest
from backends import ALL

from shoal.engine.spec import ArraySpec, EnvSpec

LEAVES = {(): ArraySpec((), np.dtype(np.int64))}


class Drawing:
    """Ends at every step; a reset draws, and adds what it was told to."""

    spec = EnvSpec(observation=LEAVES, action=LEAVES)
    flatten_observation = build_action = None

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.plus = 0

    def reset(self, seed=None, options=None):
        return int(self.rng.integers(1000)) + self.plus, {}

    def step(self, action):
        return 0, 0.0, True, False, {}

    def seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def save_rng(self):
        return self.rng.bit_generator.state

    def load_rng(self, state):
        self.rng.bit_generator.state = state

    def call(self, name, args, kwargs):
        if name == "?plus":
            return self.plus
        self.plus += args[0]
        return None

    def close(self):
        pass


class Careless(Drawing):
    """Draws from a generator that nobody can put back."""

    spec = EnvSpec(observation=LEAVES, action=LEAVES, undoes_resets=False)


class OwnRule(Drawing):
    """The seed after it is a hundred more, except after the first one."""

    def seed(self, seed):
        super().seed(seed)
        self.plus = seed
        return None if seed == 7 else seed + 100


def expected(num_resets, *, seed=0, plus=0):
    rng = np.random.default_rng(seed)
    return [int(rng.integers(1000)) for _ in range(num_resets)][-1] + plus


def warm_up(engine):
    """Shows the engine twelve ends that are followed by plain resets."""
    engine.reset_rows(None)
    for _ in range(12):
        engine.step_rows(np.zeros(engine.num_envs, np.int64), autoreset=False)
        engine.reset_rows(None)
    engine.step_rows(np.zeros(engine.num_envs, np.int64), autoreset=False)


def shown(engine):
    return engine.gatherer.current(None)[()].tolist()


@pytest.mark.parametrize("backend", ALL)
def test_a_call_in_between_is_seen_by_the_reset(open_engine, backend):
    engine = open_engine([Drawing] * 3, **ALL[backend])
    warm_up(engine)
    assert (engine.rows.status & 4).all()  # it is prepared
    engine.call("add", 5000, env_ids=[1])
    engine.reset_rows(None)
    assert shown(engine) == [expected(14), expected(14, plus=5000), expected(14)]
    engine.step_rows(np.zeros(3, np.int64), autoreset=False)
    engine.reset_rows(None)
    assert shown(engine) == [expected(15), expected(15, plus=5000), expected(15)]


@pytest.mark.parametrize("backend", ALL)
def test_a_question_costs_nothing(open_engine, backend):
    engine = open_engine([Drawing] * 3, **ALL[backend])
    warm_up(engine)
    assert engine.call("?plus") == [0, 0, 0]
    engine.rows.op[...] = 0
    engine.reset_rows(None)
    assert shown(engine) == [expected(14)] * 3
    assert not engine.rows.op.any()  # answered from memory


@pytest.mark.parametrize("backend", ALL)
def test_stepping_on_after_a_call_undoes_nothing(open_engine, backend):
    engine = open_engine([Drawing] * 3, **ALL[backend])
    warm_up(engine)
    engine.call("add", 1)
    engine.step_rows(np.zeros(3, np.int64), autoreset=False)
    engine.reset_rows(None)
    # The reset that was prepared has drawn, and nobody has put that back: one guess too many.
    assert shown(engine) == [expected(15, plus=1)] * 3


@pytest.mark.parametrize("backend", ALL)
def test_what_cannot_be_undone_is_not_prepared(open_engine, backend):
    engine = open_engine([Drawing, Careless, Drawing], **ALL[backend], mixed_specs=True)
    assert not engine.spec.undoes_resets
    warm_up(engine)
    assert not (engine.rows.status & 4).any()
    engine.reset_rows(None, kwargs=[{"options": {}}] * 3)
    assert shown(engine) == [expected(14)] * 3


@pytest.mark.parametrize("backend", ALL)
def test_envs_with_a_rule_of_their_own_for_the_next_seed(open_engine, backend):
    engine = open_engine([OwnRule] * 4, **ALL[backend])
    seeds, following = engine.seed(3)
    assert (seeds, following) == ([3, 103, 203, 303], 403)
    assert engine.call("?plus") == seeds
    seeds, following = engine.seed(7, env_ids=[2, 0])
    assert seeds[0] == 7
    assert following == seeds[1] + 100  # the first keeps to the usual rule, the second does not
    assert engine.call("?plus") == [seeds[1], 103, 7, 303]
    assert engine.seed(9, static=True) == ([9] * 4, 9)
