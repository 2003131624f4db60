"""PARITY 1.4: what a user sees of how data travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import BOTH, acting, column, mask
from parity_envs import Counter, Talkative, Writer
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.testing.mocking_classes import CountingEnvWithString, EnvWithDynamicSpec

# Item 50's own error, items 51, 52 and 58 are about TorchRL's shared tensordicts; what they
# promise is tested here as far as it can be seen.


@pytest.mark.parametrize("kind", BOTH)
def test_item_050_each_worker_has_its_own_rows(kind: str, make: Any) -> None:
    env = make(kind, 5, Counter, create_env_kwargs=[{"start": 10 * n} for n in range(5)])
    assert column(env.reset()) == [0, 10, 20, 30, 40]
    stepped = env.step(acting(env, 1.0, 2.0, 3.0, 4.0, 5.0))
    assert column(stepped["next"]) == [1, 11, 21, 31, 41]
    assert column(stepped["next"], "reward") == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_item_051_closing_frees_the_shared_rows(make: Any) -> None:
    def blocks() -> list[str]:
        return [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line
        ]

    before = blocks()
    env = make("parallel", 2, Counter)
    root = env.reset()
    assert len(blocks()) > len(before)
    env.close()
    assert blocks() == before
    assert column(root) == [0, 0]  # what was returned is still there


@pytest.mark.parametrize("kind", BOTH)
def test_item_052_a_child_cannot_add_entries(kind: str, make: Any) -> None:
    env = make(kind, 2, Talkative)
    env.map(silence)
    env.reset()
    stepped = env.step(acting(env, 1.0))
    assert column(stepped["next"]) == [1, 1]
    assert "undeclared" not in stepped["next"].keys()  # noqa: SIM118


def silence(child: Any) -> None:
    import warnings

    warnings.filterwarnings("ignore", "a step was done")


@pytest.mark.parametrize("kind", BOTH)
def test_item_053_individual_results(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter, share_individual_td=True)
    data = env.rollout(3, return_contiguous=False)
    assert data["next", "observation"][..., 0].tolist() == [[1, 2, 3]] * 2
    root = env.reset()
    assert isinstance(root, LazyStackedTensorDict)
    assert len(root.tensordicts) == 2
    partial = env.reset(TensorDict({"_reset": mask(True, False)}, [2]))
    assert isinstance(partial, LazyStackedTensorDict)


@pytest.mark.parametrize("kind", BOTH)
def test_item_054_non_tensor_entries(kind: str, make: Any) -> None:
    env = make(kind, 3, Writer, create_env_kwargs=[{"letter": letter} for letter in "agx"])
    assert env.reset()["text"] == ["a", "g", "x"]
    assert env.step(acting(env, 1.0))["next", "text"] == ["b", "h", "y"]
    assert env._non_tensor_keys == ["text"]


@pytest.mark.parametrize("kind", BOTH)
def test_item_054_non_tensor_entries_of_torchrls_env(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnvWithString)
    data = env.rollout(3)
    texts = [data[n, t]["next", "string"] for n in range(2) for t in range(3)]
    assert all(isinstance(text, str) and len(text) >= 4 for text in texts)


@pytest.mark.parametrize("kind", BOTH)
def test_item_055_entries_without_a_fixed_shape(kind: str, make: Any) -> None:
    env = make(kind, 2, EnvWithDynamicSpec, create_env_kwargs=[{"max_count": 2}, {"max_count": 9}])
    root = env.reset()
    assert type(root) is TensorDict  # shapes agree: a dense stack
    assert root["observation"].shape == (2, 3, 1, 2)
    step = TensorDict({"action": torch.zeros(2, 2)}, [2])
    assert env.step(step.copy())["next", "observation"].shape == (2, 3, 2, 2)
    stepped, root = env.step_and_maybe_reset(step.copy())
    assert stepped["next", "observation"].shape == (2, 3, 3, 2)
    assert isinstance(root, LazyStackedTensorDict)  # one of them has just begun
    assert [row["observation"].shape for row in root.unbind(0)] == [(3, 1, 2), (3, 3, 2)]
    following = env.step(root.update(step.copy()))["next"]
    assert [row["observation"].shape for row in following.unbind(0)] == [(3, 2, 2), (3, 4, 2)]


@pytest.mark.parametrize("kind", BOTH)
def test_item_055_without_buffers_data_are_the_same(kind: str, make: Any) -> None:
    envs = [make(kind, 2, Counter, use_buffers=use) for use in (False, True)]
    rollouts = []
    for env in envs:
        env.set_seed(0)
        torch.manual_seed(0)
        rollouts.append(env.rollout(5))
    assert (rollouts[0] == rollouts[1]).all()


@pytest.mark.parametrize("kind", BOTH)
def test_item_056_children_get_declared_entries_only(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset()
    env.step(acting(env, 1.0, secret=torch.ones(2)))
    for keys in env.map(lambda child: child.step_keys):
        assert "action" in keys
        assert set(keys) <= {"action", "observation", "done", "terminated", "truncated"}
