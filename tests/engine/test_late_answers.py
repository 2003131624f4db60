"""A timeout changes nothing: the answer is still picked up, and by whom it belongs to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from backends import ONE_WORKER, TWO_WORKERS

from shoal.engine import ArraySpec, ObjectSpec
from shoal.errors import EnvError, NoPendingCallError, PendingCallError, RecvTimeout
from shoal.testing import Fault, How, ScriptedFactory

NOW = np.arange(4)
OTHER = np.arange(4) + 100


def _waits_at(gate, verb, number=1, *, env_id=1, **script):
    factories = [ScriptedFactory(name=f"env{i}", **script) for i in range(4)]
    fault = Fault(how=How.GATE, at=verb, number=number, gate=gate)
    factories[env_id] = replace(factories[env_id], faults=[fault])
    return factories


@pytest.fixture
def stuck(open_engine, gate):
    """Returns an engine whose step has timed out while env 1 stands at the gate."""
    engine = open_engine(_waits_at(gate, "step"), **TWO_WORKERS)
    engine.reset(seed=0)
    with pytest.raises(RecvTimeout) as caught:
        engine.step(NOW, timeout=0)
    assert 1 in caught.value.waiting_for
    assert caught.value.during == "step"
    gate.wait_reached(timeout=30)
    return engine


def test_the_same_step_picks_its_answer_up(stuck, gate):
    with pytest.raises(RecvTimeout):
        stuck.step(NOW, timeout=0)
    gate.open()
    batch = stuck.step(NOW)
    assert batch.reward.astype(int).tolist() == NOW.tolist()
    assert batch.observation["count",].tolist() == [1] * 4


def test_another_step_is_refused_meanwhile(stuck, gate):
    for call in (
        lambda: stuck.step(OTHER),
        lambda: stuck.step(NOW, autoreset=False),
        lambda: stuck.step_rows(NOW[:2], np.arange(2), autoreset=True),
        lambda: stuck.send(NOW),
        lambda: stuck.call("pid"),
        lambda: stuck.seed(0),
    ):
        with pytest.raises(PendingCallError):
            call()
    gate.open()
    assert stuck.step(NOW).observation["count",].tolist() == [1] * 4


def test_recv_picks_the_step_up_and_that_is_the_end_of_it(stuck, gate):
    gate.open()
    assert len(stuck.recv()) == 4
    stuck.send(NOW[:1], env_ids=[0])
    with pytest.raises(PendingCallError, match="have not been received"):
        stuck.step(NOW)
    # A reset of others must not take the step for the unfinished one and drop it.
    assert stuck.reset(env_ids=[1]).env_ids.tolist() == [1]
    assert stuck.recv().observation["count",].tolist() == [2]


def test_a_reset_drops_the_step(stuck, gate):
    gate.open()
    assert stuck.reset(seed=3).observation["count",].tolist() == [0] * 4
    assert stuck.num_in_flight == 0
    with pytest.raises(NoPendingCallError):
        stuck.recv()
    assert stuck.step(OTHER).reward.astype(int).tolist() == OTHER.tolist()


def test_a_reset_waits_for_the_step_it_drops(stuck, gate):
    with pytest.raises(RecvTimeout, match="interrupted"):
        stuck.reset(timeout=0)
    gate.open()
    assert stuck.reset().observation["count",].tolist() == [0] * 4


@pytest.mark.parametrize(
    "arguments",
    [{}, {"seed": 5}, {"options": {"level": 2}}, {"env_ids": [2, 1], "seed": [1, 2]}],
    ids=str,
)
def test_the_same_reset_picks_its_answer_up(open_engine, gate, arguments):
    engine = open_engine(_waits_at(gate, "reset", 2), **TWO_WORKERS)
    engine.reset(seed=0)
    engine.step(NOW)
    with pytest.raises(RecvTimeout):
        engine.reset(**arguments, timeout=0)
    gate.wait_reached(timeout=30)
    for call in (lambda: engine.step(NOW), engine.recv):
        with pytest.raises(PendingCallError, match="reset"):
            call()
    gate.open()
    batch = engine.reset(**arguments)
    assert not batch.observation["count",].any()
    assert engine.call("episode", env_ids=[1]) == [2]
    assert engine.num_in_flight == 0


def test_options_that_hold_arrays_do_not_confuse_the_comparison(open_engine, gate):
    engine = open_engine(_waits_at(gate, "reset"), **ONE_WORKER)
    with pytest.raises(RecvTimeout):
        engine.reset(options={"mask": np.arange(3)}, timeout=0)
    gate.open()
    assert len(engine.reset(options={"mask": np.arange(3)})) == 4


def test_another_reset_starts_anew(open_engine, gate):
    engine = open_engine(_waits_at(gate, "reset"), **TWO_WORKERS)
    with pytest.raises(RecvTimeout):
        engine.reset(seed=0, timeout=0)
    gate.open()
    batch = engine.reset(seed=9)
    assert batch.observation["draw",][0].tolist() == np.random.default_rng(9).random(3).tolist()
    assert engine.call("episode") == [2] * 4


@pytest.mark.parametrize(
    ("action", "actions"),
    [
        ({("x",): ArraySpec((2,), np.dtype("f4"))}, {"x": np.full((4, 2), np.nan, "f4")}),
        ({("say",): ObjectSpec()}, {"say": ["a", "b", "c", "d"]}),
    ],
    ids=["nan", "objects"],
)
def test_actions_of_any_kind_are_recognised(open_engine, gate, action, actions):
    engine = open_engine(_waits_at(gate, "step", action=action), **ONE_WORKER)
    engine.reset()
    with pytest.raises(RecvTimeout):
        engine.step(actions, timeout=0)
    other = {path: values[::-1] for path, values in actions.items()}
    if "say" in actions:
        with pytest.raises(PendingCallError):
            engine.step(other)
    gate.open()
    assert engine.step(actions).observation["count",].tolist() == [1] * 4


def test_a_late_call_is_forgotten(open_engine, gate):
    engine = open_engine(_waits_at(gate, "call"), **TWO_WORKERS)
    engine.reset(seed=0)
    with pytest.raises(RecvTimeout, match="call"):
        engine.call("echo", "first", timeout=0)
    gate.wait_reached(timeout=30)
    gate.open()
    assert engine.call("echo", "second") == ["second"] * 4
    assert engine.step(NOW).observation["count",].tolist() == [1] * 4


def test_partial_receives_take_what_is_there(open_engine, gate):
    engine = open_engine(_waits_at(gate, "step", env_id=2), **TWO_WORKERS)
    engine.reset(seed=0)
    engine.send(NOW)
    gate.wait_reached(timeout=30)
    batch = engine.recv(min_envs=2)  # those of the other worker
    assert batch.env_ids.tolist() == [0, 1]
    with pytest.raises(RecvTimeout) as caught:
        engine.recv(min_envs=2, timeout=0)
    assert 2 in caught.value.waiting_for
    gate.open()
    assert engine.recv().env_ids.tolist() == [2, 3]


def test_slow_envs_of_one_worker_are_published_one_by_one(open_engine, gate):
    engine = open_engine(_waits_at(gate, "step", 2, work_s=0.002), **ONE_WORKER)
    engine.reset(seed=0)
    engine.step(NOW)
    engine.send(NOW)
    gate.wait_reached(timeout=30)
    assert engine.recv(min_envs=1).env_ids.tolist() == [0]
    with pytest.raises(RecvTimeout):
        engine.recv(min_envs=1, timeout=0)
    gate.open()
    assert engine.recv().env_ids.tolist() == [1, 2, 3]


def test_failures_wait_for_the_receive_that_takes_their_env(open_engine):
    factories = [
        ScriptedFactory(name=f"env{i}", faults=[Fault(how=How.RAISE)] if i == 2 else [])
        for i in range(4)
    ]
    engine = open_engine(factories, **ONE_WORKER)
    engine.reset(seed=0)
    engine.send(NOW)
    assert engine.recv(min_envs=1, max_envs=1).env_ids.tolist() == [0]
    assert engine.recv(min_envs=1, max_envs=1).env_ids.tolist() == [1]
    with pytest.raises(EnvError, match="env2") as caught:
        engine.recv(min_envs=1, max_envs=1)
    assert caught.value.batch is None
    assert engine.recv().env_ids.tolist() == [3]
