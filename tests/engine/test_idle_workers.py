"""Workers that have nothing to do sleep."""

from __future__ import annotations

import pytest

from shoal.engine import Engine
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.layout import Word
from shoal.testing.scripted import ScriptedFactory

KINDS = {
    "envs in turn": {"num_processes": 2},
    "envs on threads": {"num_processes": 2, "env_threads": True},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_worker_sleeps_after_everything_it_was_asked(options):
    with Engine([ScriptedFactory()] * 4, backend="processes", **options) as engine:

        def assert_asleep():
            words = engine.rows.words
            deadline = Deadline.after(20)
            while not words[:, Word.ASLEEP].all():
                assert not deadline.expired(), "a worker is busy with nothing"
            # One that goes on looking for work would take the flag back.
            before = [switches(pid) for pid in engine.worker_pids]
            engine.call("count")
            while not words[:, Word.ASLEEP].all():
                assert not deadline.expired(), "a worker is busy with nothing"
            after = [switches(pid) for pid in engine.worker_pids]
            assert all(new > old for new, old in zip(after, before, strict=True))

        engine.reset(seed=0)
        assert_asleep()
        engine.step([0] * 4)
        assert_asleep()
        engine.send([0], env_ids=[1])
        engine.recv()
        assert_asleep()


def switches(pid):
    with open(f"/proc/{pid}/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("voluntary")))
