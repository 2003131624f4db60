"""Envs that are not what was known of them before they ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, EnvCreator

from shoal import ParallelEnv, SerialEnv, SpecError


class Sized(EnvBase):
    """Observes as many ones as it was told to."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.size = size
        self.observation_spec = Composite(observation=Unbounded(size))
        self.action_spec = Unbounded(1)
        self.reward_spec = Unbounded(1)

    def _reset(self, tensordict: Any = None) -> TensorDict:
        return TensorDict({"observation": torch.zeros(self.size)}, [])

    def _step(self, tensordict: Any) -> TensorDict:
        done = torch.zeros(1, dtype=torch.bool)
        entries = {"observation": torch.ones(self.size), "reward": torch.zeros(1), "done": done}
        return TensorDict(entries, [])

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize(
    ("makers", "kwargs", "words"),
    [
        (Sized, [{"size": 2}, {"size": 3}], "give a list of functions"),
        (Sized, [{"size": 2}, {"size": torch.tensor([3, 3])}], "give a list of functions"),
        (lambda: EnvCreator(Sized).make_variant(size=3), None, "make_variant keeps old metadata"),
    ],
    ids=["kwargs", "kwargs with arrays", "a variant"],
)
def test_it_is_said_at_the_start(kind: Any, makers: Any, kwargs: Any, words: str) -> None:
    makers = makers if isinstance(makers, type) else makers()
    env = kind(2, makers, create_env_kwargs=kwargs)
    with pytest.raises(RuntimeError, match=words) as caught:
        env.reset()
    assert isinstance(caught.value, SpecError)
    assert env.is_closed


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_a_list_of_functions_may_differ(kind: Any) -> None:
    env = kind(2, [Sized, lambda: Sized(3)])
    data = env.rollout(3)
    assert [row["observation"].shape for row in data.unbind(0)] == [(3, 2), (3, 3)]
    env.close()
