"""Ways to run envs, by name, for tests to parametrise over."""

from __future__ import annotations

SERIAL = {"backend": "serial"}
ONE_WORKER = {"num_processes": 1}
TWO_WORKERS = {"num_processes": 2}
CALLER_STEPS = {"num_processes": 1, "caller_steps": True}
FORK = {"num_processes": 2, "start_method": "fork"}

PROCESSES = {"one-worker": ONE_WORKER, "two-workers": TWO_WORKERS, "caller-steps": CALLER_STEPS}
LOCAL = {"serial": SERIAL, "caller-steps": CALLER_STEPS}
ALL = {"serial": SERIAL, **PROCESSES}
