"""The life of a worker: every event in every state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.core.lifecycle import Worker, WorkerState, on_exit, on_stop, on_up

S = WorkerState
EVENTS = {"up": on_up, "stop": on_stop, "exit": lambda worker: on_exit(worker, -9)}
TABLE = {
    (S.STARTING, "up"): S.UP,
    (S.STARTING, "stop"): S.STOPPING,
    (S.STARTING, "exit"): S.DIED,
    (S.UP, "up"): S.UP,
    (S.UP, "stop"): S.STOPPING,
    (S.UP, "exit"): S.DIED,
    (S.STOPPING, "up"): S.STOPPING,
    (S.STOPPING, "stop"): S.STOPPING,
    (S.STOPPING, "exit"): S.STOPPED,
    **{(state, event): state for state in (S.STOPPED, S.DIED) for event in EVENTS},
}


@pytest.mark.parametrize(("state", "event"), TABLE)
def test_every_event_in_every_state(state, event):
    worker = replace(Worker(1, range(2, 4)), state=state)
    after = EVENTS[event](worker)
    assert after.state is TABLE[state, event]
    assert (after.worker_id, after.env_ids) == (1, range(2, 4))
    assert after.has_ended == (after.state in (S.STOPPED, S.DIED))


@given(events=st.lists(st.sampled_from(sorted(EVENTS)), max_size=8))
def test_an_end_is_final_and_keeps_its_exit_code(events):
    worker = Worker(0, range(1))
    for event in events:
        before, worker = worker, EVENTS[event](worker)
        if before.has_ended:
            assert worker == before
    assert (worker.exitcode == -9) == ("exit" in events)
