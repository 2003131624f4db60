"""Batched envs that close themselves at the end of a test."""

from __future__ import annotations

import pytest
from parity_cases import open_batched


@pytest.fixture
def make():
    """Makes batched envs that are closed at the end of the test."""
    envs = []

    def make_one(kind, num_workers, maker, **options):
        envs.append(open_batched(kind, num_workers, maker, **options))
        return envs[-1]

    yield make_one
    for env in reversed(envs):
        env.close(raise_if_closed=False)
    envs.clear()  # pytest keeps this function until after the leak check
