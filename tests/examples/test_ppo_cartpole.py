"""The PPO example runs from a shell as its docstring says, and leaves nothing behind."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from running import run

if TYPE_CHECKING:
    from pathlib import Path

run_example = partial(run, "ppo_cartpole.py")
HAS_MATPLOTLIB = find_spec("matplotlib") is not None


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
