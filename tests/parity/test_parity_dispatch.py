"""PARITY 1.10: attributes and methods of the children."""

from __future__ import annotations

import os
from typing import Any

import pytest
from parity_cases import BOTH, acting, column, open_batched
from parity_envs import Counter
from torchrl.envs import EnvCreator, GymEnv, RewardSum, TransformedEnv

KWARGS = [{"start": n} for n in (1, 2, 3)]


@pytest.fixture(scope="module", params=BOTH)
def env(request: pytest.FixtureRequest) -> Any:
    """Returns an open env that no test of this module spoils."""
    made = open_batched(request.param, 3, Counter, create_env_kwargs=KWARGS)
    made.reset()
    yield made
    made.close()


def is_serial(env: Any) -> bool:
    return type(env).__name__ == "SerialEnv"


def test_item_111_public_names_are_looked_up_on_the_children(env: Any) -> None:
    assert list(env.length) == [100, 100, 100]
    assert env.add(1) == [2, 3, 4]
    assert env.add(1, b=10) == [12, 13, 14]


def test_item_111_private_names_too(env: Any) -> None:
    env.map(lambda child: setattr(child, "_mark", child.start))
    assert list(env._mark) == [1, 2, 3]


def test_item_112_and_113_values_and_methods(env: Any) -> None:
    value, method = env.length, env.add
    assert callable(method)
    if is_serial(env):
        assert value == [100, 100, 100]
    else:
        assert list(value) == [100, 100, 100]
        assert value() == [100, 100, 100]
        assert value() == list(value)  # asked anew every time
    pids = env.pid()
    assert (set(pids) == {os.getpid()}) is is_serial(env)


def test_item_114_the_class_comes_first(env: Any) -> None:
    assert env.num_workers == 3
    assert env.batch_size == (3,)
    assert env.is_closed is False
    assert env.close.__self__ is env


@pytest.mark.parametrize("name", ["__nothing__", "__torch_function__", "parent_channels"])
def test_item_114_names_that_are_never_dispatched(env: Any, name: str) -> None:
    before = env.map(lambda child: child.__dict__.setdefault("parent_channels", 1))
    assert before == [1, 1, 1]
    with pytest.raises(AttributeError):
        getattr(env, name)


@pytest.mark.parametrize("kind", BOTH)
def test_item_115_not_started(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    for name in ("add", "length"):
        with pytest.raises(RuntimeError, match=r"(?s)start"):
            getattr(env, name)
    assert env.is_closed
    env.reset()
    assert env.add(1) == [1, 1]
    env.close()
    with pytest.raises(RuntimeError, match=r"(?s)start"):
        env.add(1)
    assert env.is_closed


def test_item_116_missing_on_the_children(env: Any) -> None:
    with pytest.raises(AttributeError, match=r"(?s)colour.*Counter"):
        list(env.colour)
    assert not hasattr(env, "colour")
    assert env.add(0) == [1, 2, 3]


def test_item_117_the_env_itself_is_left_out(env: Any) -> None:
    assert env.num_given(1, 2) == [2, 2, 2]
    assert env.num_given(env) == [0, 0, 0]
    assert env.num_given(env, 5) == [1, 1, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_118_to_returns_nothing(kind: str, make: Any) -> None:
    env = make(kind, 2, lambda: TransformedEnv(Counter(), RewardSum()))
    env.reset()
    if kind == "parallel":
        assert env.base_env.to("cpu") == [None, None]
    assert env._call("to", "cpu") == [None, None]
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]


def test_item_119_properties_are_attributes(env: Any) -> None:
    assert list(env.doubled) == [2, 4, 6]
    assert type(env.doubled) is type(env.length)


@pytest.mark.parametrize("kind", BOTH)
def test_item_111_of_gymnasium_envs_inside_torchrls(kind: str, make: Any) -> None:
    env = make(kind, 2, EnvCreator(lambda: GymEnv("CartPole-v1")))
    env.reset()
    assert list(env.frame_skip) == [1, 1]
    assert [float(n) for n in env.map(lambda child: child._env.unwrapped.gravity)] == [9.8, 9.8]


def test_item_111_set_children_attr_is_seen_by_the_children(env: Any) -> None:
    env.set_children_attr("mood", "calm")
    assert list(env.mood) == ["calm"] * 3
    assert env.map(lambda child: child.mood) == ["calm"] * 3
