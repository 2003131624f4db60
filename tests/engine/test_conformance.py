"""Every backend passes every check of the public suite."""

from __future__ import annotations

import functools

import pytest

from shoal.engine import Engine
from shoal.testing import CHECKS

BACKENDS = {
    "serial": {"backend": "serial"},
    "one-worker": {"num_processes": 1},
    "two-workers": {"num_processes": 2},
    "caller-steps": {"num_processes": 1, "caller_steps": True},
    "fork": {"num_processes": 2, "start_method": "fork"},
    "threads": {"backend": "threads"},
    "threaded-workers": {"num_processes": 2, "env_threads": True},
}
# Two fresh interpreters each: enough checks to see every kind of message travel.
SPAWN_CHECKS = (
    "check_steps_equal_lone_envs",
    "check_objects_and_infos_travel",
    "check_an_error_spares_the_others",
    "check_calls_return_per_env",
    "check_build_errors",
    "check_close_closes_envs",
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_conforms(backend, check):
    check(functools.partial(Engine, **BACKENDS[backend]))


@pytest.mark.parametrize("name", SPAWN_CHECKS)
def test_spawned_workers_conform(name):
    check = next(check for check in CHECKS if check.__name__ == name)
    check(functools.partial(Engine, num_processes=2, start_method="spawn"))


def test_memory_file_on_disk_conforms():
    for check in CHECKS[2:4]:
        check(functools.partial(Engine, num_processes=2, memmap=True))
