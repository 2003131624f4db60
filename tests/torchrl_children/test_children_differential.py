"""The same data as TorchRL's own serial env over the same children, whatever is called."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from children_cases import Case, assert_plays_alike, wanted_logs
from children_envs import (
    Counter,
    Half,
    Teams,
    Walker,
    Words,
    make_cheetah,
    make_dict_game,
    make_minigrid,
    make_rps,
)
from children_scripts import (
    ALL,
    attributes,
    lazy_rollouts,
    reset_arguments,
)
from torchrl.envs import EnvCreator, GymEnv
from torchrl.envs.libs.gym import _conversion_registry
from torchrl.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

P = functools.partial

# What TorchRL's own serial env cannot do.
NEEDS_A_ROOT = ("only_actions",)  # it does not remember what stateless children returned
NEEDS_DONE = ("halves", "waits")  # it finds no flags at the root
NEEDS_A_BATCH = ("masked_steps", "masked_steps_and_resets", "rollouts", "waits", "halves", "specs")
NEEDS_WHOLE_WORKERS = ("waits",)
NEVER_ENDS = ("halves", "waits")
# What is left out of variants of others, and of children that take their time.
BRIEFLY = ("steps", "past_the_end", "only_actions", "nobody_resets", "seeds", "halves")
HEAVY = ("steps", "past_the_end", "only_actions", "nobody_resets", "masked_steps", "seeds", "waits")

CASES: dict[str, Case] = {
    "cartpole": Case(P(GymEnv, "CartPole-v1", categorical_action_encoding=True), without=BRIEFLY),
    "cartpole one-hot": Case(P(GymEnv, "CartPole-v1")),
    "pendulum on cpu": Case(
        P(GymEnv, "Pendulum-v1", device="cpu", max_episode_steps=5), without=BRIEFLY
    ),
    "frame skip": Case(P(GymEnv, "CartPole-v1", frame_skip=4), without=BRIEFLY),
    "dict observations": Case(make_dict_game),
    "info reader": Case(P(make_dict_game, with_infos=True)),
    "minigrid": Case(make_minigrid, without=HEAVY),
    "cheetah": Case(make_cheetah, without=(*HEAVY, "halves")),
    "rock, paper, scissors": Case(
        make_rps, without=(*NEEDS_DONE, "past_the_end", "only_actions", "masked_steps")
    ),
    "counter": Case([P(Counter, length) for length in (2, 3, 5)]),
    "counter from kwargs": Case(
        Counter, {"create_env_kwargs": [{"length": length} for length in (4, 2, 3)]}, BRIEFLY
    ),
    "counter on cpu": Case(P(Counter, device="cpu"), without=BRIEFLY),
    "counter to cpu": Case(P(Counter, 2), {"device": "cpu"}, BRIEFLY),
    "counter, lazily": Case(P(Counter, 2), {"share_individual_td": True}),
    # Entries that the env does not return are kept in rows that were reset, not zeroed.
    "counter without buffers": Case(
        P(Counter, 2),
        {"use_buffers": False},
        (*BRIEFLY, "masked_steps_and_resets", "reset_arguments"),
    ),
    "batched counter": Case(
        [P(Counter, length, batch_size=(4,)) for length in (2, 3, 5)], without=NEEDS_WHOLE_WORKERS
    ),
    "batched twice": Case(P(Counter, batch_size=(2, 3)), without=(*BRIEFLY, *NEEDS_WHOLE_WORKERS)),
    "made by a creator": Case(EnvCreator(P(Counter, 3)), without=BRIEFLY),
    # It forgets entries of idle rows, and of given ones, that not all rows have.
    "unlike keys": Case(
        [P(Counter, 2), P(Counter, 3, key="other"), P(Counter, 2, key="third", size=1)],
        without=("masked_steps", "masked_steps_and_resets", "waits", "only_actions"),
    ),
    "unlike shapes": Case(
        [P(Counter, 2), P(Counter, 3, size=2), P(Counter, 2, size=1)], without=NEEDS_A_BATCH
    ),
    "no state": Case(P(Walker, 3), without=NEEDS_A_ROOT),
    "no state, batched": Case(P(Walker, batch_size=(2,)), without=(*BRIEFLY, *NEEDS_WHOLE_WORKERS)),
    "no state, unlocked": Case(P(Walker, batch_locked=False), without=NEEDS_A_ROOT),
    "counting": Case([P(CountingEnv, max_steps=n) for n in (1, 2, 3)]),
    "counting, batched": Case(
        P(CountingBatchedEnv, max_steps=torch.tensor([1, 2]), batch_size=[2]),
        without=NEEDS_WHOLE_WORKERS,
    ),
    "nested": Case([P(NestedCountingEnv, max_steps=n) for n in (1, 2, 3)], without=NEEDS_DONE),
    "nested, done at the root": Case(
        P(NestedCountingEnv, max_steps=1, has_root_done=True), without=(*BRIEFLY, *NEEDS_DONE)
    ),
    "nested, batched": Case(
        P(NestedCountingEnv, max_steps=1, batch_size=[2]), without=(*BRIEFLY, *NEEDS_DONE)
    ),
    "teams": Case([P(Teams, length) for length in (1, 2, 4)], without=NEEDS_DONE),
    "teams with done": Case(
        [P(Teams, length, root_done=True) for length in (1, 2, 4)], without=NEEDS_DONE
    ),
    "many keys": Case(
        [P(MultiKeyCountingEnv, max_steps=n) for n in (1, 2, 4)], without=(*HEAVY, *NEEDS_DONE)
    ),
    "unlike agents": Case(
        [P(HeterogeneousCountingEnv, max_steps=n) for n in (1, 2, 4)],
        without=(*HEAVY, *NEEDS_A_BATCH),
    ),
    "words": Case(
        [P(Words, name, length) for name, length in (("a", 2), ("b", 3), ("c", 5))],
        without=("masked_steps",),  # it mixes devices in the text that idle rows repeat
    ),
    "words and numbers": Case(P(Words, text_action=False), without=BRIEFLY),
    "metadata": Case(EnvWithMetadata, without=(*NEEDS_A_ROOT, *NEVER_ENDS)),
    "growing": Case([P(EnvWithDynamicSpec, n) for n in (2, 3, 5)], without=NEEDS_A_BATCH),
    "growing alike": Case(
        P(EnvWithDynamicSpec, 3), without=("masked_steps", "masked_steps_and_resets")
    ),
    "half": Case(Half),
    "half, lazily": Case(Half, {"share_individual_td": True}, BRIEFLY),
}

# Scripts that are for some children only.
MORE: dict[str, tuple[Any, ...]] = {
    name: (reset_arguments, attributes) for name in CASES if "counter" in name
}
for _name in ("unlike keys", "unlike shapes", "unlike agents", "growing"):
    MORE[_name] = (lazy_rollouts,)


def scripts_of(name: str) -> list[Any]:
    return [s for s in (*ALL, *MORE.get(name, ())) if s.__name__ not in CASES[name].without]


@pytest.fixture(autouse=True, scope="module")
def _mission_spaces() -> Iterator[None]:
    yield
    wanted_of.cache_clear()
    from minigrid.core.mission import MissionSpace

    _conversion_registry.pop(MissionSpace, None)


@functools.cache
def wanted_of(name: str) -> dict[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wanted_logs(CASES[name], scripts_of(name))


@pytest.fixture(scope="module")
def wanted(request: Any) -> tuple[Case, dict[Any, Any]]:
    # Before the test, whose leak check would see what TorchRL's env has not let go of yet.
    return CASES[request.param], wanted_of(request.param)


# Two processes, one of which has two envs, are enough for the others.
IN_ALL_WAYS = {"counter", "batched counter", "cartpole one-hot", "teams", "words", "growing"}
PARAMETERS = [
    (name, way)
    for name in CASES
    for way in ("serial", "2 processes", "one each", "1 process", "a fresh interpreter")
    if way in ("serial", "2 processes")
    or (name in IN_ALL_WAYS and (way != "a fresh interpreter" or name in ("teams", "words")))
]


@pytest.mark.parametrize(("wanted", "way"), PARAMETERS, indirect=["wanted"])
def test_same_data(wanted: Any, way: str) -> None:
    case, logs = wanted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = case.ours(way)
    assert_plays_alike(env, logs)
