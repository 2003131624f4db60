"""Waiting for a backend without using it: `wake_fds, arm, doze, poke, take_news`."""

from __future__ import annotations

import os
import select
import signal
import threading

import numpy as np
import pytest
from thread_envs import at_gate, factories_with

from shoal.engine import Engine
from shoal.engine.core.deadline import Deadline
from shoal.errors import WorkerDied
from shoal.testing import Fault, How, ScriptedFactory

BACKENDS = {
    "threads": {"backend": "threads"},
    "two-workers": {"num_processes": 2},
    "caller-steps": {"num_processes": 1, "caller_steps": True},
    "threaded-workers": {"num_processes": 2, "env_threads": True},
}
NOW = np.arange(4)
LONG, NO_TIME = 30.0, 0.0


def _doze_until(backend, is_so):
    """Waits as a layer above does: it looks, dozes, takes in what there is, and looks again."""
    deadline = Deadline.after(LONG)
    while not is_so():
        news = backend.doze(deadline)
        assert news, "nothing came"
        backend.take_news(news)


def _drain(backend):
    while news := backend.doze(Deadline.after(NO_TIME)):
        backend.take_news(news)


def _is_readable(fds):
    return bool(select.select(fds, [], [], 0)[0])


@pytest.fixture(params=BACKENDS)
def options(request):
    return BACKENDS[request.param]


def test_each_result_makes_a_noise_once_armed(open_engine, make_gate, options):
    gates = [make_gate(f"gate{i}") for i in (0, 2)]
    faults = {0: at_gate(gates[0]), 2: at_gate(gates[1])}
    if "caller_steps" in options:
        faults.pop(2)  # the caller itself would stand there
    engine = open_engine(factories_with(faults), **options)
    engine.reset(seed=0)
    backend = engine._backend
    backend.arm(True)
    _drain(backend)
    engine.send(NOW)
    for env_id in faults:
        gate = gates[env_id // 2]
        gate.wait_reached(timeout=30)
        _drain(backend)
        assert engine.rows.status[env_id] == 0
        thread = threading.Thread(target=gate.open)
        thread.start()
        _doze_until(backend, lambda env_id=env_id: engine.rows.status[env_id])
        thread.join()
    backend.arm(False)
    assert len(engine.recv()) == 4


def test_descriptors_tell_an_event_loop(open_engine, gate, options):
    engine = open_engine(factories_with({0: at_gate(gate)}), **options)
    engine.reset(seed=0)
    backend = engine._backend
    backend.arm(True)
    engine.send(NOW[:1], env_ids=[0])
    gate.wait_reached(timeout=30)
    _drain(backend)
    gate.open()
    while not engine.rows.status[0]:
        assert select.select(backend.wake_fds(), [], [], LONG)[0]
        _drain(backend)
    backend.arm(False)
    engine.recv()


def test_a_poke_ends_one_doze(open_engine, options):
    engine = open_engine(factories_with({}), **options)
    backend = engine._backend
    _drain(backend)
    backend.poke()
    assert _is_readable(backend.wake_fds())
    assert backend.doze(Deadline.after(LONG))
    assert backend.doze(Deadline.after(NO_TIME)) == []
    ended = []
    thread = threading.Thread(target=lambda: ended.append(backend.doze(Deadline.after(LONG))))
    thread.start()
    backend.poke()
    thread.join()
    assert ended[0]
    backend.take_news(ended[0])


def test_others_use_it_meanwhile(open_engine, gate, options):
    """Calls and sends of one thread do not need the one that dozes, nor it them."""
    engine = open_engine(factories_with({0: at_gate(gate)}), **options)
    engine.reset(seed=0)
    backend = engine._backend
    engine.send(NOW[:1], env_ids=[0])
    gate.wait_reached(timeout=30)
    backend.arm(True)
    lock, started = threading.Lock(), threading.Event()

    def doze():
        started.set()
        deadline = Deadline.after(LONG)
        while True:
            news = backend.doze(deadline)
            with lock:
                backend.take_news(news)
                if engine.rows.status[0]:
                    return

    thread = threading.Thread(target=doze)
    thread.start()
    started.wait(timeout=30)
    for t in range(20):
        with lock:
            engine.send(NOW[1:] + t, env_ids=[1, 2, 3])
        if "env_threads" not in options and "num_processes" in options:
            break  # env 1 stands behind env 0
        while not engine.rows.status[1:].all():
            pass
        with lock:
            assert len(engine.recv(min_envs=3)) == 3
    gate.open()
    thread.join(timeout=30)
    assert not thread.is_alive()
    backend.arm(False)
    engine.recv()


def test_a_wait_leaves_it_armed(open_engine, gate, options):
    engine = open_engine(factories_with({0: at_gate(gate, number=3)}), **options)
    engine.reset(seed=0)
    backend = engine._backend
    backend.arm(True)
    engine.step(NOW)
    engine.send(NOW)
    engine.recv()
    _drain(backend)
    engine.send(NOW[:1], env_ids=[0])
    gate.wait_reached(timeout=30)
    _drain(backend)
    gate.open()
    _doze_until(backend, lambda: engine.rows.status[0])
    engine.recv()
    backend.arm(False)
    engine.step(NOW)


def test_a_wait_of_others_takes_no_news_away(open_engine, options):
    """Whoever watches the descriptors hears of what a wait has heard."""
    engine = open_engine(factories_with({}), **options)
    backend = engine._backend
    backend.arm(True)
    _drain(backend)
    engine.send(NOW)
    backend.wait(backend.all_done, Deadline.after(LONG), for_all=True)
    if not backend.doze(Deadline.after(NO_TIME)):
        # It had nothing to wait for, so nothing was taken away either.
        assert engine.rows.status.all()
    engine.recv()
    backend.arm(False)


@pytest.mark.parametrize("how", [How.SYS_EXIT, How.SIGKILL], ids=lambda how: how.name)
def test_a_death_ends_a_doze(open_engine, options, how):
    if options == BACKENDS["threads"] and how is How.SIGKILL:
        pytest.skip("it would be the test's own process")
    engine = open_engine(factories_with({0: [Fault(how=how)]}), **options)
    engine.reset(seed=0)
    backend = engine._backend
    backend.arm(True)
    engine.send(NOW[:1], env_ids=[0])
    for _ in range(2):  # told again, also if it was noticed before
        with pytest.raises(WorkerDied) as caught:
            _doze_until(backend, lambda: False)
        assert caught.value.worker_id == 0
        backend.poke()
    engine.close()


def test_closing_ends_a_doze(options):
    engine = Engine(factories_with({}), **options)
    backend = engine._backend
    _drain(backend)
    ended, started = [], threading.Event()

    def doze():
        started.set()
        ended.append(backend.doze(Deadline.after(LONG)))

    thread = threading.Thread(target=doze)
    thread.start()
    started.wait(timeout=30)
    engine.close()
    thread.join(timeout=30)
    assert ended[0]
    assert backend.doze(Deadline.after(LONG))
    backend.take_news(ended[0])
    backend.arm(False)
    backend.poke()


def _is_blocked(thread):
    """Returns whether a thread sleeps in the system."""
    with open(f"/proc/self/task/{thread.native_id}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "S"


def test_ctrl_c_ends_a_doze(open_engine, options):
    engine = open_engine(factories_with({}), **options)
    backend = engine._backend
    _drain(backend)
    main = threading.main_thread()

    def interrupt():
        while not _is_blocked(main):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come while the other thread starts
        try:
            thread.start()
            backend.doze(Deadline.after(LONG))
        finally:
            thread.join()
    engine.reset(seed=0)
    assert len(engine.step(NOW)) == 4


def test_where_nothing_happens_by_itself(open_engine):
    engine = open_engine([ScriptedFactory()], backend="serial")
    backend = engine._backend
    assert list(backend.wake_fds()) == []
    backend.arm(True)
    assert backend.doze(Deadline.after(LONG)) == []
    backend.poke()
    backend.take_news([])
    backend.arm(False)
