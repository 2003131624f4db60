"""Which envs go to which worker, how many workers, who shares the work, who spins."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.core.plan import (
    assign_envs,
    caller_shares_work,
    choose_num_workers,
    cores_from_quota,
)
from shoal.engine.core.spinning import (
    SPIN_S,
    SpinAhead,
    SpinBudget,
    count_spinning_workers,
    engine_may_spin,
    spinning_is_safe,
)
from shoal.errors import UsageError


@given(num_envs=st.integers(1, 300), num_workers=st.integers(1, 64))
def test_envs_are_dealt_out_evenly_and_in_order(num_envs, num_workers):
    num_workers = min(num_envs, num_workers)
    ranges = assign_envs(num_envs, num_workers)
    assert len(ranges) == num_workers
    assert [env_id for ids in ranges for env_id in ids] == list(range(num_envs))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(
    num_envs=st.integers(1, 300),
    requested=st.none() | st.integers(1, 400),
    num_cores=st.integers(1, 128),
)
def test_no_worker_is_without_an_env(num_envs, requested, num_cores):
    num_workers = choose_num_workers(num_envs, requested, num_cores)
    assert 1 <= num_workers <= num_envs
    assert num_workers == min(num_envs, num_cores if requested is None else requested)


@pytest.mark.parametrize("wrong", [0, -1, 1.0, "2", True])
def test_wrong_numbers_of_workers_are_refused(wrong):
    with pytest.raises(UsageError, match="num_processes"):
        choose_num_workers(4, wrong, 2)


@pytest.mark.parametrize(
    ("cpu_max", "quota", "period", "cores"),
    [
        ("max 100000", None, None, math.inf),
        ("150000 100000", None, None, 1.5),
        (None, "200000", "100000", 2.0),
        (None, "-1", "100000", math.inf),
        (None, None, None, math.inf),
        ("", None, None, math.inf),
        ("12 0", None, None, math.inf),
        (None, "many", "100000", math.inf),
    ],
)
def test_cores_that_a_quota_allows(cpu_max, quota, period, cores):
    assert cores_from_quota(cpu_max, quota, period) == cores


@pytest.mark.parametrize(
    ("wish", "num_envs", "requested", "are_cheap", "shares"),
    [
        (None, 8, None, True, True),
        (None, 8, None, False, False),
        (None, 8, 2, True, False),
        (True, 8, 2, False, True),
        (False, 8, None, True, False),
        (True, 1, None, True, False),
    ],
)
def test_who_shares_the_work(wish, num_envs, requested, are_cheap, shares):
    assert caller_shares_work(wish, num_envs, requested, are_cheap=are_cheap) is shares


@given(num_workers=st.integers(1, 200), num_cores=st.integers(1, 128))
def test_never_more_spinners_than_cores(num_workers, num_cores):
    spinning = count_spinning_workers(num_workers, num_cores)
    assert 0 <= spinning <= num_workers
    assert spinning + engine_may_spin(num_workers, num_cores) <= num_cores


def test_flags_are_trusted_only_where_stores_keep_their_order():
    assert spinning_is_safe("x86_64")
    assert spinning_is_safe("AMD64")
    assert not spinning_is_safe("aarch64")
    assert not spinning_is_safe("riscv64")


def test_a_spin_ends_where_waits_outlast_it_and_comes_back():
    budget = SpinBudget(enabled=True)
    assert budget.budget_s == SPIN_S
    budget.note_wait(60.0)
    assert budget.budget_s == SPIN_S  # one pause says nothing
    for _ in range(50):
        budget.note_wait(2 * SPIN_S)
    assert budget.budget_s == 0.0
    for _ in range(50):
        budget.note_wait(0.0)
    assert budget.budget_s == SPIN_S


def test_a_spin_that_is_switched_off_stays_off():
    budget = SpinBudget(enabled=False)
    for waited_s in (0.0, 1.0, 0.0):
        assert budget.budget_s == 0.0
        budget.note_wait(waited_s)


def _wait_after(spin_s: float, length_s: float) -> float:
    """Returns what a wait takes after a spin: a sleeper is woken 40 us late."""
    left_s = max(length_s - spin_s, 0.0)
    return 5e-6 + left_s + (40e-6 if left_s > 30e-6 else 0.0)


@given(length_us=st.integers(45, 240), jitter_us=st.integers(0, 10))
def test_a_spin_ahead_ends_shortly_before_the_wait_it_knows(length_us: int, jitter_us: int) -> None:
    ahead = SpinAhead(enabled=True)
    late = 0
    for k in range(1000):
        length_s = (length_us + jitter_us * (-1) ** k) * 1e-6
        waited_s = _wait_after(ahead.spin_s, length_s)
        late += k >= 500 and waited_s > 45e-6
        ahead.note_wait(waited_s)
    assert length_us - 40 <= ahead.spin_s * 1e6 <= length_us + jitter_us
    assert late < 100, "woken late more than one time in five"


def test_a_spin_ahead_is_given_up_where_waits_are_long_and_comes_back() -> None:
    ahead = SpinAhead(enabled=True)
    for _ in range(500):
        ahead.note_wait(_wait_after(ahead.spin_s, 100e-6))
    assert ahead.spin_s > 0
    for _ in range(10):
        ahead.note_wait(_wait_after(ahead.spin_s, 2e-3))
    assert ahead.spin_s == 0
    for _ in range(500):
        ahead.note_wait(_wait_after(ahead.spin_s, 100e-6))
    assert ahead.spin_s > 50e-6


def test_nobody_spins_ahead_without_a_core_for_it() -> None:
    ahead = SpinAhead(enabled=False)
    for _ in range(100):
        ahead.note_wait(_wait_after(ahead.spin_s, 100e-6))
    assert ahead.spin_s == 0
