"""TorchRL's collector over the batched envs, and what it asks of them."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from batched_cases import SEED, Log, assert_same, open_env, open_reference
from scripted_envs import CountingEnv
from tensordict.nn import TensorDictModule
from torchrl.envs import Compose, InitTracker, RewardSum, StepCounter, TransformedEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector

if TYPE_CHECKING:
    from collections.abc import Callable

N = 3
WAYS = ["serial", "2 processes", "caller steps"]


def policy() -> Any:
    return TensorDictModule(
        lambda observation: (observation.sum(-1) > 0).long(), ["observation"], ["action"]
    )


def bare(env: Any) -> Any:
    return env


def transformed(env: Any) -> Any:
    return TransformedEnv(env, Compose(RewardSum(), StepCounter(), InitTracker()))


FORMS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "bare": (bare, {}),
    "random": (bare, {"policy": None}),
    "short trajectories": (bare, {"max_frames_per_traj": 7}),
    "reset at each batch": (bare, {"reset_at_each_iter": True}),
    "transformed": (transformed, {}),
    "split": (transformed, {"split_trajs": True}),
}


def collect(env: Any, wrap: Callable[[Any], Any], options: dict[str, Any]) -> Log:
    log = Log()
    torch.manual_seed(SEED)
    env.set_seed(SEED)  # before the collector resets it
    options = {"policy": policy(), "frames_per_batch": 20 * N, "total_frames": 60 * N, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = Collector(wrap(env), **options)
    try:
        for data in collector:
            log.add("batch", data.clone() if options.get("split_trajs") else data)
        assert env.is_closed
    finally:
        collector.shutdown()
    assert env.is_closed
    return log


@pytest.fixture(scope="module")
def reference(request: Any) -> tuple[Any, Log]:
    form = FORMS[request.param]
    log = collect(open_reference(N, "CartPole-v1"), *form)
    log.entries = [(what, None, copied) for what, _, copied in log.entries]
    return form, log


@pytest.mark.parametrize("reference", FORMS, indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_collectors_get_the_same_data(way: str, reference: Any) -> None:
    form, wanted = reference
    log = collect(open_env(way, N, "CartPole-v1"), *form)
    for i, (what, _, copied) in enumerate(log.entries):
        assert_same(copied, wanted.entries[i][2], what)
    assert len(log.entries) == len(wanted.entries)


@pytest.mark.parametrize("way", WAYS)
def test_a_collector_may_make_the_env_itself(way: str) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(open_env(way, N, functools.partial(CountingEnv, length=4)))
        return made[-1]

    collector = Collector(make, None, frames_per_batch=6 * N, total_frames=12 * N)
    batches = list(collector)
    collector.shutdown()
    assert [tuple(batch.shape) for batch in batches] == [(N, 6)] * 2
    counts = torch.cat([batch["next", "observation"] for batch in batches], 1)[0, :, 0] % 100
    assert counts.tolist() == [1, 2, 3, 4] * 3
    assert made[0].is_closed


def test_a_collector_may_change_the_kwargs() -> None:
    env = open_env("2 processes", N, functools.partial(CountingEnv, length=10**6))
    options: dict[str, Any] = {"create_env_kwargs": {"start": 300}}
    collector = Collector(env, None, frames_per_batch=2 * N, total_frames=2 * N, **options)
    (batch,) = list(collector)
    collector.shutdown()
    assert batch["observation"].squeeze(-1)[:, 0].tolist() == [400] * N


@pytest.mark.parametrize("way", WAYS)
def test_hooks_after_step_mdp_are_called(way: str) -> None:
    """By all three: the single step, rollouts, and below a transform."""
    calls = []

    def hook(td: Any, root: Any) -> Any:
        calls.append(td["next", "observation"].clone())
        return td, root.set("hooked", torch.ones(N))

    with open_env(way, N, functools.partial(CountingEnv, length=3)) as env:
        env._post_step_mdp_hooks = hook
        td = env.rand_action(env.reset())
        _, root = env.step_and_maybe_reset(td)
        assert len(calls) == 1
        assert root["hooked"].tolist() == [1.0] * N
        env.rollout(4, break_when_any_done=False)
        assert len(calls) == 4  # not after the last step


def test_a_compiled_step_is_used() -> None:
    with open_env("serial", N, functools.partial(CountingEnv, length=3)) as env:
        td = env.rand_action(env.reset())
        plain = env.step_and_maybe_reset
        env.__dict__["_compiled_step_and_maybe_reset"] = lambda td: ("compiled", td)
        assert plain(td) == ("compiled", td)
        del env.__dict__["_compiled_step_and_maybe_reset"]
        assert plain(td)[0] is td
