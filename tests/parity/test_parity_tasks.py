"""PARITY 1.12 and 1.13: changing kwargs, and envs that differ."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from parity_cases import BOTH, acting, column
from parity_envs import Counter, Writer
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector


def tasks(child: Any, *options: dict[str, Any]) -> list[Any]:
    return [functools.partial(child, **each) for each in options]


@pytest.mark.parametrize("kind", BOTH)
def test_item_126_update_kwargs(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter, create_env_kwargs={"start": 1})
    env.update_kwargs({"length": 9})
    assert env.create_env_kwargs == [{"start": 1, "length": 9}] * 2
    env.update_kwargs([{"start": 5}, {"length": 3}])
    assert env.create_env_kwargs == [{"start": 5, "length": 9}, {"start": 1, "length": 3}]
    with pytest.raises(RuntimeError, match=r"(?s)3.*2"):
        env.update_kwargs([{"start": 7}] * 3)
    assert env.create_env_kwargs == [{"start": 5, "length": 9}, {"start": 1, "length": 3}]
    assert column(env.reset()) == [5, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_127_from_the_next_start_on(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset()
    env.update_kwargs({"start": 4})
    assert column(env.reset()) == [0, 0]
    env.close()
    assert column(env.reset()) == [4, 4]
    built = make(kind, 2, Counter, create_env_kwargs={"start": 4})
    assert (built.reset() == env.reset()).all()


@pytest.mark.parametrize("kind", BOTH)
def test_item_128_by_the_collector(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    policy = TensorDictModule(lambda seen: torch.ones(2, 1), ["observation"], ["action"])
    collector = Collector(
        env, policy, frames_per_batch=4, total_frames=4, create_env_kwargs={"start": 6}
    )
    (data,) = [batch.clone() for batch in collector]
    collector.shutdown()
    assert data["observation"][..., 0].tolist() == [[6, 7]] * 2


@pytest.mark.parametrize("kind", BOTH)
def test_item_129_different_keys(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks(Counter, {"key": "left", "start": 10}, {"key": "right"}))
    data = env.rollout(3, break_when_any_done=False, return_contiguous=False)
    assert "left" in data[0]["next"].keys()  # noqa: SIM118
    assert "right" not in data[0]["next"].keys()  # noqa: SIM118
    assert "left" not in data[1, 1]["next"].keys()  # noqa: SIM118
    assert "left" in data[0, 1].keys()  # noqa: SIM118
    assert data[0]["next", "left"].flatten().tolist() == [11, 12, 13]
    assert data[1]["next", "right"].flatten().tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", BOTH)
def test_item_130_different_shapes(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks(Counter, {"size": 1}, {"size": 3, "start": 5}))
    assert env.share_individual_td is True
    root = env.reset()
    assert isinstance(root, LazyStackedTensorDict)
    assert [row["observation"].tolist() for row in root.unbind(0)] == [[0], [5, 5, 5]]
    stepped = env.step(root.update(env.full_action_spec.zero()))
    rows = stepped["next"].unbind(0)
    assert [row["observation"].tolist() for row in rows] == [[1], [6, 6, 6]]


@pytest.mark.parametrize("kind", BOTH)
def test_item_130_different_shapes_through_an_episode(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks(Counter, {"size": 1, "length": 2}, {"size": 3, "length": 9}))
    data = env.rollout(4, break_when_any_done=False, return_contiguous=False)
    assert [row["observation"][0].item() for row in data[0].unbind(0)] == [0, 1, 0, 1]
    assert [row["next"]["observation"].tolist() for row in data[1].unbind(0)] == [
        [n] * 3 for n in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("kind", BOTH)
def test_item_130_different_actions(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks(Counter, {"action_size": 1}, {"action_size": 2}))
    root = env.rand_action(env.reset())
    stepped = env.step(root)
    for row in stepped.unbind(0):
        assert row["next", "reward"] == row["action"][:1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_131_different_functions_for_the_same(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks(Counter, {"start": 1}, {"start": 2}))
    assert env._single_task is False
    root = env.reset()
    assert type(root) is TensorDict
    assert column(root) == [1, 2]
    data = env.rollout(3)
    assert type(data) is TensorDict
    assert data["next", "observation"][..., 0].tolist() == [[2, 3, 4], [3, 4, 5]]


@pytest.mark.parametrize("kind", BOTH)
def test_item_131_gymnasium_envs_of_two_kinds(kind: str, make: Any) -> None:
    names = ("Pendulum-v1", "MountainCarContinuous-v0")
    env = make(kind, 2, [functools.partial(GymEnv, name) for name in names])
    env.set_seed(0)
    rows = env.reset().unbind(0)
    assert [row["observation"].shape for row in rows] == [(3,), (2,)]
    data = env.rollout(3, return_contiguous=False)
    assert data.batch_size == (2, 3)


@pytest.mark.parametrize("kind", BOTH)
def test_item_132_different_texts(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks(Writer, {"letter": "a"}, {"letter": "p"}))
    assert env.reset()["text"] == ["a", "p"]
    stepped = env.step(acting(env, 1.0))
    assert stepped["next", "text"] == ["b", "q"]


@pytest.mark.parametrize("kind", BOTH)
def test_item_133_identical_functions(kind: str, make: Any) -> None:
    env = make(kind, 3, [Counter] * 3, create_env_kwargs=[{"start": n} for n in range(3)])
    assert env._single_task is True
    assert env.share_individual_td is False
    assert column(env.reset()) == [0, 1, 2]
