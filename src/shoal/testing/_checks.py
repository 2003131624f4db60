"""What the checks of backends share: the list of them, scripted envs, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine import Batch, Engine
from shoal.testing.scripted import Fault, ScriptedFactory

if TYPE_CHECKING:
    from collections.abc import Iterator


__all__ = [
    "CHECKS",
    "NUM_ENVS",
    "Check",
    "MakeEngine",
    "actions_of",
    "assert_same_batch",
    "check",
    "factories_of",
    "faulty",
    "lone_episodes",
    "raises",
]

MakeEngine = Callable[..., Engine]
Check = Callable[[MakeEngine], None]
CHECKS: list[Check] = []

NUM_ENVS = 4


def check(function: Check) -> Check:
    """Adds a check to the list."""
    CHECKS.append(function)
    return function


def assert_same_batch(actual: Batch, expected: Batch) -> None:
    """Raises `AssertionError` unless both batches hold the same, bit for bit."""
    for name in ("env_ids", "reward", "terminated", "truncated", "reset_rows"):
        _assert_same_array(getattr(actual, name), getattr(expected, name), name)
    for name in ("observation", "final_observation", "info"):
        leaves, others = getattr(actual, name), getattr(expected, name)
        assert list(leaves) == list(others), f"{name}: {list(leaves)} != {list(others)}"
        for path in leaves:
            _assert_same_array(leaves[path], others[path], f"{name} {path}")
    for name in ("infos", "reset_infos"):
        infos, other_infos = getattr(actual, name), getattr(expected, name)
        assert repr(infos) == repr(other_infos), f"{name}: {infos} != {other_infos}"


def _assert_same_array(actual: Any, expected: Any, name: str) -> None:
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
    same = (
        actual.tolist() == expected.tolist()
        if actual.dtype == object
        else actual.tobytes() == expected.tobytes()
    )
    assert same, f"{name}: {actual} != {expected}"


@contextmanager
def raises(kind: type[BaseException], words: str = "") -> Iterator[list[Any]]:
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"{kind.__name__} was not raised"
    assert words in str(caught[0]), f"{words!r} is not in {caught[0]}"


def factories_of(num_envs: int = NUM_ENVS, **script: Any) -> list[ScriptedFactory]:
    return [ScriptedFactory(name=f"env{i}", **script) for i in range(num_envs)]


def faulty(env_id: int, *faults: Fault, **script: Any) -> list[ScriptedFactory]:
    factories = factories_of(**script)
    factories[env_id] = replace(factories[env_id], faults=faults)
    return factories


def actions_of(*values: int) -> Any:
    return np.asarray(values or range(NUM_ENVS), np.int64)


def lone_episodes(
    factories: Sequence[ScriptedFactory], seed: int, actions: Sequence[Any]
) -> list[list[tuple[float, int, float]]]:
    """Steps each env alone; returns reward, count and first draw of every step."""
    histories = []
    for env_id, factory in enumerate(factories):
        env = factory()
        env.reset(seed=seed + env_id)
        history = []
        for step_actions in actions:
            observation, reward, terminated, truncated, _ = env.step(int(step_actions[env_id]))
            if terminated or truncated:
                observation, _ = env.reset()
            history.append((reward, int(observation["count"]), float(observation["draw"][0])))
        histories.append(history)
    return histories
