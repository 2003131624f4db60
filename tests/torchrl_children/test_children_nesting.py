"""Batched envs in batched envs, shoal's and TorchRL's in all orders: the same data."""

from __future__ import annotations

import functools
import multiprocessing
import warnings
from typing import Any

import pytest
from children_cases import Case, assert_plays_alike, wanted_logs
from children_envs import Counter, Walker, dressed
from children_scripts import (
    masked_resets,
    masked_steps,
    nobody_resets,
    rollouts,
    specs,
    steps,
    steps_and_resets,
)
from torchrl.envs import ParallelEnv as TorchRLParallelEnv
from torchrl.envs import SerialEnv as TorchRLSerialEnv

from shoal.torchrl import ParallelEnv, SerialEnv

P = functools.partial
Ours = P(ParallelEnv, mp_start_method="fork", num_processes=2)

SCRIPTS = (
    steps,
    steps_and_resets,
    masked_resets,
    nobody_resets,
    masked_steps,
    rollouts,
    specs,
)
CHILDREN: dict[str, Any] = {
    "counters": [P(Counter, 2), P(Counter, 3)],
    "dressed": [P(dressed, P(Counter, 2), "usual"), P(dressed, P(Counter, 3), "usual")],
    "walkers": [P(Walker, 2), P(Walker, 3)],
}
# Seeds go to the children of the children; each kind of batch hands them on alike.
NESTS: dict[str, tuple[Any, Any]] = {
    "serial in serial": (SerialEnv, SerialEnv),
    "parallel in serial": (SerialEnv, Ours),
    "serial in parallel": (Ours, SerialEnv),
    "parallel in parallel": (Ours, Ours),
    "torchrl's in serial": (SerialEnv, TorchRLSerialEnv),
    "torchrl's in parallel": (Ours, TorchRLSerialEnv),
    "serial in torchrl's": (TorchRLSerialEnv, SerialEnv),
    "parallel in torchrl's": (TorchRLSerialEnv, Ours),
}


@pytest.fixture(scope="module")
def wanted(request: Any) -> tuple[Any, dict[Any, Any]]:
    children = CHILDREN[request.param]
    case = Case(P(TorchRLSerialEnv, 2, children), {"num_envs": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return children, wanted_logs(case, SCRIPTS)


@pytest.mark.parametrize("wanted", CHILDREN, indirect=True)
@pytest.mark.parametrize("nest", NESTS)
def test_nests(wanted: Any, nest: str) -> None:
    children, logs = wanted
    outer, inner = NESTS[nest]
    assert_plays_alike(outer(2, P(inner, 2, children)), logs)


@pytest.fixture(scope="module")
def _heap() -> None:
    # TorchRL's flags lie on a heap that multiprocessing keeps for good once it is there.
    multiprocessing.RawArray("b", 8)


@pytest.mark.usefixtures("_heap")
def test_processes_of_torchrl_in_ours() -> None:
    children = CHILDREN["counters"]
    scripts = (steps_and_resets, masked_resets)
    wanted = wanted_logs(Case(P(TorchRLSerialEnv, 2, children), {"num_envs": 2}), scripts)
    env = SerialEnv(2, P(TorchRLParallelEnv, 2, children, mp_start_method="fork"))
    assert_plays_alike(env, wanted)
