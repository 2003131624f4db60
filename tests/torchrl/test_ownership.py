"""What is returned belongs to the caller: new memory, shared with nobody, never changed."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from batched_cases import WAYS, Log, leaves_of, open_env
from gymnasium import spaces
from scripted_envs import CountingEnv, KeepingEnv, SpaceEnv
from tensordict import TensorDict
from torchrl.envs import RewardSum, TransformedEnv

N = 3
REUSING = functools.partial(CountingEnv, length=3, reuse=True)
NESTED = functools.partial(
    SpaceEnv,
    spaces.Dict(
        {
            "a": spaces.Box(0, 9, (2,), np.float32),
            "b": spaces.Dict({"c": spaces.Discrete(5, start=2), "d": spaces.Box(0, 9, ())}),
            "text": spaces.Text(5),
        }
    ),
)


def values(td: Any) -> list[int]:
    return td["observation"].squeeze(-1).tolist()  # type: ignore[no-any-return]


def storages(td: Any) -> list[int]:
    return [
        value.untyped_storage().data_ptr()
        for value in leaves_of(td).values()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize("maker", [REUSING, NESTED, "CartPole-v1"], ids=["one", "nested", "id"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_was_returned_changes_later(way: str, maker: Any) -> None:
    log = Log()
    with open_env(way, N, maker) as env:
        root = log.add("reset", env.reset())
        for _ in range(8):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            log.add("td", td)
            log.add("root", root)
        for _ in range(8):
            td = env.step(env.rand_action(root))
            log.add("next", td["next"])
            root = log.add("root", env.maybe_reset(env.step_mdp(td)))
        root["_reset"] = torch.tensor([[True], [False], [True]])
        log.add("mask", env.reset(root))
        log.add("rollout", env.rollout(5, break_when_any_done=False))
        log.add("rollout", env.rollout(5))
        transformed = TransformedEnv(env, RewardSum())
        log.add("transformed", transformed.rollout(9, break_when_any_done=False))
        env.reset()
        log.assert_untouched()
    log.assert_untouched()


@pytest.mark.parametrize("maker", [REUSING, NESTED], ids=["one", "nested"])
@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_no_two_results_share_memory(way: str, maker: Any) -> None:
    with open_env(way, N, maker) as env:
        kept = [env.reset()]
        for _ in range(4):
            td, root = env.step_and_maybe_reset(env.rand_action(kept[-1]).clone())
            kept += [td["next"], root.exclude("action")]
        for _ in range(2):
            kept.append(env._step(env.rand_action()))
        kept.append(env._reset())
        pointers = list(itertools.chain.from_iterable(map(storages, kept)))
        assert len(pointers) == len(set(pointers))


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_rollouts_do_not_share_memory(way: str) -> None:
    with open_env(way, N, REUSING) as env:
        kept = [env.rollout(3, break_when_any_done=False) for _ in range(3)]
        pointers = list(itertools.chain.from_iterable(map(storages, kept)))
        assert len(pointers) == len(set(pointers))


@pytest.mark.parametrize("way", WAYS)
def test_what_the_caller_changes_does_not_reach_the_envs(way: str) -> None:
    with open_env(way, N, REUSING) as env:
        root = env.reset()
        root["observation"].fill_(-1)
        action = torch.ones(N, dtype=torch.int64)
        td, root = env.step_and_maybe_reset(root.set("action", action))
        action.fill_(0)
        td["next", "observation"].fill_(-1)
        td["next", "done"].fill_(True)
        root["done"].fill_(True)
        assert values(root) == [101] * N
        step = env._step(TensorDict({"action": action}, [N]))
        assert values(step) == [102] * N
        assert not step["done"].any()


@pytest.mark.parametrize("way", WAYS)
def test_the_last_observation_of_an_episode_is_in_next(way: str) -> None:
    """Even though the env uses one buffer for it and for the reset that follows."""
    with open_env(way, N, REUSING) as env:
        root = env.reset()
        for _ in range(2):
            for count in (1, 2, 3):
                base = values(root)[0] // 100 * 100
                td, root = env.step_and_maybe_reset(env.rand_action(root))
                assert values(td["next"]) == [base + count] * N
            assert td["next", "done"].all()
            assert values(root) == [base + 100] * N
            assert not root["done"].any()
        data = TransformedEnv(env, RewardSum()).rollout(60, break_when_any_done=False)
        ends = data["next", "done"].squeeze(-1)
        assert ends.sum() == 20 * N
        assert (data["next", "observation"].squeeze(-1)[ends] % 100 == 3).all()
        assert (data["observation"] % 100 < 3).all()


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_an_env_may_keep_and_change_its_actions(way: str) -> None:
    with open_env(way, N, KeepingEnv) as env:
        td = env.reset()
        given = []
        for _ in range(3):
            td = env.rand_action(td)
            given.append(td["action"].clone())
            kept, td = env.step_and_maybe_reset(td)
            assert torch.equal(kept["action"], given[-1])
        for i, actions in enumerate(env._engine.call("all_actions")):
            for mine, action in zip(given, actions, strict=True):
                assert np.array_equal(action, mine[i].numpy() + 1)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_results_outlive_the_env(way: str) -> None:
    env = open_env(way, N, NESTED)
    data = env.rollout(4, break_when_any_done=False)
    root = env.reset()
    copies = data.clone(), root.clone()
    env.close()
    del env
    assert torch.equal(data["b", "c"], copies[0]["b", "c"])
    assert torch.equal(root["a"], copies[1]["a"])


def test_actions_with_gradients_and_of_other_widths() -> None:
    with open_env("2 processes", N, KeepingEnv) as env:
        td = env.reset()
        weights = torch.zeros(N, 2, requires_grad=True)
        td = env.step(td.set("action", weights + 0.5))
        assert td["action"].requires_grad
        assert not td["next", "reward"].requires_grad
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            env.step(env.reset().set("action", torch.full((N, 2), 0.25, dtype=dtype)))
        strided = torch.zeros(2, N).t()
        env.step(env.reset().set("action", strided))
        assert {tuple(actions[-1]) for actions in env._engine.call("all_actions")} == {(1.0, 1.0)}
