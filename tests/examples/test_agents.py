"""The example of agents solves its tasks, and lets the agents wait side by side."""

from __future__ import annotations

import re

from running import run


def test_all_agents_solve_their_tasks_side_by_side() -> None:
    exitcode, out, err = run("agents.py", "--num-agents", "12", "--num-tasks", "2")
    assert (exitcode, err) == (0, "")
    assert "24 of 24" in out
    [wall_s] = re.findall(r"wall time\D+([\d.]+) s", out)
    [alone_s] = re.findall(r"one agent after the other\D+([\d.]+) s", out)
    assert float(wall_s) < float(alone_s) / 2
