"""How an env goes wrong, times when, times where it runs: what the caller gets.

After each: the others' results, an engine that goes on or can only be closed, and
nothing left behind (which the leak check of every test sees to).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from shoal.engine import Engine
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.messages import CallEnvs
from shoal.errors import (
    BrokenError,
    EnvError,
    RecvTimeout,
    StartError,
    StartTimeout,
    WorkerDied,
)
from shoal.testing import Fault, How, ScriptedFactory
from shoal.testing.leaks import look

pytestmark = pytest.mark.crash

BACKENDS = {
    "two-workers": {"num_processes": 2},
    "one-worker": {"num_processes": 1},
    "caller-steps": {"num_processes": 1, "caller_steps": True},
    "fork": {"num_processes": 2, "start_method": "fork"},
    "spawn": {"num_processes": 2, "start_method": "spawn"},
    "threaded-workers": {"num_processes": 2, "env_threads": True},
}
RAISES = {
    How.RAISE: (EnvError, "ScriptedError: env0 at"),
    How.RAISE_UNPICKLABLE: (EnvError, "UnpicklableError: env0 at"),
}
KILLS = {
    How.SYS_EXIT: (WorkerDied, "exit code 7"),
    How.HARD_EXIT: (WorkerDied, "exit code 7"),
    How.SIGKILL: (WorkerDied, "SIGKILL"),
    How.SEGFAULT: (WorkerDied, "SIGSEGV"),
}
ACTIONS = np.arange(4)
VERBS = {
    "step": lambda engine: engine.step(ACTIONS, timeout=30),
    "reset": lambda engine: engine.reset(timeout=30),
    "seeded reset": lambda engine: engine.reset(seed=1, timeout=30),
    "recv": lambda engine: (engine.send(ACTIONS[:1], env_ids=[0]), engine.recv(timeout=30)),
    "seed": lambda engine: engine.seed(1, timeout=30),
    "call": lambda engine: engine.call("pid", timeout=30),
}


def _factories(how, at, *, number=1, gate=None, env_id=0):
    factories = [ScriptedFactory(name=f"env{i}") for i in range(4)]
    fault = Fault(how=how, at=at, number=number, gate=gate)
    factories[env_id] = replace(factories[env_id], faults=[fault])
    return factories


def _at(verb):
    """The env's verb behind the engine's, and at which call the fault strikes."""
    return {"seeded reset": ("reset", 2), "reset": ("reset", 2), "recv": ("step", 1)}.get(
        verb, (verb, 1)
    )


def _cells():
    for backend in ("two-workers", "threaded-workers"):
        for verb in VERBS:
            for how in (*RAISES, *KILLS):
                yield backend, verb, how
    for backend in ("one-worker", "caller-steps", "fork", "spawn"):
        for how in (How.RAISE, How.SYS_EXIT, How.SIGKILL):
            yield backend, "step", how


@pytest.mark.parametrize(
    ("backend", "verb", "how"), [*_cells()], ids=lambda value: getattr(value, "name", value)
)
def test_fault_during_a_verb(open_engine, backend, verb, how):
    at, number = _at(verb)
    engine = open_engine(_factories(how, at, number=number), **BACKENDS[backend])
    engine.reset(seed=0)
    error, words = (RAISES | KILLS)[how]
    with pytest.raises(error, match=words) as caught:
        VERBS[verb](engine)
    if error is EnvError:
        assert caught.value.env_id == 0
        assert not engine.is_broken
        VERBS[verb](engine)
        return
    assert caught.value.worker_id == 0
    assert 0 in caught.value.env_ids
    assert engine.is_broken
    for call in VERBS.values():
        with pytest.raises(BrokenError):
            call(engine)
    engine.close()
    assert engine.is_closed


@pytest.mark.parametrize(
    "backend", ["two-workers", "caller-steps", "fork", "spawn", "threaded-workers"]
)
@pytest.mark.parametrize("how", [*RAISES, *KILLS], ids=lambda how: how.name)
def test_fault_during_build(backend, how):
    if backend == "spawn" and how not in (How.RAISE, How.SIGKILL):
        pytest.skip("one of each kind is enough for the slow start method")
    _, words = (RAISES | KILLS)[how]
    with pytest.raises(StartError, match=words) as caught:
        Engine(_factories(how, "build"), **BACKENDS[backend])
    if how in RAISES:
        assert caught.value.env_id == 0
        assert "_strike" in caught.value.worker_traceback


@pytest.mark.parametrize("backend", ["two-workers", "caller-steps", "fork", "threaded-workers"])
@pytest.mark.parametrize("how", [*RAISES, *KILLS, How.PRINT], ids=lambda how: how.name)
def test_fault_during_close(backend, how):
    engine = Engine(_factories(how, "close"), **BACKENDS[backend])
    engine.reset(seed=0)
    engine.close()
    engine.close()
    assert engine.is_closed


@pytest.mark.parametrize("backend", ["two-workers", "fork", "spawn", "threaded-workers"])
def test_a_hang_during_build_ends_at_the_deadline(backend):
    with pytest.raises(StartTimeout, match="start_timeout"):
        Engine(_factories(How.HANG, "build"), **BACKENDS[backend], start_timeout=0.7)


@pytest.mark.parametrize("backend", ["two-workers", "threaded-workers"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_hang_ends_at_the_deadline_and_can_be_closed(backend, verb):
    at, number = _at(verb)
    engine = Engine(_factories(How.HANG, at, number=number), **BACKENDS[backend])
    engine.reset(seed=0)
    calls = {
        "step": lambda: engine.step(ACTIONS, timeout=0.2),
        "reset": lambda: engine.reset(timeout=0.2),
        "seeded reset": lambda: engine.reset(seed=1, timeout=0.2),
        "recv": lambda: (engine.send(ACTIONS), engine.recv(timeout=0.2)),
        "seed": lambda: engine.seed(1, timeout=0.2),
        "call": lambda: engine.call("pid", timeout=0.2),
    }
    with pytest.raises(RecvTimeout) as caught:
        calls[verb]()
    assert 0 in caught.value.waiting_for
    assert not engine.is_broken
    engine.close(timeout=0.1)


@pytest.mark.parametrize("backend", ["two-workers", "fork", "threaded-workers"])
def test_a_hang_during_close_ends_at_the_deadline(backend):
    engine = Engine(_factories(How.HANG, "close"), **BACKENDS[backend])
    engine.close(timeout=0.2)


def test_a_full_channel_to_a_worker_that_hangs(gate):
    engine = Engine(_factories(How.GATE, "step", gate=gate), **BACKENDS["two-workers"])
    engine.reset(seed=0)
    engine.send(ACTIONS)
    gate.wait_reached(timeout=30)
    engine.recv(min_envs=2)
    with pytest.raises(BrokenError, match="did not take a message"):
        engine._backend.call(
            iter([(0, _long_call())]), engine._deadline(0.2)
        )  # the engine itself would refuse: env 0 is in flight
    engine.close(timeout=0.2)


def _long_call():
    return CallEnvs(10**6, (0,), "echo", (bytes(10_000_000),))


def _step_until_it_is_noticed(engine):
    while True:  # what is killed may have time for some more steps
        engine.step(ACTIONS, timeout=30)


# --- deaths ------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
@pytest.mark.parametrize("backend", ["two-workers", "caller-steps", "threaded-workers"])
def test_killed_while_idle(open_engine, backend, how):
    engine = open_engine(_factories(How.PRINT, "close"), **BACKENDS[backend])
    engine.reset(seed=0)
    os.kill(engine.worker_pids[0], how)
    with pytest.raises(WorkerDied, match=how.name):
        _step_until_it_is_noticed(engine)
    assert engine.is_broken


@pytest.mark.timeout(30)
def test_a_death_that_an_earlier_call_has_seen(open_engine):
    """It had its result and did not mind; the next wait must not wait for news."""
    engine = open_engine(_factories(How.PRINT, "close"), **BACKENDS["two-workers"])
    engine.reset(seed=0)
    os.kill(engine.worker_pids[0], signal.SIGKILL)
    crew = engine._backend._crew
    while crew.first_death() is None:
        crew.wait(Deadline.after(10))
    with pytest.raises(WorkerDied, match="SIGKILL"):
        engine.step(ACTIONS, timeout=None)


@pytest.mark.parametrize("backend", ["two-workers", "threaded-workers"])
@pytest.mark.parametrize("verb", VERBS)
def test_killed_while_stuck(open_engine, gate, backend, verb):
    """The caller waits for good, and is woken by the death alone."""
    at, number = _at(verb)
    factories = _factories(How.GATE, at, number=number, gate=gate)
    engine = open_engine(factories, **BACKENDS[backend])
    engine.reset(seed=0)

    def kill():
        gate.wait_reached(timeout=30)
        os.kill(engine.worker_pids[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        VERBS[verb](engine)
    thread.join()


def test_the_server_is_killed(open_engine):
    engine = open_engine(_factories(How.PRINT, "close"), **BACKENDS["two-workers"])
    engine.reset(seed=0)
    server = [pid for pid in look().processes if pid not in engine.worker_pids]
    assert len(server) == 1
    os.kill(server[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="exit code unknown"):
        _step_until_it_is_noticed(engine)
    engine.close()


@pytest.mark.parametrize("backend", ["two-workers", "threaded-workers"])
def test_results_of_the_others_are_kept(open_engine, gate, backend):
    """Those that were ready when a worker died, with their automatic resets and errors."""
    factories = _factories(How.GATE, "step", number=2, gate=gate, env_id=2)
    factories[0] = replace(factories[0], episode_length=1)
    factories[1] = replace(factories[1], faults=[Fault(how=How.RAISE, number=2)])
    engine = open_engine(factories, **BACKENDS[backend], keep_infos=True)
    engine.reset(seed=0)
    assert engine.step(ACTIONS).reset_rows.tolist() == [0]
    num_sent = 4 if backend == "two-workers" else 3  # where it stands behind env 2, or not
    engine.send(ACTIONS[:num_sent], env_ids=list(range(num_sent)))
    gate.wait_reached(timeout=30)
    while engine.rows.status[:2].min() == 0:  # the other worker has two envs to step
        pass
    os.kill(engine.worker_pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL") as caught:
        engine.recv(timeout=30)
    batch = caught.value.batch
    assert batch.env_ids.tolist() == [0]
    assert batch.reset_rows.tolist() == [0]
    assert batch.infos[0]["count"] == 1
    assert [failure.env_id for failure in caught.value.failures] == [1]


def test_stale_resets_are_not_taken_for_results(open_engine, gate):
    """Env 0 was reset in the step before; now its step is ready and is what counts."""
    factories = _factories(How.GATE, "step", number=3, gate=gate, env_id=2)
    factories[0] = replace(factories[0], episode_length=2)
    engine = open_engine(factories, **BACKENDS["two-workers"])
    engine.reset(seed=0)
    engine.step(ACTIONS)
    assert engine.step(ACTIONS).reset_rows.tolist() == [0]
    engine.send(ACTIONS)
    gate.wait_reached(timeout=30)
    while engine.rows.status[:2].min() == 0:
        pass
    os.kill(engine.worker_pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied) as caught:
        engine.recv(timeout=30)
    batch = caught.value.batch
    assert batch.env_ids.tolist() == [0, 1]
    assert batch.reset_rows.tolist() == []
    assert batch.observation["count",].tolist() == [1, 3]


# --- a thread per env --------------------------------------------------------------


class Leaving(ScriptedFactory):
    """Builds envs that end their thread with a code, when asked to."""

    def __call__(self):
        env = super().__call__()
        env.leave = sys.exit
        return env


@pytest.mark.parametrize("code", [None, 0, 7])
def test_an_exit_of_one_env_is_never_an_orderly_end(open_engine, gate, code):
    """Whatever the code, and though a mate hangs: the worker goes, and not with 0."""
    factories = [Leaving(), *_factories(How.GATE, "step", gate=gate, env_id=1)[1:]]
    engine = open_engine(factories, num_processes=1, env_threads=True)
    engine.reset(seed=0)
    engine.send(ACTIONS[1:2], env_ids=[1])
    gate.wait_reached(timeout=30)
    with pytest.raises(WorkerDied, match=f"exit code {code or 1} "):
        engine.call("leave", code, env_ids=[0], timeout=60)


# --- start -------------------------------------------------------------------------


class NotThere:
    """A factory that the worker cannot rebuild."""

    is_cheap = False

    def __call__(self):
        raise AssertionError("never built")

    def __reduce__(self):
        return (_not_there, ())


def _not_there():
    raise ModuleNotFoundError("no such module here")


@pytest.mark.parametrize("backend", ["two-workers", "spawn"])
def test_factories_that_the_worker_cannot_rebuild(backend):
    factories = [ScriptedFactory(), ScriptedFactory(), NotThere(), NotThere()]
    with pytest.raises(StartError, match="no such module here") as caught:
        Engine(factories, **BACKENDS[backend])
    assert caught.value.env_id == 2
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_worker_that_ends_before_it_has_read_its_factories(monkeypatch):
    monkeypatch.setattr("shoal.engine.backends.crew._WORKER_ENTRY", "no.such.module:main")
    factories = [ScriptedFactory(journal="x" * 5_000_000)] * 2
    with pytest.raises(StartError, match="exit code 1"):
        Engine(factories, num_processes=2)


def test_a_server_that_ends_at_once(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(StartError, match="server of the worker processes"):
        Engine([ScriptedFactory()] * 2, num_processes=1)
