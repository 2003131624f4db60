"""Recurrent policies, which write into ``next``, and collectors: TorchRL's data."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from children_cases import SEED, Case, Log, assert_plays_alike, assert_same_logs, wanted_logs
from children_envs import Counter, Walker, dressed
from children_scripts import begin
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Unbounded
from torchrl.envs import Compose, InitTracker, RewardSum, TensorDictPrimer, TransformedEnv, step_mdp
from torchrl.modules import GRUModule, LSTMModule

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector

if TYPE_CHECKING:
    from collections.abc import Callable

P = functools.partial
LENGTHS = (1, 2, 4)


def gru_policy() -> Any:
    torch.manual_seed(0)
    gru = GRUModule(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )
    return _with_head(gru)


def lstm_policy() -> Any:
    torch.manual_seed(0)
    lstm = LSTMModule(
        input_size=3,
        hidden_size=4,
        in_keys=["observation", "hidden_h", "hidden_c", "is_init"],
        out_keys=["features", ("next", "hidden_h"), ("next", "hidden_c")],
    )
    return _with_head(lstm)


def _with_head(recurrent: Any) -> Any:
    head = TensorDictModule(torch.nn.Linear(4, 2), in_keys=["features"], out_keys=["action"])
    return TensorDictSequential(recurrent, head).requires_grad_(requires_grad=False)


def outside(env: Any) -> Any:
    primer = TensorDictPrimer(recurrent_state=Unbounded((1, 4)), expand_specs=True)
    return TransformedEnv(env, Compose(InitTracker(), primer, RewardSum()))


CASES: dict[str, tuple[Case, Callable[[], Any]]] = {
    "gru, primed inside": (
        Case([P(dressed, P(Counter, n), "gru") for n in LENGTHS]),
        gru_policy,
    ),
    "lstm, primed inside": (
        Case([P(dressed, P(Counter, n), "lstm") for n in LENGTHS]),
        lstm_policy,
    ),
    "gru, primed outside": (Case([P(Counter, n) for n in LENGTHS], wrap=outside), gru_policy),
    "gru, in lazy stacks": (
        Case([P(dressed, P(Counter, n), "gru") for n in LENGTHS], {"share_individual_td": True}),
        gru_policy,
    ),
}


def recur(make_policy: Callable[[], Any]) -> Callable[[Any, Log], None]:
    def with_memory(env: Any, log: Log) -> None:
        policy = make_policy()
        begin(env, log)
        log.add("nonstop", env.rollout(25, policy, break_when_any_done=False))
        log.add("any", env.rollout(9, policy))
        root = env.reset()
        for t in range(12):
            td, root = env.step_and_maybe_reset(policy(root))
            log.add(f"td {t}", td)
            log.add(f"root {t}", root)
        root = env.reset()
        for t in range(5):
            td = env.step(policy(root))
            log.add(f"step {t}", td)
            root = env.maybe_reset(step_mdp(td))
            log.add(f"root {t}", root)

    return with_memory


@pytest.fixture(scope="module")
def wanted(request: Any) -> tuple[Case, dict[Any, Any]]:
    case, make_policy = CASES[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case, wanted_logs(case, [recur(make_policy)])


@pytest.mark.parametrize("wanted", CASES, indirect=True)
@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_recurrent_policies(wanted: Any, way: str) -> None:
    case, logs = wanted
    assert_plays_alike(case.ours(way), logs)


# --- collectors ------------------------------------------------------------------------


def linear_policy() -> Any:
    torch.manual_seed(0)
    layer = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
    return layer.requires_grad_(requires_grad=False)


def walking_policy() -> Any:
    torch.manual_seed(0)
    layer = TensorDictModule(torch.nn.Linear(2, 2), in_keys=["position"], out_keys=["action"])
    return layer.requires_grad_(requires_grad=False)


COLLECTED: dict[str, tuple[Case, Callable[[], Any], dict[str, Any]]] = {
    "bare": (Case([P(Counter, n) for n in LENGTHS]), linear_policy, {}),
    "random": (Case([P(Counter, n) for n in LENGTHS]), lambda: None, {}),
    "stateless": (Case(P(Walker, 3)), walking_policy, {}),
    "short": (Case(P(Counter, 9)), linear_policy, {"max_frames_per_traj": 4}),
    "again and again": (
        Case([P(Counter, n) for n in LENGTHS]),
        linear_policy,
        {"reset_at_each_iter": True},
    ),
    "dressed": (Case([P(dressed, P(Counter, n), "usual") for n in LENGTHS]), linear_policy, {}),
    "recurrent": (
        Case([P(dressed, P(Counter, n), "gru") for n in LENGTHS]),
        gru_policy,
        {"auto_register_policy_transforms": False},
    ),
    "recurrent, primed outside": (
        Case([P(Counter, n) for n in LENGTHS], wrap=outside),
        gru_policy,
        {"auto_register_policy_transforms": False},
    ),
}


def collect(env: Any, make_policy: Callable[[], Any], options: dict[str, Any]) -> Log:
    log = Log()
    policy = make_policy()
    torch.manual_seed(SEED)
    env.set_seed(SEED)  # before the collector resets it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = Collector(env, policy=policy, frames_per_batch=36, total_frames=72, **options)
    try:
        for data in collector:
            log.add("batch", data)
    finally:
        collector.shutdown()
    assert len(log.entries) == 2
    assert env.is_closed
    return log


@pytest.fixture(scope="module")
def collected(request: Any) -> tuple[Any, Log]:
    case, make_policy, options = COLLECTED[request.param]
    return COLLECTED[request.param], collect(case.oracle(), make_policy, options).let_go()


@pytest.mark.parametrize("collected", COLLECTED, indirect=True)
@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_collectors(collected: Any, way: str) -> None:
    (case, make_policy, options), wanted = collected
    assert_same_logs(collect(case.ours(way), make_policy, options), wanted)
