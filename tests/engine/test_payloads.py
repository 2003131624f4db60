"""Large messages both ways, at the same time, do not wait for each other."""

from __future__ import annotations

import numpy as np
import pytest
from backends import ONE_WORKER, PROCESSES

from shoal.engine import Engine
from shoal.errors import EnvError, UsageError
from shoal.testing import Fault, How, ScriptedFactory

LARGE = 5_000_000


def _factories(num_envs=2, **script):
    return [ScriptedFactory(name=f"env{i}", **script) for i in range(num_envs)]


@pytest.mark.parametrize("backend", PROCESSES)
def test_both_sides_speak_at_length(backend):
    blob = bytes(range(256)) * (LARGE // 256)
    factories = _factories(4, payload_bytes=LARGE)
    with Engine(factories, keep_infos=True, **PROCESSES[backend]) as engine:
        batch = engine.reset(seed=0, options={"blob": blob})
        assert all(info["options"]["blob"] == blob for info in batch.infos)
        assert [len(info["payload"]) for info in batch.infos] == [LARGE] * 4
        # The workers speak while they are spoken to.
        engine.send(np.arange(2), env_ids=[0, 3])
        assert engine.call("echo", blob, env_ids=[1]) == [blob]
        assert len(engine.reset(env_ids=[2], options={"blob": blob})) == 1
        assert [info["payload"][0] for info in engine.recv().infos] == [1, 1]


class OpensWhilePickled:
    """Opens a gate when it is pickled."""

    def __init__(self, gate):
        self.gate = gate

    def __reduce__(self):
        self.gate.open()
        return (str, ("opened",))


def test_what_is_read_while_sending_is_not_forgotten(open_engine, gate):
    """An error arrives while a long message goes out, and nothing else comes after it."""
    faults = [Fault(how=How.GATE, gate=gate), Fault(how=How.RAISE)]
    factories = [ScriptedFactory(name="env0", faults=faults), ScriptedFactory(name="env1")]
    engine = open_engine(factories, **ONE_WORKER)
    engine.reset(seed=0)
    engine.send(np.arange(1), env_ids=[0])
    gate.wait_reached(timeout=30)
    options = {"opens": OpensWhilePickled(gate), "blob": bytes(LARGE)}
    assert len(engine.reset(env_ids=[1], options=options, timeout=20)) == 1
    with pytest.raises(EnvError, match="env0 at step 1"):
        engine.recv(timeout=20)


@pytest.mark.parametrize("backend", PROCESSES)
def test_what_cannot_be_sent_is_refused_and_changes_nothing(open_engine, backend):
    engine = open_engine(_factories(4), **PROCESSES[backend])
    engine.reset(seed=0)
    lock = _lock()
    for call in (
        lambda: engine.call("echo", lock),
        lambda: engine.reset(options={"lock": lock}),
        lambda: engine.reset(env_ids=[0, 1], options={"lock": lock}),
    ):
        with pytest.raises(UsageError, match="cannot be sent to a worker process"):
            call()
        assert engine.num_in_flight == 0
    assert engine.call("echo", 1) == [1] * 4
    assert engine.step(np.arange(4)).observation["count",].tolist() == [1] * 4


@pytest.mark.parametrize("backend", PROCESSES)
def test_values_that_cannot_come_back_are_errors_of_their_env(open_engine, backend):
    engine = open_engine(_factories(4), **PROCESSES[backend])
    engine.reset(seed=0)
    for name, during in (("new_lock", "send"), ("unloadable", "receive")):
        with pytest.raises(EnvError, match=r"cannot|rebuilt") as caught:
            engine.call(name, env_ids=[1, 0])
        assert during in caught.value.during
        assert [failure.env_id for failure in caught.value.failures] == [0, 1]
    assert engine.step(np.arange(4)).observation["count",].tolist() == [1] * 4


@pytest.mark.parametrize("what", ["lock", "unloadable"])
@pytest.mark.parametrize("backend", PROCESSES)
def test_infos_that_cannot_travel_are_errors_of_their_env(open_engine, backend, what):
    value = Unloadable() if what == "unloadable" else LockMaker()
    factories = _factories(4)
    factories[1] = ScriptedFactory(
        name="env1", faults=[Fault(how=How.INFO, value={"bad": value}, number=2)]
    )
    engine = open_engine(factories, keep_infos=True, **PROCESSES[backend])
    engine.reset(seed=0)
    engine.step(np.arange(4))
    with pytest.raises(EnvError, match=r"Env (0|1) raised during (send|receive) its result"):
        engine.step(np.arange(4), timeout=20)
    batch = engine.step(np.arange(4), timeout=20)
    assert batch.observation["count",].tolist() == [3] * 4


def _lock():
    import threading

    return threading.Lock()


class LockMaker:
    """Travels to the worker, but not back."""

    def __init__(self):
        self.trips = 0

    def __getstate__(self):
        if self.trips:
            raise TypeError("cannot leave the worker")
        return {"trips": 1}


class Unloadable:
    """Travels to the worker, and back as something that cannot be rebuilt."""

    def __init__(self, trips=0):
        self.trips = trips

    def __reduce__(self):
        return (_fail, ()) if self.trips else (Unloadable, (1,))


def _fail():
    raise LookupError("cannot be rebuilt here")
