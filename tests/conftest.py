"""What all tests share: the leak check, engines that close themselves, gates."""

from __future__ import annotations

import signal

import hypothesis
import pytest

from shoal.engine import Engine
from shoal.testing import Gate, no_leaks

hypothesis.settings.register_profile(
    "shoal", deadline=None, derandomize=True, database=None, max_examples=50
)
hypothesis.settings.load_profile("shoal")


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive():
    """A shell that starts something in the background lets it ignore Ctrl-C, and so all below."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Every test has to take its processes, threads, descriptors and blocks with it."""
    with no_leaks():
        yield


@pytest.fixture
def open_engine():
    """Opens engines that are closed at the end of the test."""
    engines = []

    def open_one(factories, **options):
        engine = Engine(factories, **options)
        engines.append(engine)
        return engine

    yield open_one
    for engine in engines:
        engine.close(timeout=1)


@pytest.fixture
def make_gate(tmp_path):
    """Makes gates that are given up at the end of the test."""
    gates = []

    def make_one(name="gate"):
        gates.append(Gate(tmp_path, name))
        return gates[-1]

    yield make_one
    for gate in gates:
        gate.close()


@pytest.fixture
def gate(make_gate):
    """One gate."""
    return make_gate()
