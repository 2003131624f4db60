"""Runs an example from a shell, as its docstring says, and looks for what it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

from shoal.testing.leaks import find_marked

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *options: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr; fails if a process is left."""
    marker = f"{uuid.uuid4()}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *options],
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
