"""Seeds, options and lists of keyword arguments; specs beside those of TorchRL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batched_cases import (
    SEED,
    WAYS,
    assert_same,
    open_env,
    open_reference,
)
from scripted_envs import CountingEnv, GlobalDice
from torchrl.envs import (
    Compose,
    GymWrapper,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl.envs.transforms import FrameSkipTransform, ObservationNorm

from shoal.adapters.gymnasium import GymnasiumFactory

N = 3


def values(td: Any) -> list[int]:
    return td["observation"].squeeze(-1).tolist()  # type: ignore[no-any-return]


# --- seeds ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain() -> dict[Any, Any]:
    """What TorchRL returns for seeds, by seed and whether it is static."""
    found: dict[Any, Any] = {}
    env = open_reference(N, "CartPole-v1")
    for seed in (0, 1, 2**31 - 1):
        for static in (False, True):
            found[seed, static] = env.set_seed(seed, static_seed=static)
    env.close()
    return found


def test_serial_envs_draw_from_a_global_generator_in_torchrls_order() -> None:
    reference = TorchRLSerialEnv(N, lambda: GymWrapper(GlobalDice()), shared_memory=False)
    found = []
    for env in (reference, open_env("serial", N, GlobalDice)):
        env.reset()
        np.random.seed(0)
        root, seen = env.reset(), []
        for _ in range(10):
            step, root = env.step_and_maybe_reset(env.rand_action(root))
            seen.append(torch.cat([step["next", "observation"], root["observation"]]))
        found.append(torch.stack(seen))
        env.close()
    assert torch.equal(*found)


@pytest.mark.parametrize("way", WAYS)
def test_seeds_follow_torchrls_chain(way: str, chain: Any) -> None:
    with open_env(way, N, "CartPole-v1") as env:
        for (seed, static), following in chain.items():
            assert env.set_seed(seed, static_seed=static) == following
        assert env._seeds == [2**31 - 1] * N
        env.set_seed(1)
        first = env.reset()["observation"]
        env.set_seed(1)
        assert torch.equal(env.reset()["observation"], first)
        assert not torch.equal(env.reset()["observation"], first)
        env.set_seed(1, static_seed=True)
        rows = env.reset()["observation"]
        assert torch.equal(rows, rows[:1].expand(N, -1))
        assert torch.equal(rows[0], first[0])


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_no_seed_changes_nothing(way: str) -> None:
    with open_env(way, N, CountingEnv) as env:
        assert env.set_seed(None) is None
        assert env.set_seed() is None
        assert values(env.reset()) == [100] * N
        assert env.set_seed(None) is None
        assert values(env.reset()) == [200] * N


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_seeds_do_not_survive_a_restart(way: str) -> None:
    with open_env(way, N, "CartPole-v1") as env:
        env.set_seed(1)
        first = env.reset()["observation"]
        env.close()
        assert not torch.equal(env.reset()["observation"], first)


@pytest.mark.parametrize("seed", [-1, 1.5, "1"])
def test_seeds_that_are_refused(seed: Any) -> None:
    with open_env("serial", N, "CartPole-v1") as env, pytest.raises(Exception, match="seed"):
        env.set_seed(seed)


def test_seeding_through_a_transform() -> None:
    with open_env("serial", N, "CartPole-v1") as env, open_env("serial", N, "CartPole-v1") as bare:
        assert TransformedEnv(env, RewardSum()).set_seed(SEED) == bare.set_seed(SEED)
        assert torch.equal(env.reset()["observation"], bare.reset()["observation"])


# --- arguments of resets -------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_options_and_lists_of_kwargs(way: str) -> None:
    with open_env(way, N, CountingEnv) as env:
        assert values(env.reset(options={"count": 2})) == [102] * N
        listed: list[dict[str, Any]] = [{"options": {"count": i}} for i in range(N)]
        assert values(env.reset(list_of_kwargs=listed)) == [200, 201, 202]
        # What is shared wins, and nobody's dicts are changed.
        td = env.reset(list_of_kwargs=listed, options={"count": 7}, seed=1)
        assert values(td) == [307] * N
        assert listed == [{"options": {"count": i}} for i in range(N)]
        mask = torch.tensor([[False], [True], [True]])
        td = env.reset(td.set("_reset", mask), list_of_kwargs=listed)
        assert values(td) == [307, 401, 402]
        for wrong in (listed[:2], [*listed, {}], []):
            with pytest.raises(RuntimeError, match="give one per env"):
                env.reset(list_of_kwargs=wrong)
        assert values(env.reset()) == [400, 500, 500]


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_options_after_prepared_resets(way: str) -> None:
    """After many plain resets they are prepared; a reset with options must not get one."""
    with open_env(way, N, CountingEnv) as base:
        env = TransformedEnv(base, RewardSum())
        env.rollout(60, break_when_any_done=False)  # 20 ends
        root = env.reset()
        for _ in range(3):
            root = env.step_mdp(env.step(env.rand_action(root)))
        assert root["done"].all()
        assert {value % 100 for value in values(env.reset(options={"count": 2}))} == {2}
        root = env.rand_step(env.reset())
        assert {value % 100 for value in values(root["next"])} == {1}


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("prefetch_resets", [True, False])
def test_a_caller_who_steps_past_an_end_out_of_the_blue(way: str, prefetch_resets: bool) -> None:
    """Once at most he gets the next episode instead; never without prepared resets."""
    with open_env(way, N, CountingEnv, prefetch_resets=prefetch_resets) as base:
        TransformedEnv(base, RewardSum()).rollout(60, break_when_any_done=False)  # 20 ends
        for surprise in range(3):
            start = values(base.reset())[0]
            seen = [values(base._step(base.rand_action()))[0] - start for _ in range(5)]
            if prefetch_resets and not surprise:
                assert seen == [1, 2, 3, 101, 102]
            else:
                assert seen == [1, 2, 3, 4, 5]


# --- specs ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Taxi-v4", "ALE/Pong-v5"])
def test_specs_are_those_of_torchrl(way: str, env_id: str, categorical: bool) -> None:
    theirs = open_reference(N, env_id, categorical_action_encoding=categorical)
    ours = open_env(way, N, env_id, categorical_action_encoding=categorical)
    for name in (
        "observation_spec",
        "action_spec",
        "reward_spec",
        "done_spec",
        "full_observation_spec",
        "full_action_spec",
        "full_reward_spec",
        "full_done_spec",
    ):
        wanted, found = getattr(theirs, name), getattr(ours, name)
        assert type(found) is type(wanted), name
        # TorchRL gives its composites a device that neither its env nor its GymEnv has.
        assert found.to("cpu") == wanted, name
    for name in ("action_keys", "reward_keys", "done_keys", "reset_keys", "action_key"):
        assert getattr(ours, name) == getattr(theirs, name), name
    fake, wanted = ours.fake_tensordict(), theirs.fake_tensordict()
    assert_same(fake.clear_device_(), wanted.clear_device_())
    assert ours.batch_locked == theirs.batch_locked
    assert ours.is_closed


@pytest.mark.parametrize("way", WAYS)
def test_check_env_specs_bare_and_transformed(way: str) -> None:
    with open_env(way, N, "CartPole-v1") as env:
        check_env_specs(env)
        check_env_specs(env, break_when_any_done="both")
        check_env_specs(TransformedEnv(env, Compose(RewardSum(), StepCounter(), InitTracker())))
        check_env_specs(TransformedEnv(env, FrameSkipTransform(2)))
        norm = ObservationNorm(loc=0.0, scale=2.0, in_keys=["observation"])
        check_env_specs(TransformedEnv(env, norm))


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_transforms_that_change_shapes_below_partial_steps(way: str) -> None:
    from torchrl.envs.transforms import UnsqueezeTransform

    with open_env(way, N, CountingEnv) as base:
        env = TransformedEnv(base, UnsqueezeTransform(dim=-1, in_keys=["observation"]))
        data = env.rollout(9, break_when_all_done=True)
        assert data["observation"].shape == (N, 3, 1, 1)
        data = env.rollout(9, break_when_any_done=False)
        assert (data["next", "observation"].flatten(1)[0] % 100).tolist() == [1, 2, 3] * 3


@pytest.mark.parametrize("way", WAYS)
def test_inputs_with_a_device_of_their_own(way: str) -> None:
    with open_env(way, N, CountingEnv) as env:
        root = env.reset().to("cpu")
        td, root = env.step_and_maybe_reset(env.rand_action(root))
        assert values(td["next"]) == [101] * N
        td = env.step(env.rand_action(root.to("cpu")))
        assert values(td["next"]) == [102] * N
        td = env.reset(td.to("cpu"))
        assert values(td) == [200] * N


# --- Blackjack, which GymEnv cannot run ----------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_blackjack_beside_envs_stepped_by_hand(way: str) -> None:
    lone = [GymnasiumFactory.of("Blackjack-v1", defaults="torchrl")().env for _ in range(N)]
    rng = np.random.default_rng(SEED)
    with open_env(way, N, "Blackjack-v1") as env:
        td = env.reset(list_of_kwargs=[{"seed": i} for i in range(N)])
        _check_cards(td, [one.reset(seed=i)[0] for i, one in enumerate(lone)])
        for _ in range(40):
            action = rng.integers(0, 2, N)
            td["action"] = torch.from_numpy(action)
            td, root = env.step_and_maybe_reset(td)
            results = [one.step(int(a)) for one, a in zip(lone, action, strict=True)]
            _check_cards(td["next"], [result[0] for result in results])
            assert td["next", "reward"].squeeze(-1).tolist() == [result[1] for result in results]
            assert td["next", "done"].squeeze(-1).tolist() == [result[2] for result in results]
            present = [
                one.reset()[0] if result[2] else result[0]
                for one, result in zip(lone, results, strict=True)
            ]
            _check_cards(root, present)
            td = root
        check_env_specs(env)


def _check_cards(td: Any, observations: list[Any]) -> None:
    # Three choices of different sizes: one MultiCategorical.
    assert td["observation"].tolist() == [[int(card) for card in cards] for cards in observations]


def test_unusual_numbers_of_envs() -> None:
    for num_envs, num_processes in ((1, 1), (5, 2), (2, 8), (7, 3)):
        with open_env("2 processes", num_envs, CountingEnv, num_processes=num_processes) as env:
            data = env.rollout(7, break_when_any_done=False)
            assert data.batch_size == (num_envs, 7)
            assert (data["next", "observation"][:, 0] == 101).all()
