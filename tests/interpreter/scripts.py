"""Runs scripts in interpreters of their own, and looks for what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid

from shoal.testing.leaks import find_marked

PREAMBLE = """
import os, sys
import numpy as np
from shoal.engine import Engine
from shoal.testing import Fault, How, ScriptedFactory
"""


class Script:
    """One script. Ends with its test, and so does every process that it started."""

    def __init__(self, code, *, folder=None, how="file", preamble=PREAMBLE, args=()):
        self.marker = f"SHOAL_TEST={uuid.uuid4()}"
        code = preamble + textwrap.dedent(code)
        command, stdin = [sys.executable, "-c", code, *args], None
        if how == "stdin":
            command, stdin = [sys.executable, "-", *args], code
        elif how == "file":
            path = folder / "script.py"
            path.write_text(code)
            command = [sys.executable, str(path), *args]
        name, _, value = self.marker.partition("=")
        self.process = subprocess.Popen(
            command,
            env={**os.environ, name: value, "PYTHONWARNINGS": "error"},
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._stdin = stdin

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in (self.process.pid, *find_marked(self.marker)):
            with contextlib.suppress(ProcessLookupError):
                if pid != self.process.pid or self.process.poll() is None:
                    os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def finish(self, timeout=60):
        """Waits for its end; returns exit code, stdout, stderr."""
        out, err = self.process.communicate(self._stdin, timeout=timeout)
        return self.process.returncode, out, err

    def assert_nothing_left(self, grace_s=10):
        """Every process that it started is gone, or goes soon."""
        until = time.monotonic() + grace_s
        while left := find_marked(self.marker):
            assert time.monotonic() < until, f"still there: {left}"
            time.sleep(0.01)


def run(code, **options):
    """Runs a script that has to end well and leave nothing; returns its output."""
    with Script(code, **options) as script:
        exitcode, out, err = script.finish()
        assert exitcode == 0, err
        script.assert_nothing_left()
        return out, err
