"""What factories share with the caller, workers share too."""

from __future__ import annotations

import multiprocessing
import pickle

import cloudpickle
import numpy as np
import pytest
import torch
from torchrl.data.utils import CloudpickleWrapper

from shoal.engine.spec import ArraySpec, EnvSpec
from shoal.engine.system.sharing import dumps_sharing, loads_sharing

SPEC = EnvSpec(
    observation={(): ArraySpec((), np.dtype(np.int64))},
    action={(): ArraySpec((), np.dtype(np.int64))},
)


class Adding:
    """An env that adds its actions to what it was given."""

    spec = SPEC
    flatten_observation = build_action = None

    def __init__(self, add):
        self.add = add

    def reset(self, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return self.add(action), 0.0, False, False, {}

    def call(self, name, args, kwargs):
        raise AttributeError(name)

    def close(self):
        pass


class AddingFactory:
    shares_memory = True
    preload = ("torch",)

    def __init__(self, add):
        self.add = add

    def __call__(self):
        return Adding(self.add)


def test_a_tensor_is_shared_if_it_was_shared(open_engine):
    shared = torch.zeros(1, dtype=torch.int64).share_memory_()
    own = torch.zeros(1, dtype=torch.int64)

    def add(action):
        shared.add_(action)
        own.add_(action)
        return int(own)

    engine = open_engine([AddingFactory(add)] * 4, num_processes=2)
    engine.reset()
    batch = engine.step(np.arange(1, 5))
    assert int(shared) == 10
    assert int(own) == 0  # each worker has a copy, which its envs share
    assert not own.is_shared()
    assert batch.observation[()].tolist() == [1, 3, 3, 7]


@pytest.fixture(scope="module")
def number():
    """Made outside of any test: multiprocessing keeps the memory until the process ends."""
    return multiprocessing.get_context("spawn").Value("q", 0)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "in a pickler of its own"])
def test_a_number_with_a_lock_is_shared(open_engine, number, wrapped):
    number.value = 0

    def add(action):
        with number:
            number.value += int(action)
            return number.value

    factory = AddingFactory(CloudpickleWrapper(add) if wrapped else add)
    engine = open_engine([factory] * 4, num_processes=2)
    engine.reset()
    for _ in range(50):
        engine.step(np.arange(1, 5))
    assert number.value == 500


def test_picklers_are_as_they_were():
    table = cloudpickle.Pickler.dispatch_table
    _, fds = dumps_sharing([torch.zeros(3).share_memory_()])
    assert cloudpickle.Pickler.dispatch_table is table
    assert len(fds) == 1
    with pytest.raises(TypeError):
        dumps_sharing(iter_of_nothing_that_pickles())
    assert cloudpickle.Pickler.dispatch_table is table
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(multiprocessing.get_context("spawn").Lock())  # nobody is being started


def iter_of_nothing_that_pickles():
    yield 1


def test_what_is_not_shared_needs_no_descriptor():
    body, fds = dumps_sharing({"a": torch.arange(3), "b": torch.ones(2, dtype=torch.bfloat16)})
    assert fds == []
    back = loads_sharing(body, fds)
    assert back["a"].tolist() == [0, 1, 2]
    assert back["b"].dtype == torch.bfloat16
