"""`MultiThreadedEnv`: exact episodes through every way of stepping, masks, seeds, life."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pools
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import check_env_specs

import shoal
from shoal.adapters.envpool import EnvPoolFactory
from shoal.engine.backends.envpool import EnvPoolBackend
from shoal.errors import SpecError, UsageError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector

N = 4


@pytest.fixture
def make():
    envs = []

    def make_one(name: str = pools.CARTPOLE, num: int = N, *, limit: int = 6, **options):
        kwargs = {"num_threads": 1, "max_episode_steps": limit}
        env = shoal.MultiThreadedEnv(num, name, create_env_kwargs=kwargs, **options)
        envs.append(env)
        return env

    yield make_one
    for env in envs:
        env.close(raise_if_closed=False)


def _check_episodes(data: TensorDict, limit: int) -> int:
    """Checks that ends and roots are where they belong; returns how many ends there are."""
    done = data["next", "done"]
    assert not data["done"].any(), "every root is in the middle of an episode"
    assert (data["next", "reward"] == 1).all(), "a fake step has reward 0"
    ends = 0
    for i in range(data.shape[0]):
        since = 0
        for t in range(data.shape[1]):
            since += 1
            if done[i, t]:
                assert bool(data["next", "truncated"][i, t]) == (since == limit)
                since, ends = 0, ends + 1
            if t + 1 < data.shape[1]:
                follows = torch.equal(
                    data["observation"][i, t + 1], data["next", "observation"][i, t]
                )
                assert follows != bool(done[i, t])
    return ends


@pytest.mark.parametrize("kind", ["rollout", "loop", "transformed", "masked", "timeout", "device"])
def test_episodes_are_exact(make, kind: str) -> None:
    env = make(timeout=60) if kind == "timeout" else make()
    if kind == "device":
        env = env.to("cpu")
    if kind == "transformed":
        env = TransformedEnv(env, StepCounter())
    if kind == "loop":
        root, steps = env.reset(), []
        for _ in range(40):
            step, root = env.step_and_maybe_reset(env.rand_action(root))
            steps.append(step)
        data = torch.stack(steps, 1)
    elif kind == "masked":
        root, steps = env.reset(), []
        for _ in range(40):
            step = env.step(env.rand_action(root))
            steps.append(step.clone())
            root = env.step_mdp(step)
            root.set("_reset", root["done"].clone())
            if root["_reset"].any():
                root = env.reset(root)
            root.pop("_reset", None)
        data = torch.stack(steps, 1)
    else:
        data = env.rollout(40, break_when_any_done=False)
    assert _check_episodes(data, 6) >= N * 6
    if kind == "transformed":
        assert data["next", "step_count"].max() == 6
        assert (data["next", "step_count"][data["next", "truncated"]] == 6).all()


def test_the_time_limit_of_the_task_itself() -> None:
    env = shoal.MultiThreadedEnv(2, "Pendulum-v1", create_env_kwargs={"num_threads": 1})
    data = env.rollout(450, break_when_any_done=False)
    assert torch.nonzero(data["next", "truncated"][0]).tolist() == [[199], [399]]
    assert not data["next", "terminated"].any()
    env.close()


def test_one_call_more_per_step_with_ends(make) -> None:
    env = make()
    env.reset()
    calls = pools.count_calls(env._running())
    data = env.rollout(30, break_when_any_done=False)
    # One for the reset at the start; none after the last step, whose root nobody sees.
    steps_with_ends = int(data["next", "done"][:, :-1].any(0).sum())
    assert (len(calls["send"]), len(calls["reset"])) == (30, 1 + steps_with_ends)
    root = env.reset()
    for noted in calls.values():
        noted.clear()
    ends = 0
    for _ in range(20):
        step, root = env.step_and_maybe_reset(env.rand_action(root))
        ends += bool(step["next", "done"].any())
    assert (len(calls["send"]), len(calls["reset"])) == (20, ends)


def test_a_partial_reset_leaves_the_others_where_they_are(make) -> None:
    env = make(limit=100)
    root = env.step_and_maybe_reset(env.rand_action(env.reset()))[1]
    for mask in ([True, False, True, False], [False] * N, [True] * N):
        before = root["observation"].clone()
        calls = pools.count_calls(env._running())
        again = env.reset(TensorDict({"_reset": torch.tensor(mask)}, [N]))
        assert [len(args[0]) for args in calls["reset"]] == ([sum(mask)] if any(mask) else [])
        changed = (again["observation"] != before).any(-1)
        assert changed.tolist() == mask
        root = again
    env.step(env.rand_action(root))


def test_a_partial_step_moves_only_those_in_the_mask(make) -> None:
    env = make(limit=100)
    root = env.rand_action(env.reset())
    mask = torch.tensor([False, True, True, False])
    stepped = env.step(root.clone().set("_step", mask))["next"]
    assert (stepped["observation"] != root["observation"]).any(-1).tolist() == mask.tolist()
    assert stepped["reward"].tolist() == [0, 1, 1, 0]


def test_frame_skip_stops_at_the_end_of_an_episode(make) -> None:
    env = make(limit=6, frame_skip=4)
    data = env.rollout(30, break_when_any_done=False)
    done = data["next", "done"]
    assert done.any()
    assert (data["next", "reward"][~done] == 4).all()
    assert (data["next", "reward"][data["next", "truncated"]] == 2).all()


def test_specs_hold_bare_transformed_and_with_other_encodings(make) -> None:
    check_env_specs(make())
    check_env_specs(TransformedEnv(make(), RewardSum()))
    env = make(categorical_action_encoding=False)
    assert env.action_spec.shape == (N, 2)
    check_env_specs(env)


def test_collector(make) -> None:
    collector = Collector(make(), None, frames_per_batch=20 * N, total_frames=60 * N)
    batches = list(collector)
    assert len(batches) == 3
    assert _check_episodes(torch.cat(batches, 1), 6) > 0
    collector.shutdown()


def test_seeds(make) -> None:
    env = make(limit=500)

    def run(seed: int) -> torch.Tensor:
        env.set_seed(seed)
        torch.manual_seed(0)
        return env.rollout(20, break_when_any_done=False)["observation"]

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first, again)
    starts = {tuple(row.tolist()) for data in (first, other) for row in data[:, 0]}
    assert len(starts) == 2 * N, "neighbouring seeds share envs"
    assert env.set_seed(None) is None
    assert env.set_seed(5) != env.set_seed(6)
    assert env.set_seed(7, static_seed=True) == 7
    assert len({tuple(row) for row in env.reset()["observation"].tolist()}) == 1
    env.set_seed(2**32 - 2)  # EnvPool has 31 bits and a sign
    env.reset()


def test_life(make) -> None:
    env = make()
    assert env.is_closed
    env.reset()
    assert not env.is_closed
    assert env.config["max_episode_steps"] == 6
    env.close()
    assert env.is_closed
    copy = pickle.loads(pickle.dumps(env))
    assert copy.rollout(3).shape[0] == N
    copy.close()
    assert env.reset().shape == (N,)
    assert not env.state_dict()
    env.load_state_dict({})
    with pytest.raises(UsageError, match="state"):
        env.load_state_dict({"worker0": {}})
    view = env[1:3]
    assert view.reset().shape == (2,)


def test_bad_actions_change_nothing(make) -> None:
    env = make(limit=100)
    root = env.reset()
    with pytest.raises(SpecError, match="0 to 1"):
        env.step(root.clone().set("action", torch.full((N,), 9)))
    with pytest.raises(SpecError, match="should be"):
        env.step(root.clone())
    with pytest.raises(RuntimeError):
        env.step(TensorDict({"action": torch.zeros(N - 1, dtype=torch.int64)}, [N - 1]))
    action = torch.ones(N, dtype=torch.int64)
    with pytest.warns(UserWarning, match="first number of each row"):
        env.step(root.clone().set("action", torch.full((N, 3), 0.7)))
    env.step(root.clone().set("action", action.unsqueeze(-1)))
    assert env.step(root.clone().set("action", action))["next", "reward"].tolist() == [1.0] * N


def test_the_pool_of_the_caller_stays_his() -> None:
    import envpool

    pool = envpool.make_gymnasium(pools.CARTPOLE, num_envs=3, num_threads=1, seed=1)
    env = shoal.MultiThreadedEnvWrapper(pool)
    assert env._env is pool
    env.rollout(5)
    with pytest.warns(UserWarning, match="ignored"):
        env.set_seed(3)
    env.close()
    assert pool.reset()[0].shape == (3, 4)
    assert env.rollout(5, break_when_any_done=False)["next", "reward"].sum() == 15
    env.close()


def test_threads_end_with_the_pool(make) -> None:
    import os

    env = make("Pong-v5", 2)
    before = len(os.listdir("/proc/self/task"))
    env.reset()
    assert len(os.listdir("/proc/self/task")) > before
    env.close()
    assert len(os.listdir("/proc/self/task")) == before


def test_without_envpool_the_message_says_what_to_install() -> None:
    script = """
import sys
sys.modules["envpool"] = None
import shoal
for call in (
    lambda: shoal.MultiThreadedEnv(2, "CartPole-v1"),
    lambda: shoal.MultiThreadedEnvWrapper(object()),
    lambda: shoal.AsyncEnvPool(["CartPole-v1"] * 2, backend="envpool"),
):
    try:
        call()
    except ImportError as exc:
        print(exc)
"""
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100
    ).stdout
    assert out.count("pip install 'shoal[envpool]'") == 3


def test_a_release_that_returns_wrong_numbers_is_refused(monkeypatch) -> None:
    import envpool

    monkeypatch.setattr(envpool, "__version__", "0.8.4")
    monkeypatch.setattr(np, "__version__", "2.0.0")
    with pytest.raises(ImportError, match=r"EnvPool 0\.8\.4 was built for NumPy 1"):
        shoal.MultiThreadedEnv(2, "CartPole-v1")
    monkeypatch.setattr(np, "__version__", "1.26.4")
    shoal.MultiThreadedEnv(2, "CartPole-v1")


def test_releases_without_a_seed_per_env_get_the_first(make, monkeypatch) -> None:
    monkeypatch.setattr(EnvPoolFactory, "_takes_seeds", lambda self, options: False)
    first, again = make(), make()
    first.set_seed(5)
    again.set_seed(5)
    assert isinstance(first.config["seed"], int)
    assert torch.equal(first.reset()["observation"], again.reset()["observation"])
    first.set_seed(2**32 - 1)  # a negative one there
    first.reset()


def test_rewards_are_float32_and_flags_have_no_trailing_dimension(make) -> None:
    env = make()
    step = env.rand_step(env.reset())["next"]
    assert step["reward"].dtype is torch.float32
    for key in ("reward", "done", "terminated", "truncated"):
        assert step[key].shape == (N,)
    assert np.shape(step["observation"]) == (N, 4)


def test_results_that_the_pool_gave_away_never_change(make) -> None:
    env = make("Pong-v5", 2, limit=500)
    env.set_seed(0)
    kept = []
    root = env.reset()
    for _ in range(30):
        stepped, root = env.step_and_maybe_reset(env.rand_action(root))
        frames, now = stepped["next", "observation"], root["observation"]
        assert frames.is_contiguous()
        assert frames.data_ptr() != now.data_ptr()
        kept.append((frames, frames.clone(), now, now.clone()))
    for frames, before, now, then in kept:
        assert torch.equal(frames, before)
        assert torch.equal(now, then)
    assert len({int(frames.sum()) for frames, *_ in kept}) > 5, "nothing moves"
    # What the caller does with them is not seen by the envs' rows.
    last = root["observation"].clone()
    kept[-1][0].fill_(7)
    mask = torch.tensor([True, False])
    again = env.reset(TensorDict({"_reset": mask}, [2]))
    assert torch.equal(again["observation"][1], last[1])


def test_a_step_is_read_while_ended_envs_are_reset(make, monkeypatch) -> None:
    """The same data come of it as where the reset is waited for first."""

    def run() -> TensorDict:
        env = make(limit=5)
        env.set_seed(3)
        torch.manual_seed(0)
        root, data = env.reset(), []
        for _ in range(40):
            stepped, root = env.step_and_maybe_reset(env.rand_action(root))
            data.append(stepped)
        return torch.stack(data, -1)

    reads = []
    original = EnvPoolBackend.steps_done.fget
    monkeypatch.setattr(
        EnvPoolBackend, "steps_done", property(lambda self: reads.append(1) or original(self))
    )
    early = run()
    assert len(reads) == 40
    monkeypatch.setattr(EnvPoolBackend, "steps_done", None)
    late = run()
    assert early["next", "done"].any()
    for key in early.keys(True, True):
        assert torch.equal(early[key], late[key]), key


def test_threads_that_fill_the_machine_have_a_core_each(make, monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})

    def config_of(name: str, num: int, **kwargs: int) -> dict[str, int]:
        made = EnvPoolFactory(name, num, kwargs).make()
        config = dict(zip(made.spec._config_keys, made.spec._config_values, strict=True))
        made.close()
        return config

    def offset_of(name: str, num: int, **kwargs: int) -> int:
        return config_of(name, num, **kwargs)["thread_affinity_offset"]

    assert offset_of("Pong-v5", 4) == 0
    assert offset_of("Pong-v5", 2) == -1, "others may have the other cores"
    assert offset_of("Pong-v5", 4, num_threads=2) == -1
    assert offset_of("Pong-v5", 4, thread_affinity_offset=-1) == -1
    assert offset_of("CartPole-v1", 4) == -1, "one thread for cheap envs"
    # One by one, they still run at the same time.
    assert config_of("Pong-v5", 6, batch_size=1)["num_threads"] == 4
    assert config_of("Pong-v5", 3, batch_size=1)["num_threads"] == 3
    assert config_of("Pong-v5", 6, batch_size=1, num_threads=2)["num_threads"] == 2
    assert config_of("CartPole-v1", 6, batch_size=1)["num_threads"] == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert offset_of("Pong-v5", 4) == -1, "this process may not use all cores"
    assert config_of("Pong-v5", 6, batch_size=1)["num_threads"] == 2


def test_tasks_that_need_options_can_be_seeded(monkeypatch) -> None:
    import envpool

    original = envpool.make_spec

    def make_spec(task_id: str, **options):
        if "frame_skip" not in options:
            raise RuntimeError("nothing without its options")
        return original(task_id, **options)

    monkeypatch.setattr(envpool, "make_spec", make_spec)
    env = shoal.MultiThreadedEnv(2, "Pong-v5", create_env_kwargs={"frame_skip": 2, "seed": 9})
    try:
        assert env.set_seed(3) is not None
        env.reset()
        assert env.config["frame_skip"] == 2
    finally:
        env.close()
