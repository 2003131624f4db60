"""One task of every family in EnvPool's wheel: specs, dtypes, ends."""

from __future__ import annotations

import pytest
import torch
from torchrl.envs.utils import check_env_specs

import shoal

FAMILIES = {
    "classic_control": "Acrobot-v1",
    "toy_text": "Taxi-v3",
    "blackjack": "Blackjack-v1",
    "box2d": "LunarLander-v3",
    "box2d_pixels": "CarRacing-v3",
    "atari": "ALE/Breakout-v5",
    "mujoco_gym": "HalfCheetah-v4",
    "dm_control": "CheetahRun-v1",
    "dm_control_scalar": "WalkerWalk-v1",
    "metaworld": "MetaWorld/Assembly-v3",
    "robotics": "FetchReach-v4",
    "nested": "FrankaKitchen-v1",
    "myosuite": "MyoHandAirplaneFixed-v0",
    "playground": "AlohaHandOver-v1",
    "minigrid": "MiniGrid-Empty-5x5-v0",
    "jumanji": "BinPack-v2",
    "highway": "Highway-v0",
    "highway_goals": "ParkingActionRepeat-v0",
    "highway_players": "IntersectionMultiAgent-v0",
    "pgx_players": "TicTacToe-v1",
    "pgx_three_players": "SparrowMahjong-v1",
    "pgx_alone": "Play2048-v1",
    "gfootball": "gfootball/academy_empty_goal-v1",
    "vizdoom": "D1Basic-v1",
    "procgen": "BigfishEasy-v0",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_of_each_family(family: str, tmp_path, monkeypatch) -> None:
    import envpool

    monkeypatch.chdir(tmp_path)  # ViZDoom leaves a file where it starts

    task = FAMILIES[family]
    try:
        pool = envpool.make_gymnasium(task.replace("ALE/", ""), num_envs=1)
    except (ImportError, RuntimeError) as exc:
        pytest.skip(f"EnvPool cannot make {task} here: {exc}")
    pool.close()
    env = shoal.MultiThreadedEnv(2, task, create_env_kwargs={"num_threads": 1, "seed": 1})
    check_env_specs(env)
    data = env.rollout(12, break_when_any_done=False)
    for key, spec in env.observation_spec.items(True, True):
        assert data["next", key].dtype == spec.dtype
        for t in range(12):
            assert spec.is_in(data["next", key][:, t]), f"{key} of {task} at step {t}"
    assert data["next", "reward"].isfinite().all()
    env.close()


@pytest.mark.parametrize(("task", "players"), [("TicTacToe-v1", 2), ("SparrowMahjong-v1", 3)])
def test_players_share_an_env(task: str, players: int) -> None:
    env = shoal.MultiThreadedEnv(3, task)
    assert env.reward_spec.shape == (3, players)
    data = env.rollout(30, break_when_any_done=False)
    assert data["next", "observation"].shape[:3] == (3, 30, players)
    assert data["next", "done"].sum() > 3
    assert data["next", "reward"][~data["next", "done"]].abs().max() < 1
    assert data["next", "reward"][data["next", "done"]].abs().sum() > 0
    assert "reward" not in data.keys()  # noqa: SIM118 - a TensorDict
    env.close()


def test_each_player_acts_where_the_game_says_so() -> None:
    env = shoal.MultiThreadedEnv(2, "IntersectionMultiAgent-v0")
    assert env.action_spec.shape == (2, 2)
    data = env.rollout(20, break_when_any_done=False)
    assert data["next", "done"].any()
    env.close()


def test_names_and_nesting() -> None:
    env = shoal.MultiThreadedEnv(2, "FrankaKitchen-v1")
    keys = set(env.observation_spec.keys(True, True))
    assert ("desired_goal", "top burner") in keys
    assert env.reset()["achieved_goal", "kettle"].shape == (2, 7)
    env.close()
    env = shoal.MultiThreadedEnv(2, "CarRacing-v3")
    assert env.reset()["observation"].dtype is torch.uint8
    env.close()


def test_bounds_that_envpool_does_not_know_are_infinite() -> None:
    env = shoal.MultiThreadedEnv(2, "LunarLander-v3")
    space = env.observation_spec["observation"].space
    assert space.low.max() < -1e38
    assert space.high.min() > 1e38
