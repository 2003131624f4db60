"""Pools that close themselves at the end of a test."""

from __future__ import annotations

import pytest
from pool_cases import open_named


@pytest.fixture
def pools():
    """Keeps pools until the end of the test, and closes them then."""
    kept = []
    yield kept
    for pool in kept:
        pool.close(raise_if_closed=False)
    kept.clear()  # pytest keeps this until after the leak check


@pytest.fixture
def open_pool(pools):
    """Opens pools of named envs; see `open_named`."""

    def open_one(way, num_envs=3, **options):
        pools.append(open_named(way, num_envs, **options))
        return pools[-1]

    return open_one
