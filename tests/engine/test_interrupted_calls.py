"""Ctrl-C while a message is written that the worker cannot take yet."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from backends import ONE_WORKER
from thread_envs import at_gate, factories_with


def test_a_call_that_was_cut_off_in_the_middle(open_engine, gate):
    """The worker waits for the rest of it, and gets that with the next call."""
    engine = open_engine(factories_with({0: at_gate(gate)}, 2), **ONE_WORKER)
    engine.reset(seed=0)
    engine.send(np.zeros(1, int), env_ids=[0])
    gate.wait_reached(timeout=30)
    [channel] = engine._backend._crew.channels
    pause = threading.Event()

    def interrupt():
        # More than the socket takes is left to write, and the worker stands at the gate.
        while not channel.has_unsent:
            pause.wait(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.call("echo", bytes(20 * 2**20), env_ids=[1])
    thread.join()
    assert channel.has_unsent
    gate.open()
    assert engine.call("echo", 5, env_ids=[1]) == [5]
    assert not channel.has_unsent
    # What was under way before is not lost.
    assert engine.recv().observation["count",].tolist() == [1]
    assert engine.reset(seed=0).observation["count",].tolist() == [0, 0]
