"""Who may touch a row: random legal and illegal moves against a plain set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.engine.core.slots import SlotTable
from shoal.errors import PendingCallError, UsageError

NUM_ENVS = 5
some_ids = st.sets(st.integers(0, NUM_ENVS - 1), min_size=1).map(sorted)


class SlotMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = SlotTable(NUM_ENVS)
        self.in_flight: set[int] = set()

    @rule(ids=some_ids)
    def hand_over(self, ids):
        if self.in_flight & set(ids):
            with pytest.raises(PendingCallError, match="have not been received"):
                self.table.check_idle(ids, "send")
            return
        self.table.check_idle(ids, "send")
        self.table.hand_over(np.asarray(ids))
        self.in_flight |= set(ids)

    @rule()
    def hand_all_over(self):
        if self.in_flight:
            with pytest.raises(PendingCallError):
                self.table.check_idle(None, "step")
            return
        self.table.check_idle(None, "step")
        self.table.hand_over(None)
        self.in_flight = set(range(NUM_ENVS))

    @rule(ids=some_ids)
    def take_back(self, ids):
        ids = sorted(self.in_flight & set(ids))
        self.table.take_back(np.asarray(ids, np.int64))
        self.in_flight -= set(ids)

    @rule()
    def take_all_back(self):
        self.table.take_back(None)
        self.in_flight = set()

    @invariant()
    def agrees(self):
        assert self.table.num_in_flight == len(self.in_flight)
        assert np.flatnonzero(self.table.in_flight).tolist() == sorted(self.in_flight)
        assert set(np.flatnonzero(self.table.in_flight)) == self.in_flight


TestSlotMachine = SlotMachine.TestCase


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "empty"),
        ([5], "no env 5"),
        ([-1], "no env -1"),
        ([1, 1], "twice"),
        ([0.5], "integers"),
        ([True], "integers"),
        (["1"], "integers"),
        ([[1], [2]], "integers"),
    ],
)
def test_wrong_ids_are_refused(ids, words):
    with pytest.raises(UsageError, match=words):
        SlotTable(NUM_ENVS).check_ids(ids)


def test_ids_come_back_sorted():
    for ids in ([3, 0, 2], (3, 0, 2), np.array([3, 0, 2], np.uint8), iter([3, 0, 2])):
        checked = SlotTable(NUM_ENVS).check_ids(ids)
        assert checked.tolist() == [0, 2, 3]
        assert checked.dtype == np.int64
