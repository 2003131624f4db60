"""The PPO example runs from a shell as its docstring says, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.testing.leaks import find_marked

EXAMPLE = Path(__file__).parents[2] / "examples" / "ppo_cartpole.py"
HAS_MATPLOTLIB = find_spec("matplotlib") is not None


def run_example(*options: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr; fails if a process is left."""
    marker = f"{uuid.uuid4()}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        env={**os.environ, "SHOAL_TEST": marker, "COLUMNS": "100", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    until = time.monotonic() + 10  # what is on its way out may take some time to go
    while left := find_marked(f"SHOAL_TEST={marker}"):
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.01)
    return done.returncode, done.stdout, done.stderr


def test_it_trains_and_sums_up() -> None:
    exitcode, out, err = run_example("--max-steps", "3000", "--num-envs", "4", "--seed", "3")
    assert (exitcode, err) == (0, "")
    assert "mean return 475 not reached" in out
    for name in ("env-steps", "wall time", "in the collector", "in the optimiser", "env-steps/s"):
        assert name in out
    assert "4,096" in out  # whole batches


def test_it_stops_at_the_target_return() -> None:
    exitcode, out, err = run_example("--target-return", "5", "--max-steps", "50000")
    assert (exitcode, err) == (0, "")
    assert "mean return 5 reached" in out
    assert "50,000" not in out


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_it_draws(tmp_path: Path) -> None:
    path = tmp_path / "returns.png"
    exitcode, out, err = run_example("--max-steps", "3000", "--plot", str(path))
    assert (exitcode, err) == (0, "")
    assert str(path) in out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is there")
def test_without_matplotlib_it_says_so_before_it_trains(tmp_path: Path) -> None:
    exitcode, out, _ = run_example("--plot", str(tmp_path / "returns.png"))
    assert exitcode == 2
    assert "pip install 'shoal[examples]'" in out
    assert "env-steps" not in out
