"""The figures of a pool: by a clock of the test, and over envs that run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import AsyncEnvPool
from shoal.torchrl.pool_requests import RESET, STEP
from shoal.torchrl.pool_stats import PoolStats


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def ids(*numbers):
    return np.asarray(numbers)


def test_spans_of_one_env(clock):
    ready_at = np.zeros(2)
    stats = PoolStats(2, ready_at, clock)
    stats.note_sent(ids(1), 100.0)
    ready_at[1], clock.now = 103.0, 104.0
    stats.note_received(ids(1), RESET, 2)
    clock.now = 109.0
    stats.note_sent(ids(1), 109.0)
    ready_at[1], clock.now = 110.0, 120.0
    stats.note_received(ids(1), STEP, 1)
    found = stats.snapshot(reset=True)
    assert found["per_env"] == {
        "steps": [0, 1],
        "resets": [0, 1],
        "busy_s": [0.0, 4.0],
        "dwell_s": [0.0, 11.0],
        "waiting_s": [0.0, 5.0],
    }
    assert (found["steps"], found["resets"], found["items"], found["batches"]) == (1, 1, 2, 2)
    assert found["avg_env_ms"] == 2000
    assert found["avg_observation_to_batch_ms"] == 5500
    assert found["avg_batch_to_action_ms"] == 5000
    assert found["batch_fill_ratio"] == 2 / 3
    assert found["partial_batch_fraction"] == 0.5
    assert found["elapsed_s"] == 20
    assert found["steps_per_s"] == 1 / 20
    assert found["consumer_busy_fraction"] == 5 / 20
    assert found["slowest_envs"] == [(1, 2000.0)]
    clock.now = 130.0
    again = stats.snapshot(reset=False)
    assert (again["items"], again["batches"], again["elapsed_s"]) == (0, 0, 10)
    assert again["consumer_busy_fraction"] == 1.0  # it has held env 1 all the time


def test_envs_that_were_held_and_others_go_together(clock):
    ready_at = np.zeros(3)
    stats = PoolStats(3, ready_at, clock)
    stats.note_rows(ids(0, 2), 100.0, is_reset=True)
    clock.now = 102.0
    stats.note_sent(ids(0, 1), 102.0)
    clock.now = 103.0
    stats.note_sent(ids(2), 103.0)
    found = stats.snapshot(reset=False)
    assert found["per_env"]["waiting_s"] == [2.0, 0.0, 3.0]
    assert found["consumer_busy_fraction"] == 1.0
    assert found["avg_batch_to_action_ms"] == 2500


@pytest.mark.parametrize("backend", ["serial", "threading", "multiprocessing"])
def test_a_running_pool_counts(backend):
    with AsyncEnvPool(["CartPole-v1"] * 3, backend=backend) as pool:
        root = pool.rand_action(pool.reset())
        pool.async_step_and_maybe_reset_send(root[:2])
        pool.async_step_and_maybe_reset_recv(min_get=2)
        pool.async_reset_send(env_index=[2])
        pool.async_reset_recv()
        found = pool.stats(reset=True)
        assert found["per_env"]["steps"] == [1, 1, 0]
        assert found["per_env"]["resets"] == [1, 1, 2]
        assert all(span >= 0 for span in found["per_env"]["busy_s"])
        assert all(span >= 0 for span in found["per_env"]["dwell_s"])
        assert min(found["per_env"]["waiting_s"]) > 0
        assert 0 < found["consumer_busy_fraction"] <= 1
        assert {i for i, _ in found["slowest_envs"]} == {0, 1, 2}
        assert pool.stats()["items"] == 0
    assert pool.stats() == {}


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 3), min_size=1), st.booleans(), st.booleans()),
        max_size=60,
    ),
    st.integers(1, 7),
)
def test_sums_equal_those_of_one_event_at_a_time(calls, every):
    clock, ready_at = Clock(), np.zeros(4)
    stats = PoolStats(4, ready_at, clock)
    spans = {"busy_s": [0.0] * 4, "dwell_s": [0.0] * 4, "waiting_s": [0.0] * 4}
    sent, received, caller_s, held_since = {}, {}, 0.0, None
    for number, (named, is_reset, some_fail) in enumerate(calls):
        clock.now += 1.0
        idle = sorted(i for i in named if i not in sent)
        for i in idle:
            if i in received:
                spans["waiting_s"][i] += clock.now - received.pop(i)
            sent[i] = clock.now
        if held_since is not None and not received:
            caller_s += clock.now - held_since
            held_since = None
        if idle:
            stats.note_sent(np.asarray(idle), clock.now)
        if number % every == 0:
            assert stats.snapshot(reset=False)["per_env"]["waiting_s"] == spans["waiting_s"]
        back = sorted(sent)[: 1 + number % 3]
        failed = back[:1] if some_fail else []
        for i in back:
            ready_at[i] = clock.now + 0.25
        clock.now += 1.0
        came = [i for i in back if i not in failed]
        for i in back:
            began = sent.pop(i)
            if i in came:
                spans["busy_s"][i] += ready_at[i] - began
                spans["dwell_s"][i] += clock.now - ready_at[i]
                received[i] = clock.now
        if came:
            held_since = clock.now if held_since is None else held_since
            stats.note_received(np.asarray(came), RESET if is_reset else STEP, len(came))
    if held_since is not None:
        caller_s += clock.now - held_since
    found = stats.snapshot(reset=False)
    elapsed_s = clock.now - 100.0
    assert {name: found["per_env"][name] for name in spans} == spans
    assert found["consumer_busy_fraction"] == (caller_s / elapsed_s if elapsed_s else 0.0)


def test_a_long_log_is_summed_up_on_the_way(clock):
    ready_at = np.zeros(2)
    stats = PoolStats(2, ready_at, clock)
    for _ in range(10_000):
        stats.note_sent(ids(0), clock.now)
        ready_at[0] = clock.now + 1
        clock.now += 2.0
        stats.note_received(ids(0), STEP, 1)
    found = stats.snapshot(reset=False)
    assert found["per_env"]["steps"] == [10_000, 0]
    assert found["per_env"]["busy_s"] == [10_000.0, 0.0]
