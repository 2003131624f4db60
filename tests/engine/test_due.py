"""One who waits for several results is not woken for each of them, and misses none."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from thread_envs import at_gate, factories_with

from shoal.engine.concurrent import ConcurrentEngine
from shoal.engine.core.deadline import Deadline

LONG = 30.0


@pytest.fixture
def engine(make_gate):
    gates = [make_gate(f"gate{i}") for i in range(4)]
    factories = factories_with({i: at_gate(gate) for i, gate in enumerate(gates)})
    with ConcurrentEngine(factories, backend="threads") as made:
        made.reset_rows(None)
        made.send_steps(np.zeros(4, np.int64), None, autoreset=True)
        for gate in gates:
            gate.wait_reached(timeout=LONG)
        made.gates = gates
        yield made


class Want:
    """Waits in a thread for some number of results, and counts how often it looks."""

    def __init__(self, engine, number):
        self._engine, self._number = engine, number
        self.num_looks = 0
        self.found = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def is_ready(self):
        status = self._engine.rows.status
        return int(np.count_nonzero(status[self._engine.in_flight])) >= self._number

    def _pick(self):
        self.num_looks += 1
        if not self.is_ready():
            return None
        ids = (self._engine.in_flight & (self._engine.rows.status != 0)).nonzero()[0]
        self._engine.take(ids)
        return ids.tolist()

    def _wait(self):
        self.found = self._engine.wait(self._pick, Deadline.after(LONG), self.is_ready)

    def join(self):
        self._thread.join(LONG)
        assert not self._thread.is_alive()
        return self.found


def until(is_so):
    deadline = Deadline.after(LONG)
    while not is_so():
        assert not deadline.expired()


def open_one(engine, env_id):
    engine.gates[env_id].open()
    until(lambda: engine.rows.status[env_id])


def test_results_that_are_not_enough_wake_nobody(engine):
    waiter = Want(engine, 4)
    until(lambda: waiter.num_looks >= 2)  # at first, and once armed
    before = waiter.num_looks
    for env_id in (2, 0, 3):
        open_one(engine, env_id)
    looked_in_between = waiter.num_looks - before
    open_one(engine, 1)
    assert waiter.join() == [0, 1, 2, 3]
    # A look-up once in a second is no wake-up, but it counts.
    assert looked_in_between <= 2


def test_another_one_who_needs_less_is_told(engine):
    patient = Want(engine, 3)
    until(lambda: patient.num_looks >= 2)
    hasty = Want(engine, 1)
    until(lambda: hasty.num_looks >= 2)
    open_one(engine, 2)
    assert hasty.join() == [2]
    for env_id in (0, 1, 3):
        open_one(engine, env_id)
    assert patient.join() == [0, 1, 3]
