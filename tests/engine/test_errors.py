"""Every error survives pickling, and says what it has to say."""

from __future__ import annotations

import copy
import pickle

import pytest

from shoal import errors
from shoal.errors import (
    EnvError,
    RecvTimeout,
    SpecError,
    StartError,
    StartTimeout,
    WorkerDied,
)


def _examples():
    env_error = EnvError(env_id=3, during="step", cause_text="ValueError: no", worker_traceback="T")
    env_error.__cause__ = ValueError("no")
    other = EnvError(env_id=1, during="reset", cause_text="KeyError: 'x'")
    spec = SpecError(key="observation/x", expected="uint8", actual="300", env_id=2, hint="Mend it.")
    return [
        errors.ShoalError("a"),
        errors.UsageError("b"),
        errors.ClosedError("c"),
        errors.PendingCallError("d"),
        errors.NoPendingCallError("e"),
        spec,
        EnvError.of_many([env_error, other]),
        EnvError(env_id=0, during="step", cause_text="x"),
        StartError("f", env_id=1, worker_traceback="T"),
        StartTimeout("g"),
        StartTimeout("g", env_id=4),
        errors.BrokenError("g"),
        WorkerDied(worker_id=1, env_ids=(2, 3), exitcode=-9, during="step"),
        WorkerDied(worker_id=1, env_ids=(1,), exitcode=7, during="step", kind="thread"),
        RecvTimeout(waiting_for=(1, 2), timeout=0.5, during="step"),
    ]


@pytest.mark.parametrize("error", _examples(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy], ids=str)
def test_errors_survive_pickling(error, again):
    twin = again(error)
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert twin.args == error.args
    for name, value in vars(error).items():
        if name != "failures":
            assert getattr(twin, name) == value
    if isinstance(error, EnvError):
        assert [str(f) for f in twin.failures] == [str(f) for f in error.failures]
        assert twin.failures[0] is twin
        assert [repr(f.__cause__) for f in twin.failures] == [
            repr(f.__cause__) for f in error.failures
        ]


def test_a_cause_that_cannot_be_pickled_is_left_behind():
    class LocalError(Exception):
        pass

    error = EnvError(env_id=3, during="step", cause_text="LocalError")
    error.__cause__ = LocalError()
    twin = pickle.loads(pickle.dumps(error))
    assert str(twin) == str(error)
    assert twin.__cause__ is None


def test_every_error_is_exported():
    classes = {type(error).__name__ for error in _examples()}
    assert classes == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), errors.ShoalError) for name in errors.__all__)


def test_builtin_bases():
    assert issubclass(SpecError, ValueError)
    assert issubclass(RecvTimeout, TimeoutError)
    assert issubclass(WorkerDied, errors.BrokenError)


def test_failures_are_told_in_env_order():
    failures = [EnvError(env_id=i, during="step", cause_text="x") for i in (5, 1, 3)]
    first = EnvError.of_many(failures)
    assert first is failures[1]
    assert [failure.env_id for failure in first.failures] == [1, 3, 5]
    assert first.__notes__ == ["Envs 3, 5 failed in the same call; see `failures`."]


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (-9, "killed by SIGKILL during step. Often the machine ran out of memory."),
        (-11, "killed by SIGSEGV during step. Native code"),
        (7, "ended with exit code 7 during step. An environment ended the process"),
        (0, "ended with exit code 0"),
        (None, "exit code unknown"),
        (-250, "killed by signal 250"),
    ],
)
def test_deaths_in_words(exitcode, words):
    died = WorkerDied(worker_id=3, env_ids=range(12, 24), exitcode=exitcode, during="step")
    assert words in str(died)
    assert "Worker 3 (envs 12, 13, 14, 15, 16, 17, 18, 19, ...)" in str(died)
    assert "close it and open a new one" in str(died)
