"""States that the envs have themselves need not travel back, unless somebody changed them."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv

from shoal import ParallelEnv, SerialEnv
from shoal.adapters.torchrl_inputs import GIVEN


def make_counted():
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(), RewardSum()))


@pytest.fixture(params=[SerialEnv, ParallelEnv])
def env(request):
    with request.param(3, make_counted) as made:
        made.set_seed(1)
        yield made


def acted(env, root):
    action = torch.zeros(3, 2, dtype=torch.int64)
    action[:, 1] = 1
    return root.set("action", action)


def sent(env):
    """Returns which states the last step was sent, per env."""
    return env._running().rows.action[GIVEN].tolist()


def test_what_the_envs_have_is_not_sent(env):
    root = env.reset()
    for t in range(3):
        stepped, root = env.step_and_maybe_reset(acted(env, root))
        assert stepped["next", "step_count"].flatten().tolist() == [t + 1] * 3
        assert stepped["next", "episode_reward"].flatten().tolist() == [t + 1.0] * 3
        assert sent(env) == [0] * 3


def test_what_was_written_in_place_is_sent(env):
    _, root = env.step_and_maybe_reset(acted(env, env.reset()))
    root["step_count"][1] += 10
    stepped, root = env.step_and_maybe_reset(acted(env, root))
    assert stepped["next", "step_count"].flatten().tolist() == [2, 12, 2]
    assert env.step(acted(env, root))["next", "step_count"].flatten().tolist() == [3, 13, 3]


def test_what_was_replaced_is_sent(env):
    _, root = env.step_and_maybe_reset(acted(env, env.reset()))
    root["episode_reward"] = torch.tensor([[5.0], [6.0], [7.0]])
    stepped = env.step(acted(env, root))
    assert stepped["next", "episode_reward"].flatten().tolist() == [6, 7, 8]


def test_an_old_root_is_sent(env):
    first = env.reset()
    _, root = env.step_and_maybe_reset(acted(env, first.copy()))
    env.step(acted(env, root))
    stepped = env.step(acted(env, first.copy()))
    assert stepped["next", "step_count"].flatten().tolist() == [1] * 3


def test_another_view_makes_roots_old(env):
    _, root = env.step_and_maybe_reset(acted(env, env.reset()))
    view = env[[1]]
    view.step(root[[1]].set("action", torch.tensor([[0, 1]])))
    stepped = env.step(acted(env, root))
    assert stepped["next", "step_count"].flatten().tolist() == [2] * 3
