"""Ctrl-C at any point: the next call's results are its own, and nothing is stuck."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backends import ALL, LOCAL, ONE_WORKER, PROCESSES, TWO_WORKERS

import shoal.engine
from shoal.engine import ArraySpec, ObjectSpec
from shoal.errors import EnvError, PendingCallError
from shoal.testing import Fault, How, ScriptedFactory

ENGINE_FOLDER = str(Path(shoal.engine.__file__).parent)
NOW = np.arange(4)


def _factories(faults=(), env_id=0, **script):
    factories = [ScriptedFactory(name=f"env{i}", **script) for i in range(4)]
    factories[env_id] = replace(factories[env_id], faults=faults)
    return factories


def _interrupt(call, gate, begins=None):
    """Runs ``call`` and sends Ctrl-C to this process once an env stands at the gate.

    If the gate may be reached before the call, ``begins`` tells when that is under way.
    """
    is_told = begins is not None
    begins = begins or threading.Event()

    def wait_and_send():
        begins.wait(timeout=30)
        gate.wait_reached(timeout=30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come before the call
        if not is_told:
            begins.set()
        call()
    thread.join()
    gate.open()


@pytest.mark.parametrize("backend", PROCESSES)
def test_interrupted_while_a_step_is_awaited(open_engine, gate, backend):
    fault = Fault(how=How.GATE, number=2, gate=gate)
    engine = open_engine(_factories([fault]), **PROCESSES[backend])
    engine.reset(seed=0)
    engine.step(NOW)
    _interrupt(lambda: engine.step(NOW + 100), gate)
    batch = engine.step(NOW + 200)
    assert batch.reward.astype(int).tolist() == (NOW + 200).tolist()
    assert batch.observation["count",][:2].tolist() == [3, 3]
    # Those of the caller may not have come to it.
    assert all(count in (2, 3) for count in batch.observation["count",][2:])


@pytest.mark.parametrize("verb", ["reset", "seed", "call"])
def test_interrupted_while_anything_else_is_awaited(open_engine, gate, verb):
    fault = Fault(how=How.GATE, at=verb, gate=gate)
    engine = open_engine(_factories([fault]), **TWO_WORKERS)
    calls = {
        "reset": lambda: engine.reset(seed=1),
        "seed": lambda: engine.seed(1),
        "call": lambda: engine.call("echo", 1),
    }
    _interrupt(calls[verb], gate)
    assert len(engine.reset(seed=2)) == 4
    assert engine.call("echo", 2) == [2] * 4
    assert engine.step(NOW).observation["count",].tolist() == [1] * 4


def test_interrupted_in_recv_nothing_is_lost(open_engine, gate):
    engine = open_engine(_factories([Fault(how=How.GATE, gate=gate)]), **TWO_WORKERS)
    engine.reset(seed=0)
    engine.send(NOW)
    _interrupt(engine.recv, gate)
    assert engine.recv().reward.astype(int).tolist() == NOW.tolist()


@pytest.mark.parametrize("env_id", [2, 3])
@pytest.mark.parametrize("backend", LOCAL)
def test_interrupted_inside_an_env_of_the_caller(open_engine, backend, env_id):
    engine = open_engine(_factories([Fault(how=How.INTERRUPT)], env_id), **LOCAL[backend])
    engine.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        engine.step(NOW + 100)
    batch = engine.step(NOW + 200)
    assert batch.reward.astype(int).tolist() == (NOW + 200).tolist()
    assert len(batch.reset_rows) == 0


@pytest.mark.parametrize("backend", LOCAL)
def test_what_ended_or_failed_before_the_interrupt_is_forgotten(open_engine, backend):
    interrupt = Fault(how=How.INTERRUPT, at="reset", number=2)
    factories = _factories([interrupt], 3, episode_length=1)  # 2 and 3 are with the caller
    factories[0] = replace(factories[0], faults=[Fault(how=How.RAISE)])
    engine = open_engine(factories, **LOCAL[backend], keep_infos=True)
    engine.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        engine.step(NOW, autoreset=True)
    batch = engine.step(NOW, autoreset=False)
    assert len(batch.reset_rows) == 0
    assert batch.terminated[2:].tolist() == [True, False]  # 2 had been reset, 3 had not
    assert batch.observation["count",][2:].tolist() == [1, 2]


@pytest.mark.parametrize("backend", LOCAL)
def test_interrupted_inside_send(open_engine, backend):
    engine = open_engine(_factories([Fault(how=How.INTERRUPT)], 3), **LOCAL[backend])
    engine.reset(seed=0)
    with pytest.raises(KeyboardInterrupt):
        engine.send(NOW)
    engine.send(NOW + 50)
    assert engine.recv().reward.astype(int).tolist() == (NOW + 50).tolist()


@pytest.mark.parametrize("backend", LOCAL)
def test_sys_exit_inside_an_env_of_the_caller(open_engine, backend):
    faults = [Fault(how=How.SYS_EXIT, at=verb) for verb in ("step", "reset", "call")]
    engine = open_engine(_factories(faults, 3), **LOCAL[backend])
    for call in (engine.reset, lambda: engine.step(NOW), lambda: engine.call("pid")):
        with pytest.raises(SystemExit):
            call()
    engine.reset(seed=0)
    assert engine.step(NOW).observation["count",].tolist() == [1] * 4


# --- at every line -----------------------------------------------------------------


class InterruptAt:
    """Raises `KeyboardInterrupt` at the n-th line that the engine's code runs."""

    def __init__(self, number):
        self.left = number
        self.where = ""

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(self.before)

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(ENGINE_FOLDER):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace


def _at_every_line(call, check):
    """Interrupts ``call`` at its first line, then its second, until it runs through."""
    for number in range(1, 5000):
        injected = InterruptAt(number)
        try:
            with injected:
                call()
        except KeyboardInterrupt:
            pass
        else:
            assert number > 5, "nothing was interrupted"
            return
        try:
            check()
        except Exception as exc:
            exc.add_note(f"after an interrupt at {injected.where}")
            raise
    raise AssertionError("it never ran through")


@pytest.mark.parametrize("backend", ALL)
def test_a_step_interrupted_at_every_line(open_engine, backend):
    script = {"episode_length": 3, "info": {("count",): ArraySpec((), np.dtype("i8"))}}
    engine = open_engine(_factories(**script), **ALL[backend])
    engine.reset(seed=0)

    def check():
        batch = engine.step(NOW + 7, timeout=30)
        assert batch.reward.astype(int).tolist() == (NOW + 7).tolist()
        counts = np.where(np.isin(np.arange(4), batch.reset_rows), 0, batch.info["count",])
        assert batch.observation["count",].tolist() == (counts % 100).tolist()

    _at_every_line(lambda: engine.step(NOW + 100), check)


@pytest.mark.parametrize("backend", ALL)
def test_a_send_interrupted_at_every_line(open_engine, backend):
    action = {("x",): ArraySpec((), np.dtype("i8")), ("say",): ObjectSpec()}
    engine = open_engine(_factories(action=action), **ALL[backend])
    engine.reset(seed=0)

    def send(text):
        engine.send({"x": NOW[:2], "say": [text] * 2}, env_ids=[3, 1])

    def check():
        try:
            send("other")
        except PendingCallError:  # it had gone out
            assert len(engine.recv(timeout=30)) == 2
            return
        assert engine.recv(timeout=30).reward.astype(int).tolist() == [6, 5]

    def send_and_clear():
        send("some")
        engine.recv(timeout=30)

    _at_every_line(send_and_clear, check)


@pytest.mark.parametrize("backend", ALL)
def test_a_reset_interrupted_at_every_line(open_engine, backend):
    engine = open_engine(_factories(), **ALL[backend], keep_infos=True)
    engine.reset(seed=0)

    def check():
        batch = engine.reset(seed=5, options={"b": 1}, timeout=30)
        draw = np.random.default_rng(5).random(3).tolist()
        assert batch.observation["draw",][0].tolist() == draw
        assert batch.infos[0]["options"] == {"b": 1}
        assert engine.step(NOW, timeout=30).observation["count",].tolist() == [1] * 4

    _at_every_line(lambda: engine.reset(seed=1, options={"a": 2}), check)


@pytest.mark.parametrize("backend", ["serial", "two-workers"])
def test_a_call_interrupted_at_every_line(open_engine, backend):
    engine = open_engine(_factories(), **ALL[backend])
    engine.reset(seed=0)

    def check():
        assert engine.call("echo", 2, timeout=30) == [2] * 4

    _at_every_line(lambda: engine.call("echo", 1), check)


class TellsWhenPickled:
    """Sets an event when it is pickled."""

    def __init__(self, event):
        self.event = event

    def __reduce__(self):
        self.event.set()
        return (str, ("told",))


def test_a_long_message_interrupted_in_the_middle(open_engine, gate):
    """The worker does not read, so the message cannot get out before Ctrl-C."""
    factories = _factories([Fault(how=How.GATE, gate=gate)])
    engine = open_engine(factories, **ONE_WORKER)
    engine.reset(seed=0)
    engine.send(NOW[:1], env_ids=[0])
    begins = threading.Event()
    options = {"told": TellsWhenPickled(begins), "blob": bytes(5_000_000)}
    _interrupt(lambda: engine.reset(env_ids=[1], options=options), gate, begins)
    assert engine.reset(seed=1).observation["count",].tolist() == [0] * 4
    assert engine.step(NOW).observation["count",].tolist() == [1] * 4
    assert engine.call("echo", 3) == [3] * 4


def test_errors_after_an_interrupt_are_those_of_the_new_call(open_engine, gate):
    faults = [Fault(how=How.GATE, gate=gate), Fault(how=How.RAISE, number=1)]
    engine = open_engine(_factories([*faults, Fault(how=How.RAISE, number=3)]), **TWO_WORKERS)
    engine.reset(seed=0)
    _interrupt(lambda: engine.step(NOW), gate)
    assert len(engine.step(NOW)) == 4
    with pytest.raises(EnvError, match="env0 at step 3"):
        engine.step(NOW)
