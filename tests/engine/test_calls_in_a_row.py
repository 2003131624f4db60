"""Calls that follow each other as fast as the answers come."""

from __future__ import annotations

import pytest

from shoal.testing import ScriptedFactory


@pytest.mark.stress
def test_no_call_is_lost(open_engine):
    """A worker once looked for the end of the stream and threw away the next call."""
    engine = open_engine([ScriptedFactory()] * 2, num_processes=2)
    for number in range(20_000):
        assert engine.call("echo", number, timeout=20) == [number] * 2
