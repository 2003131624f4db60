"""Opening and closing batched envs changes nothing for the rest of the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from batched_cases import WAYS, open_env

CODE = """
import os, random, signal, sys, threading, warnings
import numpy, torch, torchrl, gymnasium
from torchrl.envs import GymEnv

def look():
    return (
        torch.get_num_threads(), torch.get_num_interop_threads(), list(warnings.filters),
        dict(os.environ), {s: signal.getsignal(s) for s in signal.valid_signals()},
        random.getstate(), torch.get_rng_state().tolist(), torch.get_default_dtype(),
        sys.path[:], os.getcwd(), sys.stdout, sys.excepthook, threading.excepthook,
        torch.is_grad_enabled(), sys.flags, numpy.geterr(),
    )

before = look()
import shoal, shoal.torchrl
assert look() == before, "import"
env = shoal.ParallelEnv(2, "CartPole-v1") if hasattr(shoal, "ParallelEnv") else (
    shoal.torchrl.ParallelEnv(2, "CartPole-v1"))
assert look() == before, "construction"
env.reset()
assert look() == before, "start"
env.close()
assert look() == before, "close"
"""


def look() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "filters": list(warnings.filters),
        "environ": dict(os.environ),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "random": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
        "grad": torch.is_grad_enabled(),
        "path": list(sys.path),
    }


def assert_unchanged(before: dict[str, Any]) -> None:
    now = look()
    assert {key: now[key] for key in now if now[key] != before[key]} == {}


@pytest.mark.parametrize("way", WAYS)
def test_life_leaves_no_trace(way: str) -> None:
    before = look()
    env = open_env(way, 2, "CartPole-v1")
    assert_unchanged(before)
    env.reset()
    assert_unchanged(before)
    env.set_seed(3)
    assert_unchanged(before)
    td, _ = env.step_and_maybe_reset(env.reset().set("action", torch.ones(2, dtype=torch.int64)))
    assert_unchanged(before)
    env.rollout(3, lambda td: td.set("action", torch.ones(2, dtype=torch.int64)))
    env.close()
    assert_unchanged(before)
    del td


@pytest.mark.slow
def test_importing_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
