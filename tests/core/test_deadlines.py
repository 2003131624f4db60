"""Time left, on a clock that the test moves."""

from __future__ import annotations

import math

import pytest

from shoal.engine.core.deadline import NEVER, Deadline
from shoal.errors import UsageError


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


def test_time_runs_out(clock):
    deadline = Deadline.after(2.0, clock)
    assert (deadline.left_s(), deadline.left_ms(), deadline.expired()) == (2.0, 2000, False)
    clock.now += 1.9996
    assert deadline.left_ms() == 1  # rounded up: a poll must not end too early
    assert not deadline.expired()
    clock.now += 5
    assert (deadline.left_s(), deadline.left_ms(), deadline.expired()) == (0.0, 0, True)
    assert deadline.timeout_s == 2.0


def test_no_time_at_all(clock):
    assert Deadline.after(0, clock).expired()


@pytest.mark.parametrize("limit", [None, math.inf])
def test_no_limit(limit, clock):
    deadline = Deadline.after(limit, clock)
    clock.now += 1e9
    assert (deadline.left_s(), deadline.left_ms(), deadline.expired()) == (math.inf, -1, False)


@pytest.mark.parametrize("wrong", [-1, -0.001, math.nan, "soon", [1]])
def test_wrong_limits_are_refused(wrong):
    with pytest.raises(UsageError, match="timeout"):
        Deadline.after(wrong)


def test_the_earlier_one_counts(clock):
    deadline = Deadline.after(10, clock)
    assert deadline.at_most(3).left_s() == 3
    assert deadline.at_most(30) is deadline
    clock.now += 9
    assert deadline.at_most(3) is deadline
    assert NEVER.at_most(1).timeout_s == 1
