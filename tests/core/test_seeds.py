"""The seed of each env."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.core.seeds import next_seed, seed_chain, spread_seed
from shoal.errors import UsageError


@given(seed=st.integers(0, 2**63), num_envs=st.integers(1, 6))
def test_a_chain_can_be_cut_anywhere(seed, num_envs):
    seeds, following = seed_chain(seed, num_envs)
    assert seeds[0] == seed
    assert [*seeds[1:], following] == [next_seed(one) for one in seeds]
    assert all(0 <= one < 2**32 for one in seeds[1:])
    first, middle = seed_chain(seed, 1)
    assert first == [seed]
    assert seed_chain(middle, num_envs)[0][:-1] == [*seeds, following][1:-1]


def test_the_chain_is_the_one_of_torchrl():
    # What torchrl._utils.seed_generator (0.14) returns.
    assert seed_chain(0, 3) == ([0, *_chain_of(0, 2)], _chain_of(0, 3)[-1])


def _chain_of(seed, length):
    chain = []
    for _ in range(length):
        rng = np.random.default_rng(seed)
        seed = int.from_bytes(rng.bytes(8), "big") % (2**32 - 1)
        chain.append(seed)
    return chain


def test_static_seeds_are_all_the_same():
    assert seed_chain(np.int64(5), 3, static=True) == ([5, 5, 5], 5)


@pytest.mark.parametrize("wrong", [-1, True, 1.5, "1", None])
def test_wrong_seeds_are_refused(wrong):
    with pytest.raises(UsageError, match="seed is an integer"):
        seed_chain(wrong, 2)


def test_one_seed_spreads_and_a_list_is_taken():
    assert spread_seed(None, 2) == [None, None]
    assert spread_seed(np.int32(3), 3) == [3, 4, 5]
    assert spread_seed([7, None], 2) == [7, None]
    with pytest.raises(UsageError, match="2 seeds"):
        spread_seed([1], 2)
