"""Transforms in the children, around the batch, and both: TorchRL's data, over many ends."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from children_cases import Case, Log, assert_plays_alike, wanted_logs
from children_envs import Counter, Teams, dressed
from children_scripts import (
    begin,
    masked_resets,
    masked_steps,
    nobody_resets,
    past_the_end,
    rollouts,
    specs,
    steps,
    steps_and_resets,
    waits,
)
from torchrl.envs import (
    CatFrames,
    Compose,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TransformedEnv,
)
from torchrl.envs.transforms import FrameSkipTransform

P = functools.partial


def around(*transforms: Any) -> Any:
    def wrap(env: Any) -> Any:
        return TransformedEnv(env, Compose(*[transform() for transform in transforms]))

    return wrap


def normed() -> Any:
    return ObservationNorm(loc=1.5, scale=0.5, in_keys=["observation"])


def frames() -> Any:
    return CatFrames(N=3, dim=-1, in_keys=["observation"])


COUNTERS = [P(Counter, length) for length in (1, 2, 3)]
BOTH = [StepCounter, RewardSum, InitTracker]

# Rollouts in which ended rows wait are too much for TorchRL's serial env below these.
ALL_DONE = ("waits", "all_ends")

CASES: dict[str, Case] = {
    "inside": Case([P(dressed, maker, "usual") for maker in COUNTERS]),
    "inside, in doubles": Case(
        [P(dressed, P(Counter, n, dtype=torch.float64), "doubles") for n in (1, 2, 4)]
    ),
    "inside, frames": Case([P(dressed, maker, "frames") for maker in COUNTERS]),
    "inside, primed": Case([P(dressed, maker, "primed") for maker in COUNTERS]),
    "inside, short": Case([P(dressed, maker, "short") for maker in COUNTERS]),
    "inside a batch": Case(
        [P(dressed, P(Counter, n, batch_size=(2,)), "usual") for n in (1, 3)], without=ALL_DONE
    ),
    "outside": Case(COUNTERS, wrap=around(*BOTH)),
    "outside, frames": Case(COUNTERS, wrap=around(StepCounter, frames, normed), without=ALL_DONE),
    "outside, short": Case(COUNTERS, wrap=around(P(StepCounter, max_steps=2), RewardSum)),
    "outside, rewards": Case(COUNTERS, wrap=around(P(RewardScaling, loc=1.0, scale=2.0))),
    "outside, frame skip": Case(COUNTERS, wrap=around(P(FrameSkipTransform, 2), RewardSum)),
    "outside teams": Case(
        [P(Teams, n, root_done=True) for n in (1, 2, 4)], wrap=around(StepCounter), without=ALL_DONE
    ),
    "both": Case(
        [P(dressed, maker, "usual") for maker in COUNTERS],
        wrap=around(InitTracker, frames),
        without=ALL_DONE,
    ),
    "both, on cpu": Case(
        P(dressed, P(Counter, 2, device="cpu"), "frames"), wrap=around(StepCounter, RewardSum)
    ),
}


def many_ends(env: Any, log: Log) -> None:
    """More than thirty of them, so that resets are prepared; then what may disturb that."""
    begin(env, log)
    ends = 0
    for _ in range(2):
        data = log.add("nonstop", env.rollout(70, break_when_any_done=False))
        ends += int(data["next"].get("done", data["next"].get(("data", "done"), None)).sum())
    assert ends > 60
    root = env.reset()
    for t in range(12):
        td, root = env.step_and_maybe_reset(env.rand_action(root))
        log.add(f"td {t}", td)
        log.add(f"root {t}", root)
    log.add("any", env.rollout(9))
    log.add("nonstop again", env.rollout(30, break_when_any_done=False))
    log.add("a seed", env.set_seed(11))
    torch.manual_seed(11)
    log.add("nonstop after a seed", env.rollout(30, break_when_any_done=False))


def all_ends(env: Any, log: Log) -> None:
    """Ended rows wait for the others, with resets prepared."""
    begin(env, log)
    env.rollout(70, break_when_any_done=False)
    for _ in range(3):
        log.add("all", env.rollout(30, break_when_all_done=True))
        log.add("nonstop", env.rollout(20, break_when_any_done=False))


INSIDE = (past_the_end, steps_and_resets, masked_resets, masked_steps, rollouts, waits, specs)
OUTSIDE = (
    past_the_end,
    steps,
    steps_and_resets,
    masked_resets,
    nobody_resets,
    rollouts,
    waits,
    specs,
)


def scripts_of(name: str) -> list[Any]:
    case = CASES[name]
    first = INSIDE if case.wrap is None else OUTSIDE
    return [s for s in (*first, many_ends, all_ends) if s.__name__ not in case.without]


@pytest.fixture(scope="module")
def wanted(request: Any) -> tuple[Case, dict[Any, Any]]:
    case = CASES[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case, wanted_logs(case, scripts_of(request.param))


@pytest.mark.parametrize("wanted", CASES, indirect=True)
@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_same_data(way: str, wanted: Any) -> None:
    case, logs = wanted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = case.ours(way)
    assert_plays_alike(env, logs)
