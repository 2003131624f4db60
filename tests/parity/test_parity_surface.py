"""PARITY 1.1: the classes, and what holds for all of their methods."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from parity_cases import BOTH, acting, column
from parity_envs import Counter, Markov
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import (
    DoubleToFloat,
    EnvBase,
    GymEnv,
    RewardSum,
    TransformedEnv,
    check_env_specs,
    step_mdp,
)
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.testing.mocking_classes import (
    ContinuousActionVecMockEnv,
    CountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    StateLessCountingEnv,
)

import shoal
import shoal.torchrl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector


def assert_equal(left: Any, right: Any) -> None:
    assert (left == right).all()
    assert set(left.keys(True, True)) == set(right.keys(True, True))


def test_item_001_public_classes() -> None:
    for name in ("SerialEnv", "ParallelEnv"):
        assert getattr(shoal, name) is getattr(shoal.torchrl, name)
        assert name in shoal.__all__
        assert issubclass(getattr(shoal, name), EnvBase)
        assert issubclass(getattr(shoal, name), BatchedEnvBase)


def test_item_001_common_base_has_its_old_and_new_name() -> None:
    assert issubclass(shoal.SerialEnv, shoal.torchrl.BatchedEnvBase)
    assert issubclass(shoal.ParallelEnv, shoal.torchrl.BatchedEnvBase)
    assert shoal.torchrl._BatchedEnv is shoal.torchrl.BatchedEnvBase


@pytest.mark.parametrize("kind", BOTH)
def test_item_002_every_method_of_envbase(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    assert isinstance(env, EnvBase)
    assert env.batch_size == (3,)
    assert env.device is None
    assert env.set_seed(1) is not None
    root = env.reset()
    assert root.batch_size == (3,)
    acted = env.rand_action(root)
    assert acted["action"].shape == (3, 1)
    stepped = env.step(acted)
    assert column(step_mdp(stepped)) == column(env.step_mdp(stepped)) == [1] * 3
    stepped, following = env.step_and_maybe_reset(env.rand_action(step_mdp(stepped)))
    assert column(stepped["next"]) == column(following) == [2] * 3
    assert column(env.rand_step(following)["next"]) == [3] * 3
    assert env.rollout(4).batch_size == (3, 4)
    for name in ("action", "state", "observation", "reward", "done"):
        assert getattr(env, f"{name}_spec") is not None
        assert getattr(env, f"full_{name}_spec").shape[:1] == (3,)
    fake = env.fake_tensordict()
    assert set(fake.keys(True, True)) == set(env.rollout(1).keys(True, True))
    assert env.to("cpu") is env
    env.close()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("child", [CountingEnv, NestedCountingEnv, ContinuousActionVecMockEnv])
@pytest.mark.parametrize("wrapped", [False, True])
def test_item_002_env_specs_are_true(kind: str, child: Any, wrapped: bool, make: Any) -> None:
    env = make(kind, 2, child)
    check_env_specs(TransformedEnv(env, DoubleToFloat()) if wrapped else env)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("wrapped", [False, True])
def test_item_002_under_transforms_and_in_a_collector(kind: str, wrapped: bool, make: Any) -> None:
    env = make(kind, 2, functools.partial(Counter, length=3))
    outer = TransformedEnv(env, RewardSum()) if wrapped else env
    policy = TensorDictModule(lambda seen: torch.ones(2, 1), ["observation"], ["action"])
    collector = Collector(outer, policy, frames_per_batch=16, total_frames=32)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    counts = torch.cat([batch["observation"] for batch in batches], 1)[..., 0]
    assert counts.tolist() == [[t % 3 for t in range(16)]] * 2
    ends = torch.cat([batch["next", "observation"] for batch in batches], 1)[..., 0]
    assert ends.tolist() == [[t % 3 + 1 for t in range(16)]] * 2
    if wrapped:
        sums = torch.cat([batch["next", "episode_reward"] for batch in batches], 1)[..., 0]
        assert sums.tolist() == [[t % 3 + 1.0 for t in range(16)]] * 2


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("batch", [(), (4,), (32, 1), (32, 5)])
def test_item_003_batch_size(kind: str, batch: tuple[int, ...], make: Any) -> None:
    env = make(kind, 2, Counter, create_env_kwargs={"batch_size": batch})
    assert env.batch_size == (2, *batch)
    root = env.reset()
    assert root.batch_size == (2, *batch)
    assert root["observation"].shape == (2, *batch, 1)
    data = env.rollout(3)
    assert data.batch_size == (2, *batch, 3)
    assert (data["next", "observation"][..., -1, :] == 3).all()
    check_env_specs(env)


@pytest.mark.parametrize(
    "child",
    [
        CountingEnv,
        NestedCountingEnv,
        functools.partial(GymEnv, "Pendulum-v1"),
        functools.partial(GymEnv, "CartPole-v1"),
    ],
)
def test_item_004_serial_and_parallel_give_the_same(child: Any, make: Any) -> None:
    envs = [make(kind, 2, child) for kind in BOTH]
    envs.append(TorchRLSerialEnv(2, child, shared_memory=False))
    try:
        assert len({env.set_seed(10) for env in envs}) == 1
        roots = [env.reset() for env in envs]
        torch.manual_seed(0)
        for _ in range(12):
            actions = envs[0].full_action_spec.rand()
            steps = [env.step(root.update(actions.clone())) for env, root in zip_(envs, roots)]
            for other in steps[1:]:
                assert_equal(steps[0], other)
            roots = [env.maybe_reset(step_mdp(step)) for env, step in zip_(envs, steps)]
            for other in roots[1:]:
                assert_equal(roots[0], other)
    finally:
        envs[-1].close()


def zip_(*many: Any) -> Any:
    return zip(*many, strict=True)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("child", [CountingEnv, NestedCountingEnv])
def test_item_005_results_are_private(kind: str, child: Any, make: Any) -> None:
    env = make(kind, 2, child)
    kept = []
    root = env.reset()
    for _ in range(4):
        stepped, following = env.step_and_maybe_reset(root.update(env.full_action_spec.one()))
        kept += [(made, made.clone()) for made in (stepped, following)]
        root = following.copy()
    plain = env.step(root.update(env.full_action_spec.one()))
    kept.append((plain, plain.clone()))
    kept.append((env.reset(), env.reset()))
    env.step(env.reset().update(env.full_action_spec.one()))
    for made, copied in kept:
        assert not made.is_shared()
        assert not made.is_memmap()
        assert_equal(made, copied)


@pytest.mark.parametrize("kind", BOTH)
def test_item_005_what_is_written_into_a_result_stays_there(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    root = env.reset()
    root["observation"].fill_(77)
    stepped = env.step(root.update(acting(env, 1.0)))
    stepped["next", "observation"].fill_(99)
    assert column(env.step(acting(env, 1.0))["next"]) == [2, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_item_006_only_inputs_are_needed_and_sent(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset()
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]
    loaded = acting(
        env,
        1.0,
        loc=torch.ones(2, 4),
        collector=TensorDict({"traj_ids": torch.arange(2)}, [2]),
        _reset=torch.ones(2, 1, dtype=torch.bool),
        observation=torch.ones(2, 7, 7),  # as a transform outside has made it
    )
    stepped = env.step(loaded)
    assert column(stepped["next"]) == [2, 2]
    assert {"loc", "collector"} <= set(stepped.keys())
    assert "loc" not in stepped["next"].keys()  # noqa: SIM118
    for keys in env.map(lambda child: child.step_keys):
        assert not any(name in key for key in keys for name in ("loc", "collector", "_reset"))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_item_007_nested_keys(kind: str, batch: tuple[int, ...], make: Any) -> None:
    env = make(kind, 2, NestedCountingEnv, create_env_kwargs={"batch_size": batch})
    data = env.rollout(4, break_when_any_done=False)
    shape = (2, *batch, 4, 3)
    assert env.reward_keys == [("data", "reward")]
    assert env.action_keys == [("data", "action")]
    assert ("data", "done") in env.done_keys
    assert ("data", "_reset") in env.reset_keys
    assert data["data"].batch_size == shape
    assert data["next", "data"].batch_size == shape
    for key in ("states", "reward", "done", "terminated"):
        assert data["next", "data", key].shape == (*shape, 1)


@pytest.mark.parametrize("kind", BOTH)
def test_item_007_several_rewards_and_dones(kind: str, make: Any) -> None:
    env = make(kind, 2, MultiKeyCountingEnv)
    reference = TorchRLSerialEnv(2, MultiKeyCountingEnv, shared_memory=False)
    try:
        assert list(map(str, env.reward_keys)) == list(map(str, reference.reward_keys))
        assert list(map(str, env.done_keys)) == list(map(str, reference.done_keys))
        for made in (env, reference):
            made.reset()
        actions = env.full_action_spec.one()
        for _ in range(3):
            mine, its = env.step(actions.clone()), reference.step(actions.clone())
            assert_equal(mine["next"], its["next"])
    finally:
        reference.close()


@pytest.mark.parametrize("kind", BOTH)
def test_item_008_a_stateless_child_knows_its_past(kind: str, make: Any) -> None:
    env = make(kind, 2, Markov)
    env.reset()
    one = TensorDict({"action": torch.ones(2, 2)}, [2])
    assert column(env.step(one.copy())["next"]) == [2.0, 2.0]
    assert column(env.step(one.copy())["next"]) == [3.0, 3.0]
    placed = one.copy().set("observation", torch.tensor([[10.0, 10.0], [20.0, 20.0]]))
    assert column(env.step(placed)["next"]) == [11.0, 21.0]
    assert column(env.step(one.copy())["next"]) == [12.0, 22.0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_008_torchrls_own_stateless_env(kind: str, make: Any) -> None:
    env = make(kind, 2, StateLessCountingEnv)
    root = env.reset()
    actions = TensorDict({"action": torch.ones(2, 1, dtype=torch.int32)}, env.batch_size)
    assert column(env.step(actions.copy())["next"], "count") == [1, 1]
    last = env.step(actions.copy())["next"]
    assert column(last, "count") == [2, 2]
    assert (last["max_count"] == root["max_count"]).all()


@pytest.mark.parametrize("kind", BOTH)
def test_item_009_forward_hints_at_constructors(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    with pytest.raises(NotImplementedError, match=r"(?s)ParallelEnv.*constructor"):
        env(TensorDict({}, [2]))
