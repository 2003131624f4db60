"""Quicker steps and resets of plain GymEnvs below transforms: the same data, also in copies."""

from __future__ import annotations

import copy
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import (
    Compose,
    GymEnv,
    GymWrapper,
    RewardSum,
    StepCounter,
    TransformedEnv,
    default_info_dict_reader,
)

from shoal.adapters.torchrl_factory import adapted
from shoal.adapters.torchrl_gym import gymnasium_inside, quicken

PLAIN: dict[str, Any] = {
    "one-hot": lambda: GymEnv("CartPole-v1"),
    "categorical": lambda: GymEnv("CartPole-v1", categorical_action_encoding=True),
    "continuous": lambda: GymEnv("Pendulum-v1"),
    "wrapped": lambda: GymWrapper(gymnasium.make("MountainCarContinuous-v0")),
    "doubles": lambda: GymEnv("Ant-v5"),
}
OTHERS: dict[str, Any] = {
    "frame skip": lambda: GymEnv("CartPole-v1", frame_skip=2),
    "info reader": lambda: GymEnv("Ant-v5").set_info_dict_reader(
        default_info_dict_reader(["x_position"])
    ),
    "choices as observations": lambda: GymEnv("FrozenLake-v1"),
    "several observations": lambda: GymEnv("Blackjack-v1"),
    "a device": lambda: GymEnv("CartPole-v1", device="cpu"),
}


@pytest.mark.parametrize("maker", PLAIN.values(), ids=PLAIN)
def test_the_same_data(maker):
    envs = [TransformedEnv(maker(), Compose(StepCounter(30), RewardSum())) for _ in range(2)]
    quicken(envs[1])
    assert {"_step", "_reset"} <= envs[1].base_env.__dict__.keys()
    found = []
    for env in envs:
        env.set_seed(3)
        torch.manual_seed(3)
        found.append(env.rollout(80, break_when_any_done=False))
        env.close()
    usual, quick = found
    assert_same(usual, quick)


@pytest.mark.parametrize("maker", PLAIN.values(), ids=PLAIN)
def test_the_same_resets(maker):
    envs = [TransformedEnv(maker(), Compose(StepCounter(30), RewardSum())) for _ in range(2)]
    quicken(envs[1])
    found = []
    for env in envs:
        env.set_seed(5)
        whole = env.reset()
        ended = whole.clone()
        for key in ("done", "terminated"):
            ended[key] = torch.ones_like(ended[key])
        found.append((whole, env.maybe_reset(ended), env.reset(seed=4)))
        with pytest.raises(RuntimeError):
            env.base_env._reset(TensorDict(_reset=torch.zeros(1, dtype=torch.bool)))
        env.close()
    for usual, quick in zip(*found, strict=True):
        assert_same(usual, quick)


def assert_same(usual, quick):
    assert set(usual.keys(True, True)) == set(quick.keys(True, True))
    for key in usual.keys(True, True):
        assert usual[key].dtype == quick[key].dtype
        torch.testing.assert_close(quick[key], usual[key], rtol=0, atol=0)


@pytest.mark.parametrize("maker", OTHERS.values(), ids=OTHERS)
def test_what_does_more_keeps_its_own_step(maker):
    env = TransformedEnv(maker(), StepCounter())
    quicken(env)
    assert "_step" not in env.base_env.__dict__
    env.close()


def test_which_envs_are_plain():
    for maker in PLAIN.values():
        env = maker()
        assert gymnasium_inside(env) is env._env
        assert gymnasium_inside(TransformedEnv(env)) is None
        env.close()

    class Mine(GymEnv):
        pass

    for env in (Mine("CartPole-v1"), OTHERS["frame skip"](), OTHERS["info reader"]()):
        assert gymnasium_inside(env) is None
        env.close()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda e: cloudpickle.loads(cloudpickle.dumps(e))]
)
def test_a_copy_steps_itself(copied):
    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    quicken(env)
    env.set_seed(1)
    root = env.reset()
    twin = copied(env)
    action = torch.tensor([1, 0])
    before = np.array(env.base_env._env.unwrapped.state)
    for _ in range(3):
        twin.step(root.clone().set("action", action))
    assert np.array_equal(env.base_env._env.unwrapped.state, before)
    assert not np.array_equal(twin.base_env._env.unwrapped.state, before)
    env.close()
    twin.close()


def test_an_action_with_gradients_is_taken_as_a_number():
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter())
    quicken(env)
    root = env.reset().set("action", torch.ones(1, requires_grad=True))
    assert env.step(root)["next", "observation"].shape == (3,)
    env.close()


def test_an_observation_of_another_shape_is_refused():
    class Odd(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action):
            observation, *rest = super().step(action)
            return observation[:2], *rest

    env = TransformedEnv(GymWrapper(Odd(gymnasium.make("CartPole-v1"))), StepCounter())
    quicken(env)
    root = env.reset().set("action", torch.tensor([1, 0]))
    with pytest.raises(RuntimeError, match=r"shape \(2,\), but its space has \(4,\)"):
        env.step(root)
    env.close()


def test_an_env_that_is_let_go_is_gone():
    """Its transforms have one parent at a time; so it must not wait for the collector."""
    counter = StepCounter()
    for _ in range(3):
        env = adapted(
            TransformedEnv(GymEnv("CartPole-v1"), counter), may_unwrap=True, is_apart=False
        )
        env.reset()
        env.close()
        del env  # the next one may take the transform
