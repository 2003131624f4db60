"""Pools of TorchRL envs: the same data as TorchRL's own serial env, whatever comes when."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from children_cases import SEED, assert_same, open_oracle
from children_envs import Counter, Teams, Words
from tensordict import LazyStackedTensorDict, lazy_stack
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import CountingEnv, EnvWithMetadata, NestedCountingEnv

from shoal import AsyncEnvPool

P = functools.partial
N, T = 4, 7
_FORK = {"backend": "multiprocessing", "mp_start_method": "fork"}
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "threads": {"backend": "threading"},
    "processes": {**_FORK, "envs_per_worker": 2},
}


def make_transformed(length: int = 2) -> Any:
    env = TransformedEnv(Counter(length), RewardSum())
    return env.append_transform(StepCounter(5))


ALIKE: dict[str, Any] = {
    "gym": P(GymEnv, "CartPole-v1", categorical_action_encoding=True),
    "counter": [P(Counter, length) for length in (2, 3, 5, 4)],
    "transformed": P(make_transformed, 3),
    "batch of 2": P(Counter, 2, batch_size=(2,)),
    "batch of 1": P(Counter, 2, batch_size=(1,)),
    "nested": P(NestedCountingEnv, max_steps=3),
    "data": EnvWithMetadata,
    "words": Words,
}
UNLIKE: dict[str, Any] = {
    "sizes": [P(Counter, 2, size=size) for size in (1, 2, 1, 3)],
    "teams": Teams,
}


def as_list(makers: Any) -> list[Any]:
    return list(makers) if isinstance(makers, list) else [makers] * N


def expected_rows(makers: Any) -> tuple[list[Any], dict[tuple[int, int], Any], list[Any]]:
    """Returns actions, and what TorchRL's serial env makes of them by step and env."""
    env = open_oracle(as_list(makers))
    torch.manual_seed(SEED)
    try:
        env.set_seed(SEED)
        root = env.reset()
        first = [row.clone() for row in root.unbind(0)]
        actions, rows = [], {}
        for t in range(T):
            action = env.full_action_spec.rand()
            actions.append(action.clone())
            stepped, root = env.step_and_maybe_reset(root.update(action))
            for i, pair in enumerate(zip(stepped.unbind(0), root.unbind(0), strict=True)):
                rows[t, i] = tuple(row.clone() for row in pair)
        return actions, rows, first
    finally:
        env.close(raise_if_closed=False)


def has_ended(following: Any) -> bool:
    flags = [key for key in following.keys(True, True) if "done" in (key, key[-1])]
    return any(bool(following.get(key).any()) for key in flags)


@functools.cache
def _expected(name: str) -> Any:
    return expected_rows({**ALIKE, **UNLIKE}[name])


def play_apart(pool: Any, actions: list[Any]) -> tuple[dict[tuple[int, int], Any], list[Any]]:
    """Steps the envs in an order of their own; returns what came, by step and env."""
    chance = random.Random(0)
    pool.set_seed(SEED)
    pool.async_reset_send()
    roots: list[Any] = [None] * N
    while any(root is None for root in roots):
        for row in pool.async_reset_recv().unbind(0):
            roots[row["env_index"]] = row
    first = [root.clone() for root in roots]
    steps, rows, idle = [0] * N, {}, list(range(N))
    while min(steps) < T:
        ready = [i for i in idle if steps[i] < T]
        chosen = chance.sample(ready, chance.randint(0, len(ready)))
        if chosen:
            sent = [roots[i].update(actions[steps[i]][i]) for i in chosen]
            pool.async_step_and_maybe_reset_send(lazy_stack(sent), env_index=chosen)
            idle = [i for i in idle if i not in chosen]
        if len(idle) == N:
            continue
        stepped, root = pool.async_step_and_maybe_reset_recv(max_get=chance.choice([1, 2, None]))
        for pair in zip(stepped.unbind(0), root.unbind(0), strict=True):
            i = pair[1]["env_index"]
            i = i if isinstance(i, int) else i[0]
            rows[steps[i], i] = pair
            roots[i] = pair[1].copy()
            steps[i] += 1
            idle.append(i)
    return rows, first


def assert_as_expected(name: str, pool: Any) -> None:
    actions, wanted, first = _expected(name)
    try:
        rows, roots = play_apart(pool, actions)
    finally:
        pool.close()
    for i in range(N):
        assert_same(roots[i].exclude("env_index"), first[i], f"root of {i}")
    assert rows.keys() == wanted.keys()
    for (t, i), pair in rows.items():
        (stepped, root), (right, right_root) = pair, wanted[t, i]
        assert_same(stepped.exclude("env_index"), right, f"{i} at {t}")
        # TorchRL zeroes actions in rows that were reset, unless all were; a row that
        # comes alone is all.
        left_out = pool.action_keys if has_ended(right["next"]) else []
        assert_same(
            root.exclude("env_index", *left_out), right_root.exclude(*left_out), f"root {i} at {t}"
        )


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("way", WAYS)
def test_children_that_are_alike(way: str, name: str) -> None:
    assert_as_expected(name, AsyncEnvPool(as_list(ALIKE[name]), **WAYS[way]))


@pytest.mark.parametrize("stack", ["maybe_dense", "lazy"])
@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("way", ["serial", "processes"])
def test_children_that_are_not(way: str, name: str, stack: str) -> None:
    pool = AsyncEnvPool(as_list(UNLIKE[name]), stack=stack, **WAYS[way])
    assert_as_expected(name, pool)


KEYS = [P(Counter, key="a"), P(Counter, key="b")]


@pytest.mark.parametrize("makers", [UNLIKE["sizes"], KEYS], ids=["sizes", "keys"])
def test_a_dense_stack_of_unlike_children_is_refused(makers: Any) -> None:
    with pytest.raises(RuntimeError, match="use stack='maybe_dense' or 'lazy'"):
        AsyncEnvPool(makers, backend="threading")


@pytest.mark.parametrize("way", WAYS)
def test_children_with_keys_of_their_own(way: str) -> None:
    pool = AsyncEnvPool(KEYS, stack="maybe_dense", **WAYS[way])
    try:
        pool.async_reset_send()
        root = pool.async_reset_recv(min_get=2)
        for _ in range(4):
            pool.async_step_and_maybe_reset_send(root.update(pool.full_action_spec.rand()))
            stepped, root = pool.async_step_and_maybe_reset_recv(min_get=2)
            for row, after, key in zip(stepped, root, "ab", strict=True):
                assert (
                    {"a", "b"} & set(row["next"].keys()) == {"a", "b"} & set(after.keys()) == {key}
                )
                if not row["next", "done"]:
                    assert torch.equal(row["next", key], after[key])
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["counter", "words", "batch of 2"])
@pytest.mark.parametrize("way", ["threads", "processes"])
def test_lazy_stacks_of_children_that_are_alike(way: str, name: str) -> None:
    pool = AsyncEnvPool(as_list(ALIKE[name]), stack="lazy", **WAYS[way])
    try:
        root = pool.reset()
        assert isinstance(root, LazyStackedTensorDict)
        stepped, root = pool.step_and_maybe_reset(root.update(pool.full_action_spec.rand()))
        assert isinstance(stepped, LazyStackedTensorDict)
        assert isinstance(root, LazyStackedTensorDict)
        pool.async_step_send(root.update(pool.full_action_spec.rand()))
        assert isinstance(pool.async_step_recv(min_get=N), LazyStackedTensorDict)
    except BaseException:
        pool.close()
        raise
    assert_as_expected(name, pool)


@pytest.mark.parametrize("stack", ["dense", "maybe_dense"])
def test_dense_stacks_are_dense(stack: str) -> None:
    pool = AsyncEnvPool([Counter] * 2, stack=stack, backend="threading")
    try:
        assert not isinstance(pool.reset(), LazyStackedTensorDict)
        pool.async_reset_send()
        assert not isinstance(pool.async_reset_recv(min_get=2), LazyStackedTensorDict)
    finally:
        pool.close()


@pytest.mark.parametrize("way", WAYS)
def test_instances(way: str) -> None:
    pool = AsyncEnvPool([CountingEnv(max_steps=2), CountingEnv(max_steps=4)], **WAYS[way])
    try:
        assert pool.batch_size == (2,)
        ones = pool.full_action_spec.one()
        data = pool.rollout(3, lambda td: td.update(ones), break_when_any_done=False)
        assert data["next", "observation"][..., 0].tolist() == [[1, 2, 3], [1, 2, 3]]
        assert data["next", "done"][..., 0].sum(-1).tolist() == [1, 0]
    finally:
        pool.close()


def test_an_instance_for_one_env() -> None:
    pool = AsyncEnvPool(Counter(batch_size=(2,)))
    try:
        assert pool.batch_size == (1, 2)
        assert pool.reset()["env_index"] == [[0, 0]]
        pool.async_reset_send(env_index=0)
        assert pool.async_reset_recv(env_index=0).shape == (2,)
    finally:
        pool.close()
