"""The harvest example learns from uneven envs on either backend, and sums up."""

from __future__ import annotations

import re

import pytest
from running import run


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_it_harvests_and_sums_up(backend: str) -> None:
    exitcode, out, err = run(
        "harvest.py", "--backend", backend, "--num-envs", "8", "--seconds", "2"
    )
    assert (exitcode, err) == (0, "")
    for name in ("env-steps/s", "envs in a batch", "first half that is ready", "all together"):
        assert name in out
    # Half of the envs at a time against all of them.
    harvested, together = map(float, re.findall(r"envs in a batch\D+([\d.]+)\D+([\d.]+)", out)[0])
    assert 4 <= harvested < together == 8
    [times] = re.findall(r"harvesting is ([\d.]+) x", out)
    assert float(times) > 1
    assert re.search(r"batches held \d+% of the envs in flight", out)


def test_one_env_is_enough() -> None:
    exitcode, out, err = run("harvest.py", "--num-envs", "1", "--seconds", "1")
    assert (exitcode, err) == (0, "")
    assert "harvesting is" in out
