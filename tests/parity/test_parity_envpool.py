"""PARITY 1.15, additions 29 and defects D21, D22: EnvPool's envs."""

from __future__ import annotations

import pytest
import torch

envpool = pytest.importorskip("envpool")

from shoal.torchrl import MultiThreadedEnv, MultiThreadedEnvWrapper  # noqa: E402

CARTPOLE = {"num_threads": 1, "max_episode_steps": 5}


def pool(num_envs: int = 3, **kwargs):
    return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, **{**CARTPOLE, **kwargs})


@pytest.fixture
def env():
    made = MultiThreadedEnv(3, "CartPole-v1", create_env_kwargs=CARTPOLE)
    yield made
    made.close(raise_if_closed=False)


def test_item_142_what_a_wrapper_takes() -> None:
    with pytest.raises(TypeError, match="Could not find environment key 'env'"):
        MultiThreadedEnvWrapper()
    with pytest.raises(TypeError, match="not of type"):
        MultiThreadedEnvWrapper(env=object())
    assert MultiThreadedEnvWrapper.lib is envpool
    wrapper = MultiThreadedEnvWrapper(env=pool())
    assert wrapper.rollout(3).shape == (3, 3)
    wrapper.close()


def test_item_143_numbers_come_from_the_pool() -> None:
    wrapper = MultiThreadedEnvWrapper(pool(5))
    assert wrapper.num_workers == 5
    assert wrapper.batch_size == (5,)


def test_item_144_by_name() -> None:
    made = MultiThreadedEnv(2, "ALE/Pong-v5", create_env_kwargs={"frame_skip": 2})
    assert made.env_name == "Pong-v5"
    assert made.reset()["observation"].shape == (2, 4, 84, 84)
    assert made.config["frame_skip"] == 2
    assert made.config["gym_reset_return_info"]
    made.close()
    with pytest.raises(TypeError):
        MultiThreadedEnv(2)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        MultiThreadedEnv(env_name="Pong-v5")  # type: ignore[call-arg]


def test_item_145_specs(env) -> None:
    assert env.action_spec.shape == (3,)
    assert env.action_spec.n == 2
    assert env.observation_spec["observation"].shape == (3, 4)
    assert env.reward_spec.shape == (3,)
    for key in ("done", "terminated", "truncated"):
        assert env.full_done_spec[key].shape == (3,)
        assert env.full_done_spec[key].dtype is torch.bool


def test_item_146_observations_of_several_parts() -> None:
    made = MultiThreadedEnv(2, "CheetahRun-v1")
    root = made.reset()
    assert root["position"].shape == (2, 8)
    assert root["velocity"].dtype is torch.float64
    made.close()


def test_item_147_partial_resets(env) -> None:
    root = env.reset()
    mask = torch.tensor([False, True, False])
    root = env.step(env.rand_action(root))["next"].exclude("reward")
    again = env.reset(root.clone().set("_reset", mask))
    assert (again["observation"] != root["observation"]).any(-1).tolist() == mask.tolist()
    assert not again["done"].any()
    assert not env.is_closed


def test_item_148_steps_carry_no_gradient(env) -> None:
    stepped = env.rand_step(env.reset())
    assert not stepped["next", "observation"].requires_grad


def test_item_149_seeds(env) -> None:
    env.set_seed(1)
    first = env.reset()["observation"]
    env.set_seed(1)
    assert torch.equal(env.reset()["observation"], first)
    assert env.set_seed(None) is None
    wrapper = MultiThreadedEnvWrapper(pool())
    with pytest.warns(UserWarning, match="ignored"):
        wrapper.set_seed(1)


def test_item_150_repr(env) -> None:
    assert repr(env) == "MultiThreadedEnv(env=CartPole-v1, num_workers=3, device=None)"
    assert repr(MultiThreadedEnvWrapper(pool())) == (
        "MultiThreadedEnvWrapper(num_workers=3, device=None)"
    )


def test_item_151_device_and_other_keywords() -> None:
    made = MultiThreadedEnv(
        2, "CartPole-v1", device="cpu", disable_env_checker=True, allow_done_after_reset=True
    )
    assert made.rollout(3).device == torch.device("cpu")
    assert made._allow_done_after_reset
    made.close()
    with pytest.raises(TypeError, match="no_such"):
        MultiThreadedEnv(2, "CartPole-v1", no_such=1)


def test_addition_29_and_defect_22_ends_are_no_transitions(env) -> None:
    root = env.reset()
    lengths, last = torch.zeros(3), None
    for _ in range(60):
        step, following = env.step_and_maybe_reset(env.rand_action(root))
        lengths += 1
        over = step["next", "truncated"] | step["next", "terminated"]
        assert torch.equal(over, step["next", "done"])
        assert (step["next", "reward"] == 1).all()
        assert not following["done"].any()
        changed = (following["observation"] != step["next", "observation"]).any(-1)
        assert torch.equal(changed, over)
        assert (lengths[step["next", "truncated"]] == 5).all()
        lengths[over], last, root = 0, over, following
    assert last is not None


def test_defect_21_the_present_envpool_works(env) -> None:
    assert tuple(int(n) for n in envpool.__version__.split(".")[:2]) >= (1, 1)
    assert env.rollout(4).shape == (3, 4)
