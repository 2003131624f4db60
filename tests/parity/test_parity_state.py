"""PARITY 1.9: state dicts."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from parity_cases import BOTH, acting, column
from parity_envs import Counter, Locked
from torchrl.envs import ObservationNorm, TransformedEnv, VecNorm
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv


@pytest.mark.parametrize("kind", BOTH)
def test_item_106_one_entry_per_worker(kind: str, make: Any) -> None:
    env = make(kind, 3, CountingEnv)
    assert env.is_closed
    state = env.state_dict()
    assert not env.is_closed
    assert isinstance(state, OrderedDict)
    assert list(state) == ["worker0", "worker1", "worker2"]
    assert all("count" in one for one in state.values())


@pytest.mark.parametrize("kind", BOTH)
def test_item_106_a_state_is_a_snapshot(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnv)
    env.reset()
    state = env.state_dict()
    env.step(env.full_action_spec.one())
    assert [one["count"].item() for one in state.values()] == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_107_locks_are_left_out(kind: str, make: Any) -> None:
    env = make(kind, 2, Locked)
    env.reset()
    for one in env.state_dict().values():
        assert one["lock"] is None
        assert one["deep"]["lock"] is None
        assert one["start"] == 0


@pytest.mark.parametrize("kind", BOTH)
def test_item_108_and_109_loading(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnv, create_env_kwargs=[{}, {"start_val": 3}])
    env.reset()
    env.step(env.full_action_spec.one())
    state = copy.deepcopy(env.state_dict())
    assert [one["count"].item() for one in state.values()] == [1, 4]
    env.step(env.full_action_spec.one())
    env.load_state_dict(state)
    # It is there when the call returns, and so is what follows from it.
    assert [one["count"].item() for one in env.state_dict().values()] == [1, 4]
    assert column(env.step(env.full_action_spec.one())["next"]) == [2, 5]
    env.load_state_dict(state["worker1"])
    assert column(env.step(env.full_action_spec.one())["next"]) == [5, 5]


@pytest.mark.parametrize("kind", BOTH)
def test_item_108_a_state_with_a_worker_missing(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnv)
    state = env.state_dict()
    del state["worker1"]
    with pytest.raises(KeyError, match="worker1"):
        env.load_state_dict(state)
    assert column(env.reset()) == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_110_the_state_of_transforms(kind: str, make: Any) -> None:
    def maker(scale: float) -> Any:
        norm = ObservationNorm(loc=0.0, scale=scale, in_keys=["observation"])
        return TransformedEnv(ContinuousActionVecMockEnv(), norm)

    env = make(kind, 2, maker, create_env_kwargs=[{"scale": 1.0}, {"scale": 3.0}])

    def scales() -> list[float]:
        return [one["scale"].item() for one in env.state_dict().values()]

    assert scales() == [1.0, 3.0]
    env.load_state_dict(env.state_dict()["worker1"])
    assert scales() == [3.0, 3.0]


def test_item_110_running_statistics_come_back(make: Any) -> None:
    def maker() -> Any:
        return TransformedEnv(ContinuousActionVecMockEnv(), VecNorm(in_keys=["observation"]))

    env = make("parallel", 2, maker)
    env.rollout(5)
    state = env.state_dict()
    env.close()
    env.load_state_dict(state)
    again = env.state_dict()
    for name, one in state.items():
        for key, value in one["_extra_state"].items():
            assert torch.equal(value, again[name]["_extra_state"][key])


@pytest.mark.parametrize("kind", BOTH)
def test_item_109_arguments_reach_the_children(kind: str, make: Any) -> None:
    env = make(kind, 2, functools.partial(Locked))
    env.reset()
    env.step(acting(env, 1.0))
    state = env.state_dict()
    env.load_state_dict(state, strict=False)
    assert env.map(lambda child: child.loaded_with) == [{"strict": False}] * 2


def test_item_106_arguments_reach_the_children(make: Any) -> None:
    env = make("serial", 2, Counter)
    assert all(key.startswith("my.") for key in env.state_dict(prefix="my.")["worker0"])
