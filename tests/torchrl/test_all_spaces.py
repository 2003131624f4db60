"""Every Gymnasium space through both envs: as observation, and as action."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from batched_cases import leaves_of, open_env, same_objects
from gymnasium import spaces
from scripted_envs import ColourSpace, SpaceEnv
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.data import NonTensor
from torchrl.envs import check_env_specs

from shoal.adapters.spaces import flattener
from shoal.adapters.spaces import leaves_of as space_leaves
from shoal.errors import SpecError

N = 2
DTYPES = (
    np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64,
    np.float16, np.float32, np.float64, np.bool_,
)  # fmt: skip
WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def box(dtype: Any, shape: tuple[int, ...] = (2, 3)) -> spaces.Box:
    return spaces.Box(0, 1, shape, dtype)


NUMERIC: dict[str, Any] = {
    **{f"Box {np.dtype(dtype)}": box(dtype) for dtype in DTYPES},
    "Box ()": box(np.float32, ()),
    "Box of bytes": spaces.Box(0, 255, (4, 5, 3), np.uint8),
    "Box (0,)": box(np.float32, (0,)),
    "Box unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "Discrete": spaces.Discrete(5),
    "Discrete from -2": spaces.Discrete(5, start=-2),
    "Discrete int32": spaces.Discrete(5, dtype=np.int32),
    "MultiDiscrete": spaces.MultiDiscrete([2, 5]),
    "MultiDiscrete from": spaces.MultiDiscrete([2, 5], start=[3, -7]),
    "MultiDiscrete 2d": spaces.MultiDiscrete([[2, 5], [3, 3]]),
    "MultiBinary": spaces.MultiBinary(4),
    "MultiBinary 2d": spaces.MultiBinary((2, 3)),
    "Dict": spaces.Dict({"b": box(np.float32), "a": spaces.Discrete(3)}),
    "Dict of Dicts": spaces.Dict(
        {
            "x": spaces.Dict({"y": spaces.Dict({"z": box(np.uint8)}), "w": spaces.Discrete(2)}),
            "v": spaces.MultiBinary(2),
        }
    ),
    "Dict with a state": spaces.Dict({"state": box(np.float32), "more": spaces.Discrete(2)}),
    "Tuple": spaces.Tuple((spaces.Discrete(3), box(np.float32))),
    "Tuple of twins": spaces.Tuple((box(np.float32), box(np.float32))),
    "Tuple of choices": spaces.Tuple((spaces.Discrete(3), spaces.Discrete(5, start=1))),
    "Tuple of Tuples": spaces.Tuple(
        (spaces.Tuple((spaces.Discrete(2), box(np.int16))), spaces.Dict({"k": box(np.float64)}))
    ),
}
OTHER: dict[str, Any] = {
    "Text": spaces.Text(6),
    "Sequence": spaces.Sequence(spaces.Discrete(4)),
    "Sequence, stacked": spaces.Sequence(box(np.float32, (2,)), stack=True),
    "Graph": spaces.Graph(box(np.float32, (2,)), spaces.Discrete(3)),
    "OneOf": spaces.OneOf((spaces.Discrete(3), box(np.float32))),
    "a user's own": ColourSpace(),
    "Dict with text": spaces.Dict({"say": spaces.Text(6), "see": box(np.float32)}),
    "Tuple with a graph": spaces.Tuple(
        (spaces.Graph(box(np.float32, (2,)), None), spaces.Discrete(3))
    ),
    "nested text": spaces.Dict({"in": spaces.Dict({"say": spaces.Text(6)}), "n": box(np.int64)}),
}
EVERYTHING = {**NUMERIC, **OTHER}
ALL_AT_ONCE = spaces.Dict(NUMERIC)


def env_of(way: str, observation: Any, action: Any = None, **options: Any) -> Any:
    return open_env(way, N, functools.partial(SpaceEnv, observation, action), **options)


def as_shown(space: Any, value: Any) -> dict[str, Any]:
    """Returns the leaves of a value of a space, which the env's specs describe."""
    flatten = flattener(space)
    values = (value,) if flatten is None else flatten(value)
    return {"/".join(path): v for path, v in zip(space_leaves(space), values, strict=True)}


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("name", EVERYTHING)
def test_observations(way: str, name: str) -> None:
    space = EVERYTHING[name]
    lone = [SpaceEnv(space) for _ in range(N)]
    with env_of(way, space) as env:
        td = env.reset(list_of_kwargs=[{"seed": i} for i in range(N)])
        _check_row(env, td, [one.reset(seed=i)[0] for i, one in enumerate(lone)], space)
        for _ in range(7):
            td, root = env.step_and_maybe_reset(env.rand_action(td))
            results = [one.step(0) for one in lone]
            _check_row(env, td["next"], [result[0] for result in results], space)
            observations = [
                one.reset()[0] if result[3] else result[0]
                for one, result in zip(lone, results, strict=True)
            ]
            _check_row(env, root, observations, space)
            td = root
        data = env.rollout(5, break_when_any_done=False)
        assert data.batch_size == (N, 5)


def _check_row(env: Any, td: Any, observations: list[Any], space: Any) -> None:
    spec = env.observation_spec
    found = leaves_of(td.select(*spec.keys(True, True)))
    wanted = [as_shown(space, observation) for observation in observations]
    codec = env._children._codec
    for field in codec.observation_fields:
        key = field.key if isinstance(field.key, tuple) else (field.key,)
        raws: list[Any] = []
        for path in field.paths:
            column = [row["/".join(path)] for row in wanted]
            leaf = space_leaves(space)[path]
            dtype = getattr(leaf, "dtype", None)
            raws.append(
                column if dtype is None else torch.from_numpy(np.stack(column).astype(dtype))
            )
        expected = field.codec.decode(raws, key="here")
        value = found[key]
        if field.codec.is_object:
            entry = td.get(field.key)
            assert isinstance(entry, NonTensorStack)
            assert same_objects(_plain(value), _plain(expected))
            continue
        assert value.dtype == expected.dtype == spec[key].dtype
        assert value.shape == expected.shape == spec[key].shape
        assert torch.equal(value, expected)
        assert spec[key].is_in(value)


def _plain(value: Any) -> Any:
    """Returns graphs as tuples, so that they can be compared."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("name", [*NUMERIC, "all at once"])
def test_specs_tell_the_truth(name: str, categorical: bool) -> None:
    space = NUMERIC.get(name, ALL_AT_ONCE)
    action = space if name != "Box (0,)" else None
    way = "serial" if name in NUMERIC else "2 processes"
    with env_of(way, space, action, categorical_action_encoding=categorical) as env:
        check_env_specs(env)
        fake = env.fake_tensordict()
        data = env.rollout(4, break_when_any_done=False)
        assert leaves_of(fake).keys() == leaves_of(data).keys()


@pytest.mark.parametrize("name", OTHER)
def test_specs_of_what_is_no_tensor(name: str) -> None:
    with env_of("2 processes", OTHER[name]) as env:
        td = env.rand_step(env.reset())
        for key in env._children._codec.object_observations:
            assert isinstance(env.observation_spec[key], NonTensor)
            assert isinstance(td["next"].get(key), NonTensorStack)
            assert len(td["next"].get(key).tolist()) == N
        fake = env.fake_tensordict()
        assert set(fake["next"].keys(True, True)) >= set(env.done_keys)
        check_env_specs(env)


@pytest.mark.parametrize("name", [*NUMERIC, "all at once"])
def test_actions(name: str) -> None:
    space = NUMERIC.get(name, ALL_AT_ONCE)
    with env_of(
        "serial" if name in NUMERIC else "2 processes", box(np.float32, (1,)), space
    ) as env:
        td = env.reset()
        for _ in range(3):
            td = env.rand_action(td)
            encoded = env._children._codec.encode_action(
                {k: td.get(k) for k in env._children._codec.action_keys}, N
            )
            env._step(td)
            for i, action in enumerate(env._engine.call("last_action")):
                assert space.contains(_exact(space, action)), action
                given = as_shown(space, action)
                for path, rows in encoded.items():
                    assert np.array_equal(given["/".join(path)], rows[i])


def _exact(space: Any, action: Any) -> Any:
    """Returns a value with numpy's integers in place of Python's, where a Box wants them."""
    return np.asarray(action, space.dtype) if isinstance(space, spaces.Box) else action


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("name", ["Text", "Sequence", "a user's own", "Dict with text"])
def test_actions_that_are_no_tensors(way: str, name: str) -> None:
    space = OTHER[name]
    with env_of(way, box(np.float32, (1,)), space) as env:
        env.reset()
        for _ in range(3):
            samples = [space.sample() for _ in range(N)]
            td = TensorDict({}, [N])
            if name == "Dict with text":
                td.set("say", NonTensorStack(*[NonTensorData(s["say"]) for s in samples]))
                td["see"] = torch.from_numpy(np.stack([s["see"] for s in samples]))
            else:
                td.set("action", NonTensorStack(*[NonTensorData(s) for s in samples]))
            env.step(td)
            for sample, action in zip(samples, env._engine.call("last_action"), strict=True):
                assert same_objects(action, sample)


def test_large_objects_pass() -> None:
    """More than a pipe holds, both ways, from all envs at once."""
    space = spaces.Dict({"text": spaces.Text(1_000_000, min_length=1_000_000)})
    with env_of("2 processes", space) as env:
        td, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
        assert {len(text) for text in td["next"].get("text").tolist()} == {1_000_000}
        assert {len(text) for text in root.get("text").tolist()} == {1_000_000}


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_envs_that_differ_are_refused(way: str) -> None:
    # One function for both, so that nobody looks at the second env before it runs.
    kwargs = [{"observation_space": box(t)} for t in (np.float32, np.float64)]
    env = open_env(way, 2, SpaceEnv, create_env_kwargs=kwargs)
    with pytest.raises(SpecError, match="Env 1: observation should be float32"):
        env.reset()
    assert env.is_closed
