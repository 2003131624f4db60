"""Rollouts with policies of every kind: the same data as from TorchRL's serial env."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from batched_cases import (
    SEED,
    WAYS,
    Log,
    assert_same_logs,
    open_env,
    open_reference,
    play,
    play_reference,
)
from scripted_envs import CountingEnv
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import RewardSum, StepCounter, TransformedEnv, step_mdp

if TYPE_CHECKING:
    from collections.abc import Callable

N = 3


def choose(observation: torch.Tensor) -> torch.Tensor:
    return (observation.sum(-1) > 0).long()


def recurrent(observation: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = hidden + observation.mean(-1, keepdim=True)
    return (hidden.squeeze(-1) > 0).long(), hidden


def module(_: Any) -> Any:
    return TensorDictModule(choose, in_keys=["observation"], out_keys=["action"])


def module_with_two_outputs(_: Any) -> Any:
    return TensorDictModule(
        lambda x: (choose(x), x * 2), in_keys=["observation"], out_keys=["action", ("agent", "x")]
    )


def function(_: Any) -> Any:
    return lambda td: td.set("action", choose(td["observation"]))


def function_of_a_new_td(_: Any) -> Any:
    return lambda td: TensorDict({"action": choose(td["observation"])}, td.batch_size)


def plain_network(_: Any) -> Any:
    class Network(torch.nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return choose(observation)

    return Network()


def writes_next(_: Any) -> Any:
    def policy(td: Any) -> Any:
        hidden = td.get("hidden", torch.zeros(N, 1))
        action, hidden = recurrent(td["observation"], hidden)
        td["hidden"] = td.get("hidden", torch.zeros(N, 1))
        td["action"] = action
        td["next", "hidden"] = hidden
        return td

    return policy


def remembers(_: Any) -> Any:
    """Reads what it wrote a step ago, which lies in the root until an episode ends."""

    def policy(td: Any) -> Any:
        memory = td.get("memory", torch.zeros(N, 1)) + 1
        last = td.get("action", torch.zeros(N, dtype=torch.int64))
        td["memory"] = memory
        td["last"] = last.clone()
        td["action"] = ((memory.squeeze(-1).long() + last) % 3 == 0).long()
        return td

    return policy


def writes_once(_: Any) -> Any:
    def policy(td: Any) -> Any:
        if "gain" not in td.keys():  # noqa: SIM118
            td["gain"] = torch.arange(1.0, N + 1)
        td["action"] = (td["observation"].sum(-1) * td["gain"] > 0).long()
        return td

    return policy


def changes_observations(_: Any) -> Any:
    """Replaces some observations, which then are what the rollout shows."""

    def policy(td: Any) -> Any:
        td["action"] = choose(td["observation"])
        td["observation"] = td["observation"] * 2
        return td

    return policy


def random_of_the_env(env: Any) -> Any:
    return env.rand_action


POLICIES: tuple[Callable[[Any], Any], ...] = (
    module,
    module_with_two_outputs,
    function,
    function_of_a_new_td,
    plain_network,
    writes_next,
    remembers,
    writes_once,
    changes_observations,
    random_of_the_env,
)


def rollouts_with(make_policy: Callable[[Any], Any], env: Any, log: Log) -> None:
    policy = make_policy(env)
    log.add("seed", env.set_seed(SEED))
    log.add("nonstop", env.rollout(50, policy, break_when_any_done=False))
    log.add("nonstop, one", env.rollout(1, policy, break_when_any_done=False))
    data = env.rollout(40, policy=policy, break_when_any_done=False, set_truncated=True)
    log.add("set_truncated", data)
    root = step_mdp(data[:, -1])
    log.add(
        "gone on",
        env.rollout(
            20, policy, break_when_any_done=False, auto_reset=False, tensordict=root.clone()
        ),
    )
    root = root.select("observation", "done", "terminated", "truncated")
    data = env.rollout(20, policy, break_when_any_done=False, auto_reset=False, tensordict=root)
    log.add("gone on from a bare root", data)
    log.add("any", env.rollout(50, policy))
    log.add("all", env.rollout(50, policy, break_when_all_done=True))
    lazy = env.rollout(9, policy, break_when_any_done=False, return_contiguous=False)
    log.add("lazy", lazy.contiguous())
    env = TransformedEnv(env, StepCounter())
    if not isinstance(policy, torch.nn.Module) or isinstance(policy, TensorDictModule):
        log.add("transformed", env.rollout(50, policy, break_when_any_done=False))


@pytest.fixture(scope="module")
def reference(request: Any) -> tuple[Any, Log]:
    script = functools.partial(rollouts_with, request.param)
    return script, play_reference(open_reference(N, "CartPole-v1"), script)


@pytest.mark.parametrize("reference", POLICIES, ids=lambda f: f.__name__, indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_policies(way: str, reference: Any) -> None:
    script, wanted = reference
    assert_same_logs(play(open_env(way, N, "CartPole-v1"), script), wanted)


def other_arguments(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    seen: list[Any] = []

    def callback(same: Any, td: Any) -> None:
        assert same is env
        seen.append(td.clone())

    log.add("callback", env.rollout(9, module(env), callback, break_when_any_done=False))
    log.add("calls", len(seen))
    log.add("seen", torch.stack(seen, 1))
    log.add("callback, any", env.rollout(50, callback=callback))
    log.add("calls", len(seen))
    actions = torch.ones(7, N, dtype=torch.int64)
    log.add("actions", env.rollout(50, actions=actions, break_when_any_done=False))
    log.add("actions, any", env.rollout(50, actions=actions))
    log.add("actions, longer", env.rollout(3, actions=list(actions), break_when_any_done=False))
    with pytest.raises(ValueError, match="both"):
        env.rollout(3, module(env), actions=actions)
    with pytest.raises(TypeError, match="both"):
        env.rollout(3, break_when_any_done=True, break_when_all_done=True)
    with pytest.raises(RuntimeError, match="tensordict must be provided"):
        env.rollout(3, auto_reset=False, break_when_any_done=False)
    log.add("cast", env.rollout(5, module(env), auto_cast_to_device=True))
    stored = env.rollout(5, break_when_any_done=False, storing_device="cpu")
    log.add("stored", stored)
    log.add("trusted", env.rollout(5, module(env), trust_policy=True, break_when_any_done=False))
    log.add("stateless", env.rollout(5, set_state=False, break_when_any_done=False))
    given = TensorDict({"mine": torch.arange(N)}, [N])
    log.add("given", env.rollout(30, break_when_any_done=False, tensordict=given))
    given = TensorDict({"_reset": torch.tensor([[True], [False], [True]])}, [N])
    root = env.reset()
    given = root.clone().set("_reset", torch.tensor([[True], [False], [True]]))
    log.add("given a mask", env.rollout(30, break_when_any_done=False, tensordict=given))
    log.add("given a td", env.rollout(30, tensordict=env.reset()))
    with torch.inference_mode():
        log.add("inference", env.rollout(30, function(env), break_when_any_done=False).clone())


@pytest.fixture(scope="module")
def reference_of_other_arguments() -> Log:
    return play_reference(open_reference(N, "CartPole-v1"), other_arguments)


@pytest.mark.parametrize("way", WAYS)
def test_other_arguments(way: str, reference_of_other_arguments: Log) -> None:
    log = play(open_env(way, N, "CartPole-v1"), other_arguments)
    assert_same_logs(log, reference_of_other_arguments)


@pytest.mark.parametrize("way", WAYS)
def test_a_rollout_sees_every_end_of_every_episode(way: str) -> None:
    makers = [functools.partial(CountingEnv, length=n) for n in (1, 3, 5)]
    env = open_env(way, 3, makers)
    with env:
        data = env.rollout(7, break_when_any_done=False)
    root = data["observation"].squeeze(-1)
    following = data["next", "observation"].squeeze(-1)
    assert root[0].tolist() == [100, 200, 300, 400, 500, 600, 700]
    assert following[0].tolist() == [101, 201, 301, 401, 501, 601, 701]
    assert root[1].tolist() == [100, 101, 102, 200, 201, 202, 300]
    assert following[1].tolist() == [101, 102, 103, 201, 202, 203, 301]
    assert following[2].tolist() == [101, 102, 103, 104, 105, 201, 202]
    assert data["next", "done"][2].squeeze(-1).tolist() == [False] * 4 + [True] + [False] * 2
    assert not data["done"].any()
    assert data.names == [None, "time"]


@pytest.mark.parametrize("key", ["late", ("next", "late")])
def test_a_policy_that_starts_late_to_write_is_refused(key: Any) -> None:
    calls = 0

    def late(td: Any) -> Any:
        nonlocal calls
        calls += 1
        td["action"] = torch.zeros(N, dtype=torch.int64)
        if calls > 2:
            td[key] = torch.zeros(N)
        return td

    with (
        open_env("serial", N, "CartPole-v1") as env,
        pytest.raises(RuntimeError, match="same keys"),
    ):
        env.rollout(6, late, break_when_any_done=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_policy_may_change_what_it_is_given(way: str) -> None:
    """The change shows where it was made; the step before keeps what the env said."""

    def policy(td: Any) -> Any:
        td["action"] = choose(td["observation"])
        td["observation"].zero_()
        return td

    with open_env(way, N, "CartPole-v1") as env:
        for _ in range(2):
            data = env.rollout(5, policy, break_when_any_done=False)
            assert not data["observation"].any()
            assert (data["next", "observation"] != 0).any(-1).all()
        with torch.inference_mode():
            data = env.rollout(5, policy, break_when_any_done=False).clone()
        assert not data["observation"].any()
        assert (data["next", "observation"] != 0).any(-1).all()


def test_transforms_see_what_a_policy_remembers() -> None:
    def script(env: Any, log: Log) -> None:
        env = TransformedEnv(env, RewardSum())
        log.add("seed", env.set_seed(SEED))
        log.add("rollout", env.rollout(60, remembers(env), break_when_any_done=False))

    ours = play(open_env("2 processes", N, "CartPole-v1"), script)
    assert_same_logs(ours, play_reference(open_reference(N, "CartPole-v1"), script))
