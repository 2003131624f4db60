"""Envs on threads of the caller's process: one each, for ever, in nobody's way."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from queue import SimpleQueue

import numpy as np
import pytest
from thread_envs import TracedFactory, at_gate, factories_with

from shoal.engine import ArraySpec, Engine, ObjectSpec
from shoal.engine.core.messages import CallEnvs
from shoal.errors import BrokenError, RecvTimeout, StartError, StartTimeout, WorkerDied
from shoal.testing import Fault, How, ScriptedFactory

THREADS = {"backend": "threads"}
NOW = np.arange(4)


def _env_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("shoal-env")]


# --- threads -----------------------------------------------------------------------


def test_an_env_stays_on_its_thread():
    factories = [TracedFactory(name=f"env{i}", episode_length=2) for i in range(3)]
    engine = Engine(factories, **THREADS)
    engine.reset(seed=0)
    for _ in range(4):
        engine.step(NOW[:3])
        engine.step(NOW[:3], autoreset=False)
    engine.seed(1)
    engine.call("pid")
    engine.reset(env_ids=[1])
    engine.close()
    idents = [{ident for _, ident in factory.record} for factory in factories]
    assert all(len(mine) == 1 for mine in idents)
    assert len(set.union(*idents)) == 3
    assert threading.get_ident() not in set.union(*idents)
    verbs = {"build", "reset", "step", "seed", "call", "close"}
    assert all({verb for verb, _ in factory.record} == verbs for factory in factories)


def test_each_env_is_a_worker_without_a_process(open_engine):
    engine = open_engine([ScriptedFactory()] * 3, **THREADS)
    assert engine.worker_pids == ()
    assert [engine._backend.worker_of(i) for i in range(3)] == [0, 1, 2]
    assert len(_env_threads()) == 3


def test_waits_overlap(open_engine, make_gate):
    """Both envs stand at their gates at the same time: in steps, and while they are built."""
    gates = [make_gate(f"gate{i}") for i in range(2)]
    gates_of_build = [make_gate(f"build{i}") for i in range(2)]
    faults = {i: at_gate(gates_of_build[i], at="build") + at_gate(gates[i]) for i in range(2)}

    def open_gates():
        for gate in gates_of_build:
            gate.wait_reached(timeout=30)
        for gate in gates_of_build:
            gate.open()

    thread = threading.Thread(target=open_gates)
    thread.start()
    engine = open_engine(factories_with(faults, 2), **THREADS)
    thread.join()
    engine.reset(seed=0)
    engine.send(NOW[:2])
    for gate in gates:
        gate.wait_reached(timeout=30)
    gates[1].open()
    assert engine.recv(min_envs=1).env_ids.tolist() == [1]
    gates[0].open()
    assert engine.recv().env_ids.tolist() == [0]


def test_a_busy_env_holds_up_nobody(open_engine, gate):
    engine = open_engine(factories_with({0: at_gate(gate)}), **THREADS)
    engine.reset(seed=0)
    engine.send(NOW)
    gate.wait_reached(timeout=30)
    assert engine.recv(min_envs=3).env_ids.tolist() == [1, 2, 3]
    assert engine.call("echo", 5, env_ids=[2]) == [5]
    assert engine.reset(env_ids=[1], seed=1).env_ids.tolist() == [1]
    for t in range(20):
        engine.send(NOW[1:] + t, env_ids=[1, 2, 3])
        assert engine.recv(min_envs=3).reward.astype(int).tolist() == (NOW[1:] + t).tolist()
    gate.open()
    assert engine.recv().env_ids.tolist() == [0]


def test_notes_of_envs_that_publish_while_others_are_taken(open_engine):
    """Every info belongs to its own result, whatever is taken when."""
    engine = open_engine(
        factories_with({}, 6, reuses_buffers=True, observation={("graph",): ObjectSpec()}),
        **THREADS,
        keep_infos=True,
    )
    engine.reset(seed=0)
    counts = np.zeros(6, int)
    engine.send(np.zeros(6, int))
    for _ in range(300):
        batch = engine.recv(min_envs=1)
        ids = batch.env_ids
        counts[ids] += 1
        assert [info["count"] for info in batch.infos] == counts[ids].tolist()
        graphs = batch.observation["graph",]
        assert [graph["count"] for graph in graphs] == counts[ids].tolist()
        engine.send(np.zeros(len(ids), int), env_ids=ids.tolist())
    engine.recv()


def test_action_objects_are_copied_when_they_are_sent(open_engine, gate):
    factories = factories_with({0: at_gate(gate)}, 1, action={("say",): ObjectSpec()})
    engine = open_engine(factories, **THREADS, keep_infos=True)
    engine.reset(seed=0)
    said = {"text": "before"}
    engine.send({("say",): [said]})
    gate.wait_reached(timeout=30)
    said["text"] = "after"
    gate.open()
    assert engine.recv().infos[0]["action"] == {"say": {"text": "before"}}


# --- ends --------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["build", "step", "call", "close"])
def test_an_env_that_hangs_is_left_alone_until_it_comes_back(gate, verb):
    record: list = []
    faults = {0: at_gate(gate, at=verb)}
    factories = factories_with(faults, 2, kind=TracedFactory, record=record)
    if verb == "build":
        with pytest.raises(StartTimeout, match=r"Envs \[0\]"):
            Engine(factories, **THREADS, start_timeout=0.2)
    else:
        engine = Engine(factories, **THREADS)
        engine.reset(seed=0)
        if verb == "step":
            engine.send(NOW[:2])
        if verb == "call":
            with pytest.raises(RecvTimeout) as caught:
                engine.call("pid", timeout=0.1)
            assert caught.value.waiting_for == (0,)
        with pytest.warns(RuntimeWarning, match=r"Envs \[0\] did not end"):
            engine.close(timeout=0.5)
        engine.close()
    gate.wait_reached(timeout=30)
    assert _env_threads() == ["shoal-env-0"]
    thread = next(t for t in threading.enumerate() if t.name == "shoal-env-0")
    gate.open()
    thread.join(timeout=30)
    assert not thread.is_alive()
    closes = [ident for what, ident in record if what == "close"]
    assert len(set(closes)) == 2
    assert thread.ident in closes


@pytest.mark.parametrize("how", [How.RAISE, How.SYS_EXIT], ids=lambda how: how.name)
def test_a_build_that_fails_closes_what_was_built(tmp_path, how):
    journal = tmp_path / "journal"
    faults = {1: [Fault(how=how, at="build")]}
    with pytest.raises(StartError) as caught:
        Engine(factories_with(faults, 3, journal=str(journal)), **THREADS)
    assert caught.value.env_id == 1
    assert "_strike" in caught.value.worker_traceback
    assert not _env_threads()
    lines = journal.read_text().splitlines()
    assert sorted(lines) == ["build env0", "build env2", "close env0", "close env2"]


def test_an_env_that_ends_its_thread(open_engine, gate):
    """The others' results are kept; the engine is broken, and closes."""
    faults = {0: [Fault(how=How.SYS_EXIT, number=2)], 1: [Fault(how=How.RAISE, number=2)]}
    engine = open_engine(factories_with(faults), **THREADS, keep_infos=True)
    engine.reset(seed=0)
    engine.step(NOW)
    engine.send(NOW[1:], env_ids=[1, 2, 3])
    engine._backend.wait(engine._backend.all_done, engine._deadline(30))
    engine.send(NOW[:1], env_ids=[0])
    with pytest.raises(WorkerDied, match="exit code 7 during step") as caught:
        engine.recv(timeout=30)
    died = caught.value
    assert (died.worker_id, died.env_ids, died.exitcode) == (0, (0,), 7)
    assert isinstance(died.__cause__, SystemExit)
    assert "_strike" in died.__notes__[0]
    assert died.batch.env_ids.tolist() == [2, 3]
    assert [info["count"] for info in died.batch.infos] == [2, 2]
    assert [failure.env_id for failure in died.failures] == [1]
    assert engine.is_broken
    with pytest.raises(BrokenError):
        engine.step(NOW)
    engine.close()
    assert not _env_threads()


@pytest.mark.parametrize("verb", ["reset", "seed", "call", "close"])
def test_an_env_that_ends_its_thread_in_another_verb(verb):
    engine = Engine(factories_with({2: [Fault(how=How.SYS_EXIT, at=verb)]}), **THREADS)
    calls = {
        "reset": lambda: engine.reset(seed=0),
        "seed": lambda: engine.seed(0),
        "call": lambda: engine.call("pid"),
    }
    if verb in calls:
        with pytest.raises(WorkerDied, match=f"exit code 7 during {verb}") as caught:
            calls[verb]()
        assert caught.value.worker_id == 2
    engine.close()
    assert not _env_threads()


def test_a_forgotten_engine_leaves_no_thread():
    engine = Engine(factories_with({}), **THREADS)
    engine.reset(seed=0)
    engine.send(NOW)
    backend = weakref.ref(engine._backend)
    del engine
    gc.collect()
    assert backend() is None
    assert not _env_threads()


def test_a_thread_that_closes_its_own_engine_does_not_wait_for_itself(open_engine):
    """The collector may run anywhere, also on a thread of an env of the engine it finds."""
    engine = open_engine([ScriptedFactory()] * 2, **THREADS)
    backend = engine._backend
    answers = SimpleQueue()

    def close_and_answer(answer):
        backend._finalizer()
        answers.put(answer)

    backend._crew.ask(CallEnvs(1, (0,), "pid"), close_and_answer)
    assert answers.get(timeout=30).values == {0: os.getpid()}
    assert not backend._finalizer.alive


def test_a_fork_can_neither_use_nor_harm_it(open_engine):
    engine = open_engine(factories_with({}), **THREADS)
    engine.reset(seed=0)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            engine.step(NOW, timeout=5)
        except BrokenError:
            engine.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert engine.step(NOW).observation["count",].tolist() == [1] * 4


def test_specs_are_agreed_on(open_engine):
    leaf = ArraySpec((2,), np.dtype(np.float32))
    factories = [
        ScriptedFactory(observation={("x",): leaf}),
        ScriptedFactory(observation={("x",): leaf, ("y",): leaf}),
    ]
    engine = open_engine(factories, **THREADS, mixed_specs=True)
    assert set(engine.spec.observation) == {("x",), ("y",)}
    assert len(engine.reset(seed=0)) == 2
