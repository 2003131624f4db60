"""Any backend equals the serial one, whatever is called in whatever order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from backends import PROCESSES, SERIAL

from shoal.engine import ArraySpec, Engine, ObjectSpec
from shoal.errors import EnvError
from shoal.testing import Fault, How, ScriptedFactory
from shoal.testing.conformance import assert_same_batch

NUM_ENVS = 5
LEAVES = {
    ("count",): ArraySpec((), np.dtype(np.int64)),
    ("draw",): ArraySpec((3,), np.dtype(np.float32)),
    ("deep", "flag"): ArraySpec((2,), np.dtype(np.bool_)),
    ("graph",): ObjectSpec(),
}
INFO = {("count",): ArraySpec((), np.dtype(np.float32))}


def _factories(work_s):
    """Episodes of several lengths; some envs raise now and then."""
    script = ScriptedFactory(observation=LEAVES, info=INFO, work_s=work_s)
    return [
        replace(
            script,
            name=f"env{i}",
            episode_length=(0, 1, 3, 4, 7)[i],
            ends_by=("terminated", "truncated")[i % 2],
            reuses_buffers=i == 2,
            faults=[
                Fault(how=How.RAISE, at="step", number=9 + i),
                Fault(how=How.RAISE, at="reset", number=4 + i),
                Fault(how=How.REWARD, at="step", number=14 + i, value=None),
                Fault(how=How.RAISE, at="call", number=1 + i),
            ],
        )
        for i in range(NUM_ENVS)
    ]


class Schedule:
    """A random sequence of calls, the same for every engine that gets the same seed."""

    def __init__(self, engine, seed):
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.history = []

    def run(self, num_calls):
        verbs = [self.step, self.step, self.step_on, self.reset_some, self.send_some]
        verbs += [self.loop, self.seed, self.call]
        self.keep(lambda: self.engine.reset(seed=1))
        for _ in range(num_calls):
            verbs[self.rng.integers(len(verbs))]()
        return self.history

    def keep(self, call):
        try:
            self.history.append(call())
        except EnvError as error:
            failures = [(f.env_id, f.during, repr(f.__cause__)) for f in error.failures]
            self.history += [failures, error.batch]

    def actions(self, count=NUM_ENVS):
        return self.rng.integers(0, 50, count)

    def some(self):
        count = self.rng.integers(1, NUM_ENVS + 1)
        return self.rng.permutation(NUM_ENVS)[:count].tolist()

    def step(self):
        actions = self.actions()
        self.keep(lambda: self.engine.step(actions))

    def step_on(self):
        actions = self.actions()
        self.keep(lambda: self.engine.step(actions, autoreset=False))

    def loop(self):
        """Steps, then resets what has ended: what prepared resets are made for."""
        for _ in range(12):
            actions = self.actions()
            self.keep(lambda actions=actions: self.engine.step(actions, autoreset=False))
            ended = np.flatnonzero(self.engine.rows.terminated | self.engine.rows.truncated)
            if len(ended):
                self.keep(lambda ended=ended: self.engine.reset(env_ids=ended.tolist()))

    def reset_some(self):
        env_ids = self.some()
        seed = [None, 3, [7] * len(env_ids), [None] * len(env_ids)][self.rng.integers(4)]
        options = [None, {"level": 1}][self.rng.integers(2)]
        self.keep(lambda: self.engine.reset(env_ids=env_ids, seed=seed, options=options))

    def send_some(self):
        """Several sends, then receives until nothing is left; compared env by env."""
        autoreset = bool(self.rng.integers(2))
        env_ids = self.some()
        cut = self.rng.integers(1, len(env_ids) + 1)
        for ids in filter(None, (env_ids[:cut], env_ids[cut:])):
            self.engine.send(self.actions(len(ids)), env_ids=ids, autoreset=autoreset)
        rows = {}
        while self.engine.num_in_flight:
            try:
                batch = self.engine.recv(min_envs=1)
            except EnvError as error:
                rows |= {failure.env_id: repr(failure.__cause__) for failure in error.failures}
                batch = error.batch
            rows |= _by_env(batch)
        self.history.append(sorted(rows.items()))

    def seed(self):
        seed = int(self.rng.integers(100))
        self.keep(lambda: self.engine.seed(seed))

    def call(self):
        env_ids = self.some()
        self.keep(lambda: self.engine.call("count", env_ids=env_ids))


def _by_env(batch):
    if batch is None:
        return {}
    finals = dict(zip(batch.reset_rows.tolist(), range(len(batch.reset_rows)), strict=True))
    return {
        int(env_id): (
            [repr(leaf[k]) for leaf in batch.observation.values()],
            [repr(leaf[finals[k]]) for leaf in batch.final_observation.values() if k in finals],
            (batch.reward[k], batch.terminated[k], batch.truncated[k], batch.info["count",][k]),
            None if batch.infos is None else repr(batch.infos[k]),
        )
        for k, env_id in enumerate(batch.env_ids)
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", PROCESSES)
def test_same_calls_same_results(backend, seed):
    histories = []
    work_s = 0.0007 * (seed // 2)  # enough for the worker to publish each by itself
    for options in (SERIAL, PROCESSES[backend]):
        with Engine(_factories(work_s), keep_infos=bool(seed % 2), **options) as engine:
            histories.append(Schedule(engine, seed).run(60))
    expected, actual = histories
    assert len(actual) == len(expected)
    for entry, other in zip(actual, expected, strict=True):
        if hasattr(other, "env_ids"):
            assert_same_batch(entry, other)
        else:
            assert entry == other
