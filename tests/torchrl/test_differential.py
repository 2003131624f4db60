"""The same data as TorchRL's own serial env, bit for bit, whatever is called."""

from __future__ import annotations

import warnings
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
from tensordict import TensorDict
from torchrl.data import NonTensor
from torchrl.envs import (
    Compose,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
    step_mdp,
)
from torchrl.envs.libs.gym import _conversion_registry, register_gym_spec_conversion
from torchrl.envs.transforms import FrameSkipTransform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N = 3

# Short episodes, so that a few steps see several ends.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole": ("CartPole-v1", {}),
    "cartpole one-hot": ("CartPole-v1", {"categorical_action_encoding": False}),
    "pendulum": ("Pendulum-v1", {"max_episode_steps": 9}),
    "pong": ("ALE/Pong-v5", {"max_episode_steps": 9}),
    "hopper": ("Hopper-v5", {}),
    "taxi": ("Taxi-v4", {"max_episode_steps": 9}),
    "taxi one-hot": ("Taxi-v4", {"max_episode_steps": 9, "categorical_action_encoding": False}),
    "minigrid": ("MiniGrid-Empty-5x5-v0", {"max_steps": 7}),
}


@pytest.fixture(autouse=True, scope="module")
def _mission_spaces() -> Iterator[None]:
    import minigrid  # noqa: F401
    from minigrid.core.mission import MissionSpace

    register_gym_spec_conversion(MissionSpace)(
        lambda spec, **kwargs: NonTensor((), example_data="a mission")
    )
    yield
    _conversion_registry.pop(MissionSpace)


# --- what is done with the envs ------------------------------------------------------


def steps(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    td = log.add("reset", env.reset())
    for t in range(40):
        td = env.step(env.rand_action(td))
        log.add(f"step {t}", td)
        td = step_mdp(td)
        td = log.add(f"maybe reset {t}", env.maybe_reset(td))
    log.add("rand_step", env.rand_step(td))
    log.add("rand_step of nothing", env.rand_step().clear_device_())


def steps_and_resets(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    root = log.add("reset", env.reset())
    for t in range(40):
        root = env.rand_action(root)
        if t == 5:
            root["more"] = torch.arange(N)
        td, root = env.step_and_maybe_reset(root)
        log.add(f"td {t}", td)
        log.add(f"root {t}", root)


def nonstop_rollouts(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    log.add("first", env.rollout(30, break_when_any_done=False))
    log.add("of one step", env.rollout(1, break_when_any_done=False))
    data = log.add("truncated", env.rollout(7, break_when_any_done=False, set_truncated=True))
    root = step_mdp(data[:, -1])
    data = env.rollout(9, break_when_any_done=False, auto_reset=False, tensordict=root)
    log.add("gone on", data)
    root = env.reset()
    data = env.rollout(9, break_when_any_done=False, auto_reset=False, tensordict=root)
    log.add("gone on from a reset", data)
    root = step_mdp(data[:, -1], exclude_action=True)
    data = env.rollout(9, break_when_any_done=False, auto_reset=False, tensordict=root)
    log.add("gone on without an action", data)
    log.add("lazy", env.rollout(5, break_when_any_done=False, return_contiguous=False).contiguous())
    out = env.rollout(5, break_when_any_done=False).apply(torch.zeros_like)
    assert env.rollout(5, break_when_any_done=False, out=out) is out
    log.add("out", out)


def breaking_rollouts(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    log.add("any", env.rollout(60))
    log.add("any, said", env.rollout(60, break_when_any_done=True, set_truncated=True))
    log.add("all", env.rollout(60, break_when_all_done=True))
    log.add("all, again", env.rollout(60, break_when_any_done=False, break_when_all_done=True))
    log.add("neither", env.rollout(9, break_when_any_done=False, break_when_all_done=False))
    log.add("any, lazy", env.rollout(60, return_contiguous=False).contiguous())
    log.add("cast", env.rollout(5, auto_cast_to_device=True))


def transformed(env: Any, log: Log) -> None:
    env = TransformedEnv(env, Compose(RewardSum(), StepCounter(), InitTracker()))
    log.add("seed", env.set_seed(SEED))
    log.add("nonstop", env.rollout(60, break_when_any_done=False))
    log.add("any", env.rollout(60))
    log.add("all", env.rollout(60, break_when_all_done=True))
    root = env.reset()
    for t in range(40):
        td, root = env.step_and_maybe_reset(env.rand_action(root))
        log.add(f"td {t}", td)
        log.add(f"root {t}", root)
    mask = torch.tensor([[True], [False], [True]])
    log.add("mask", env.reset(root.clone().set("_reset", mask)))
    env.transform.to("cpu")


def frames_skipped(env: Any, log: Log) -> None:
    env = TransformedEnv(env, FrameSkipTransform(4))
    log.add("seed", env.set_seed(SEED))
    log.add("nonstop", env.rollout(40, break_when_any_done=False))
    log.add("again", env.rollout(20, break_when_any_done=False))


def masked_resets(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    root = env.reset()
    for t in range(9):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        mask = torch.tensor([[t % 2 == 0], [t % 3 == 0], [False]])
        given = root.clone().set("_reset", mask)
        root = env.reset(given)
        assert root is given
        log.add(f"reset {t}", root)
        mask.fill_(True)
    for _ in range(3):
        td = env.step(env.rand_action(root))
        log.add("step", td)
        root = step_mdp(td)
    root["_reset"] = torch.zeros(N, 1, dtype=torch.bool)
    log.add("nobody", env.reset(root))
    root["_reset"] = torch.ones(N, 1, dtype=torch.bool)
    log.add("everybody", env.reset(root))


def seeded_resets(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    log.add("reset", env.reset())
    log.add("with a seed", env.reset(seed=3))
    log.add("goes on", env.reset())
    log.add("rollout", env.rollout(30, break_when_any_done=False))
    listed = [{"seed": i} for i in range(N)]
    log.add("a list", env.reset(list_of_kwargs=listed))
    assert listed == [{"seed": i} for i in range(N)]
    log.add("static", env.set_seed(4, static_seed=True))
    log.add("reset", env.reset())
    root = log.add("seed after steps", env.step_and_maybe_reset(env.rand_action(env.reset()))[1])
    log.add("seed after steps", env.set_seed(SEED + 1))
    log.add("goes on", env.step_and_maybe_reset(env.rand_action(root))[1])
    root = env.reset().set("_reset", torch.tensor([[True], [False], [True]]))
    log.add("mask and seed", env.reset(root, seed=11))
    log.add("rollout", env.rollout(12, break_when_any_done=False))
    log.add("plain again", env.rollout(12))


def on_past_the_end(env: Any, log: Log) -> None:
    log.add("seed", env.set_seed(SEED))
    root = env.reset()
    for _ in range(50):
        root = step_mdp(env.step(env.rand_action(root)))
        log.add("step", root)
    log.add("reset", env.reset())


def bare_halves(env: Any, log: Log) -> None:
    """What a transform calls, for many ends, then everything that may disturb it."""
    log.add("seed", env.set_seed(SEED))
    root = env.reset()

    def go_on(root: Any, num_ends: int) -> Any:
        while num_ends:
            action = env.rand_action(root)
            td = log.add("_step", env._step(action))
            done = td["done"]
            root = td.exclude("reward")
            if done.any():
                num_ends -= 1
                fresh = env._reset(TensorDict({"_reset": done.clone()}, [N]))
                # TorchRL returns outdated rows outside the mask; nobody uses them.
                root = log.add("_reset", torch.where(done.squeeze(-1), fresh, root))
        return root

    root = go_on(root, 14)
    log.add("a plain reset", env.reset())
    root = go_on(root, 4)
    log.add("step and reset", env.step_and_maybe_reset(env.rand_action(root))[1])
    root = go_on(root, 10)
    log.add("a seed", env.set_seed(5))
    root = go_on(env.reset(), 10)
    log.add("rollout", env.rollout(20))
    root = go_on(env.reset(), 10)
    log.add("a reset with a seed", env.reset(seed=8))
    root = go_on(root, 10)


def rows_that_wait_for_others(env: Any, log: Log) -> None:
    """Resets are prepared by now; an ended row waits for its own while others step on."""
    env = TransformedEnv(env, StepCounter())
    log.add("seed", env.set_seed(SEED))
    log.add("transformed", env.rollout(200, break_when_any_done=False)[:, ::10])
    for _ in range(3):
        log.add("all", env.rollout(60, break_when_all_done=True))
        log.add("nonstop", env.rollout(60, break_when_any_done=False))
    log.add("seeded at an end", env.reset(seed=3))
    log.add("goes on", env.rollout(20))


EVERYTHING: tuple[Callable[[Any, Log], None], ...] = (
    steps,
    steps_and_resets,
    nonstop_rollouts,
    breaking_rollouts,
    transformed,
    frames_skipped,
    masked_resets,
    seeded_resets,
    on_past_the_end,
    bare_halves,
    rows_that_wait_for_others,
)


@pytest.fixture(scope="module")
def reference(request: Any) -> tuple[str, Any, Log]:
    case, script = request.param
    env_id, kwargs = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case, script, play_reference(open_reference(N, env_id, **kwargs), script)


def ours(way: str, case: str, **options: Any) -> Any:
    env_id, kwargs = CASES[case]
    kwargs = dict(kwargs)
    categorical = kwargs.pop("categorical_action_encoding", True)
    return open_env(
        way,
        N,
        env_id,
        create_env_kwargs=kwargs,
        categorical_action_encoding=categorical,
        **options,
    )


def name_of(pair: tuple[str, Any]) -> str:
    return f"{pair[0]} {pair[1].__name__}"


ON_CARTPOLE = [("cartpole", script) for script in EVERYTHING]
ON_OTHERS = [
    *((case, steps_and_resets) for case in CASES if case != "cartpole"),
    *((case, nonstop_rollouts) for case in ("pendulum", "pong", "hopper", "minigrid", "taxi")),
    *((case, breaking_rollouts) for case in ("pendulum", "minigrid", "taxi one-hot")),
    *((case, transformed) for case in ("pendulum", "minigrid", "cartpole one-hot")),
]


@pytest.mark.parametrize("reference", ON_CARTPOLE, ids=name_of, indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_cartpole(way: str, reference: Any) -> None:
    case, script, wanted = reference
    assert_same_logs(play(ours(way, case), script), wanted)


@pytest.mark.parametrize("reference", [("cartpole", bare_halves)], ids=name_of, indirect=True)
def test_one_process(reference: Any) -> None:
    case, script, wanted = reference
    assert_same_logs(play(ours("1 process", case), script), wanted)


@pytest.mark.parametrize("reference", ON_OTHERS, ids=name_of, indirect=True)
@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_all_kinds_of_envs(way: str, reference: Any) -> None:
    case, script, wanted = reference
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = ours(way, case)
    assert_same_logs(play(env, script), wanted)
