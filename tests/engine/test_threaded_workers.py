"""Worker processes that give each env a thread, and cores of their own to workers."""

from __future__ import annotations

import os

import numpy as np
import pytest
from thread_envs import TracedFactory, at_gate, factories_with

from shoal.engine import Engine, ObjectSpec
from shoal.engine.config import EngineConfig
from shoal.errors import EnvError, PendingCallError, UsageError
from shoal.testing import Fault, How

THREADED = {"num_processes": 2, "env_threads": True}
NOW = np.arange(4)
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_affinity = pytest.mark.skipif(not CORES, reason="cores cannot be chosen here")


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_an_env_stays_on_its_thread(open_engine, method):
    factories = [TracedFactory(name=f"env{i}", episode_length=2) for i in range(4)]
    engine = open_engine(factories, **THREADED, start_method=method)
    engine.reset(seed=0)
    for _ in range(3):
        engine.step(NOW)
    engine.seed(1)
    threads = engine.call("threads")
    assert all(len(mine) == 1 for mine in threads)
    assert threads[0] != threads[1]
    assert threads[2] != threads[3]
    pids = engine.call("pid")
    assert pids[0] == pids[1] != pids[2] == pids[3]


def test_waits_in_one_worker_overlap(open_engine, make_gate):
    gates = [make_gate(f"gate{i}") for i in range(4)]
    faults = {i: at_gate(gates[i]) for i in range(4)}
    engine = open_engine(factories_with(faults), **THREADED)
    engine.reset(seed=0)
    engine.send(NOW)
    for gate in gates:
        gate.wait_reached(timeout=30)
    for i in (1, 3, 0, 2):
        gates[i].open()
        assert engine.recv(min_envs=1).env_ids.tolist() == [i]


def test_builds_in_one_worker_overlap(make_gate):
    """The second one's failure is told while the first one is still being built."""
    gate = make_gate()
    faults = {0: at_gate(gate, at="build"), 1: [Fault(how=How.RAISE, at="build")]}
    with pytest.raises(Exception, match="env1 at build"):
        Engine(factories_with(faults, 2), num_processes=1, env_threads=True)


@pytest.mark.parametrize("verb", ["step", "reset"])
def test_a_busy_env_holds_up_nobody_in_its_worker(open_engine, gate, verb):
    number = 1 if verb == "step" else 2
    faults = {0: at_gate(gate, at=verb, number=number)}
    engine = open_engine(
        factories_with(faults, 3, episode_length=1), num_processes=1, env_threads=True
    )
    engine.reset(seed=0)
    engine.send(NOW[:3])
    gate.wait_reached(timeout=30)
    assert engine.recv(min_envs=2).env_ids.tolist() == [1, 2]
    with pytest.raises(PendingCallError):
        engine.call("pid")
    assert engine.call("echo", bytes(3_000_000), env_ids=[1])[0] == bytes(3_000_000)
    assert engine.reset(env_ids=[2], seed=4).env_ids.tolist() == [2]
    for t in range(20):
        engine.send(NOW[1:3] + t, env_ids=[1, 2])
        assert engine.recv(min_envs=2).reward.astype(int).tolist() == (NOW[1:3] + t).tolist()
    gate.open()
    assert engine.recv().env_ids.tolist() == [0]
    assert len(engine.step(NOW[:3])) == 3


def test_objects_and_infos_of_envs_that_come_one_by_one(open_engine):
    """More than a socket holds, both ways, and each belongs to its own result."""
    engine = open_engine(
        factories_with(
            {},
            6,
            reuses_buffers=True,
            payload_bytes=300_000,
            observation={("graph",): ObjectSpec()},
            action={("say",): ObjectSpec()},
        ),
        **THREADED,
        keep_infos=True,
    )
    engine.reset(seed=0)
    counts = np.zeros(6, int)

    def words(ids):
        return {("say",): [f"{i} {counts[i]} " + "x" * 100_000 for i in ids]}

    engine.send(words(range(6)))
    for _ in range(60):
        batch = engine.recv(min_envs=1)
        said = [
            info["action"]["say"].split()[:2] == [str(i), str(counts[i])]
            for i, info in zip(batch.env_ids, batch.infos, strict=True)
        ]
        assert all(said)
        counts[batch.env_ids] += 1
        assert [info["count"] for info in batch.infos] == counts[batch.env_ids].tolist()
        engine.send(words(batch.env_ids), env_ids=batch.env_ids.tolist())
    engine.recv()


def test_all_is_all_whoever_comes_late(open_engine, gate):
    """A wait for all is not ended by those that were asked for later and came first."""
    engine = open_engine(factories_with({0: at_gate(gate)}, 3), num_processes=1, env_threads=True)
    engine.reset(seed=0)
    engine.send(NOW[:1], env_ids=[0])
    gate.wait_reached(timeout=30)
    backend = engine._backend
    for t in range(20):
        engine.send(NOW[:2] + t, env_ids=[1, 2])
        assert engine.recv(min_envs=2).env_ids.tolist() == [1, 2]
        assert not backend.all_done()
    gate.open()
    assert backend.wait(backend.all_done, engine._deadline(30), for_all=True)
    assert engine.recv().env_ids.tolist() == [0]


def test_errors_are_told_one_by_one(open_engine):
    faults = {i: [Fault(how=How.RAISE, number=2)] for i in range(4)}
    engine = open_engine(factories_with(faults), **THREADED)
    engine.reset(seed=0)
    engine.step(NOW)
    with pytest.raises(EnvError) as caught:
        engine.step(NOW)
    assert [failure.env_id for failure in caught.value.failures] == [0, 1, 2, 3]
    assert len(engine.step(NOW)) == 4


# --- cores -------------------------------------------------------------------------


@needs_affinity
@pytest.mark.parametrize("env_threads", [False, True])
def test_workers_run_on_their_cores(open_engine, env_threads):
    masks = [{CORES[0]}, {CORES[-1]}]
    factories = [TracedFactory(name=f"env{i}") for i in range(4)]
    engine = open_engine(factories, num_processes=2, env_threads=env_threads, worker_affinity=masks)
    cores = engine.call("native_cores")
    assert cores == [[CORES[0]], [CORES[0]], [CORES[-1]], [CORES[-1]]]
    assert [os.sched_getaffinity(pid) for pid in engine.worker_pids] == masks
    assert sorted(os.sched_getaffinity(0)) == CORES
    engine.reset(seed=0)
    assert len(engine.step(NOW)) == 4


@needs_affinity
@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([{0}], "one collection of cores per worker"),
        ([{0}] * 3, "one collection of cores per worker"),
        ([{0}, set()], "none of them empty"),
        ([{0}, {100_000}], r"worker 1 cannot have the cores \[100000\]"),
        ([{0}, {0.5}], "core numbers"),
        ([{0}, {True}], "core numbers"),
        ([0, 1], "core numbers"),
        (3, "core numbers"),
    ],
)
def test_wrong_cores_are_refused_before_anything_starts(monkeypatch, masks, words):
    monkeypatch.setattr("shoal.engine.backends.crew.Crew.start", None)
    if isinstance(masks, list):
        masks = [{CORES[0]} if mask == {0} else mask for mask in masks]
    with pytest.raises(UsageError, match=words):
        Engine(factories_with({}), num_processes=2, worker_affinity=masks)


def test_platforms_without_cores_to_choose(monkeypatch):
    monkeypatch.delattr("os.sched_setaffinity", raising=False)
    with pytest.raises(UsageError, match="platform"):
        Engine(factories_with({}), num_processes=2, worker_affinity=[{0}, {0}])


@pytest.mark.parametrize("option", [{"env_threads": True}, {"worker_affinity": [{0}]}])
def test_options_of_worker_processes_need_them(option):
    for backend in ("serial", "threads", "coroutines"):
        with pytest.raises(UsageError, match="worker processes"):
            EngineConfig(backend=backend, **option)
