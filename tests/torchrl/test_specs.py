from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
)
from torchrl.envs import GymEnv, GymWrapper

from shoal.adapters.spaces import builder, flattener, leaves_of
from shoal.engine.spec import ArraySpec
from shoal.errors import SpecError
from shoal.torchrl.specs import SpaceCodec

NUM = 4
D2, D3 = spaces.Discrete(2), spaces.Discrete(3)
BOX = spaces.Box(-1, 1, (2,))
MD = spaces.MultiDiscrete([2, 3])


class SpacesEnv(gymnasium.Env[Any, Any]):
    """Nothing but its spaces."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space = observation_space
        self.action_space = action_space


# Spaces with which GymWrapper can run an env.
AS_IN_GYM_WRAPPER: dict[str, Any] = {
    "box": BOX,
    "box ()": spaces.Box(-1, 1, ()),
    "box () all bytes": spaces.Box(0, 255, (2, 2), np.uint8),
    "box bool": spaces.Box(0, 1, (2,), bool),
    "box float16": spaces.Box(-1, 1, (2,), np.float16),
    "box float64 without bounds": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "box half bounded": spaces.Box(0, np.inf, (2,)),
    "box int8": spaces.Box(-128, 127, (2,), np.int8),
    "box pixels": spaces.Box(0, 255, (8, 9, 3), np.uint8),
    "box grey": spaces.Box(0, 255, (8, 9, 1), np.uint8),
    "discrete": D3,
    "discrete int32": spaces.Discrete(3, dtype=np.int32),
    "multi-binary": spaces.MultiBinary(3),
    "multi-discrete": MD,
    "multi-discrete int8": spaces.MultiDiscrete([2, 3], dtype=np.int8),
    "multi-discrete, equal": spaces.MultiDiscrete([3, 3]),
    "multi-discrete, one": spaces.MultiDiscrete([3]),
    "multi-discrete 2d, equal": spaces.MultiDiscrete([[3, 3], [3, 3]]),
    "multi-discrete 2d, equal rows": spaces.MultiDiscrete([[2, 3], [2, 3]]),
    "multi-discrete 3d, equal rows": spaces.MultiDiscrete([[[2, 3]], [[2, 3]]]),
    "tuple of discrete": spaces.Tuple((D3, D3)),
    "tuple of one": spaces.Tuple((D3,)),
    "tuple of tuples": spaces.Tuple((spaces.Tuple((D3, D3)), spaces.Tuple((D3, D3)))),
    "tuple of boxes": spaces.Tuple((BOX, BOX)),
    "tuple of multi-binary": spaces.Tuple((spaces.MultiBinary(3), spaces.MultiBinary(3))),
    "tuple of multi-discrete": spaces.Tuple((MD, MD)),
    "dict": spaces.Dict({"b": BOX, "a": D3}),
    "dict, state": spaces.Dict({"state": BOX, "x": D2}),
    "dict, state and observation": spaces.Dict({"state": BOX, "observation": D2}),
    "dict, pixels": spaces.Dict({"pixels": spaces.Box(0, 255, (4, 4, 3), np.uint8), "x": BOX}),
    "dict nested": spaces.Dict({"r": spaces.Dict({"state": BOX, "y": MD})}),
    "text": spaces.Text(4),
    "dict with text": spaces.Dict({"t": spaces.Text(4), "b": BOX}),
}


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("name", AS_IN_GYM_WRAPPER)
def test_specs_equal_those_of_gym_wrapper(name: str, categorical: bool) -> None:
    space = AS_IN_GYM_WRAPPER[name]
    ours = SpaceCodec(space, D2, categorical_action_encoding=categorical)
    theirs = GymWrapper(SpacesEnv(space, D2), categorical_action_encoding=categorical)
    assert ours.observation_spec == theirs.observation_spec
    assert ours.action_spec == theirs.action_spec
    assert tuple(ours.observation_spec.keys()) == tuple(theirs.observation_spec.keys())

    ours = SpaceCodec(D2, space, categorical_action_encoding=categorical)
    theirs = GymWrapper(SpacesEnv(D2, space), categorical_action_encoding=categorical)
    full = theirs.full_action_spec
    if isinstance(space, spaces.Dict) and "state" in space.spaces:
        return  # see test_a_state_in_an_action_is_not_called_like_the_observation
    assert ours.action_spec == (full if isinstance(space, spaces.Dict) else full["action"])
    assert set(ours.action_keys) == set(theirs.action_keys)


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize(
    "env_id", ["CartPole-v1", "Pendulum-v1", "Taxi-v4", "ALE/Pong-v5", "HalfCheetah-v5"]
)
def test_specs_equal_those_of_gym_env(env_id: str, categorical: bool) -> None:
    theirs = GymEnv(env_id, categorical_action_encoding=categorical)
    ours = SpaceCodec(
        theirs._env.observation_space,
        theirs._env.action_space,
        categorical_action_encoding=categorical,
    )
    assert ours.observation_spec == theirs.observation_spec
    assert ours.action_spec == theirs.action_spec
    assert ours.action_keys == ("action",)
    theirs.close()


WHERE_GYM_WRAPPER_CANNOT: list[tuple[Any, Any, Any]] = [
    (spaces.Tuple((D2, D3)), MultiCategorical([2, 3]), MultiOneHot([2, 3], dtype=torch.int64)),
    (
        spaces.Tuple((BOX, D3)),
        Composite({"0": Bounded(-1, 1, (2,)), "1": Categorical(3)}),
        Composite({"0": Bounded(-1, 1, (2,)), "1": OneHot(3, dtype=torch.int64)}),
    ),
    (spaces.MultiBinary((2, 3)), Binary(shape=(2, 3), dtype=torch.int8), None),
    (
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        Bounded(torch.zeros(2, 2), torch.tensor([[1, 2], [3, 4]]), (2, 2), dtype=torch.int64),
        None,
    ),
    (
        spaces.MultiDiscrete([[2, 2], [2, 3]], start=[[1, 1], [1, 1]]),
        Bounded(torch.ones(2, 2), torch.tensor([[2, 2], [2, 3]]), (2, 2), dtype=torch.int64),
        None,
    ),
    (spaces.Discrete(3, start=7), Categorical(3), OneHot(3, dtype=torch.int64)),
    (spaces.Box(0, 9, (2,), np.uint16), Bounded(0, 9, (2,), dtype=torch.int32), None),
    (spaces.Box(0, 9, (2,), np.uint32), Bounded(0, 9, (2,), dtype=torch.int64), None),
    (
        spaces.Box(0, 2**64 - 1, (2,), np.uint64),
        Bounded(0, torch.tensor(2**63 - 1), (2,), dtype=torch.int64),
        None,
    ),
    (
        spaces.Discrete(3, dtype=np.uint16),
        Categorical(3, dtype=torch.int32),
        OneHot(3, dtype=torch.int64),
    ),
    (
        spaces.Dict({"p": spaces.Tuple((BOX, spaces.Text(2)))}),
        Composite(
            {
                "p": Composite(
                    {"0": Bounded(-1, 1, (2,)), "1": NonTensor((), example_data="a string")}
                )
            }
        ),
        None,
    ),
    (spaces.Sequence(BOX, stack=True), NonTensor(()), None),
    (spaces.Graph(BOX, None), NonTensor(()), None),
    (spaces.OneOf((BOX, D2)), NonTensor(()), None),
]


@pytest.mark.parametrize(("space", "categorical", "one_hot"), WHERE_GYM_WRAPPER_CANNOT)
def test_specs_beyond_gym_wrapper(space: Any, categorical: Any, one_hot: Any) -> None:
    for is_categorical, expected in ((True, categorical), (False, one_hot or categorical)):
        codec = SpaceCodec(space, space, categorical_action_encoding=is_categorical)
        found: Any = codec.observation_spec
        if not isinstance(space, spaces.Dict):
            found = found["observation"]
        assert found == expected
        if isinstance(space, spaces.Tuple) and isinstance(expected, Composite):
            assert codec.action_spec == Composite({"action": expected})
            assert codec.action_keys == (("action", "0"), ("action", "1"))
        else:
            assert codec.action_spec == expected


def test_a_state_in_an_action_is_not_called_like_the_observation() -> None:
    space = spaces.Dict({"state": BOX})
    assert SpaceCodec(D2, space).action_keys == ("state",)
    assert SpaceCodec(spaces.Dict({"x": D2}), space).action_keys == ("observation",)


def test_a_dtype_that_torch_lacks_is_refused() -> None:
    with pytest.raises(SpecError, match=r"observation/a .*float128") as caught:
        SpaceCodec(spaces.Dict({"a": spaces.Box(0, 1, (2,), np.longdouble)}), D2)
    assert caught.value.key == "observation/a"


SAMPLED: dict[str, Any] = {
    **AS_IN_GYM_WRAPPER,
    **{str(space): space for space, *_ in WHERE_GYM_WRAPPER_CANNOT},
    "discrete start": spaces.Discrete(3, start=-7),
    "discrete start uint8": spaces.Discrete(3, start=250, dtype=np.uint8),
    "multi-discrete start": spaces.MultiDiscrete([2, 3], start=[-4, 5]),
    "multi-discrete start 2d": spaces.MultiDiscrete([[2, 3], [2, 3]], start=[[1, 2], [3, 4]]),
    "multi-discrete uint32": spaces.MultiDiscrete([2, 3], dtype=np.uint32),
    "box () uint16": spaces.Box(0, 65535, (), np.uint16),
    "tuple of box ()": spaces.Tuple((spaces.Box(0, 1, ()), spaces.Box(0, 1, ()))),
    "tuple of starts": spaces.Tuple((spaces.Discrete(3, start=1), spaces.Discrete(3, start=-1))),
    "tuple of sizes and starts": spaces.Tuple(
        (spaces.Discrete(3, start=1, dtype=np.int8), spaces.Discrete(4, start=-1))
    ),
    "keys that are numbers": spaces.Dict({0: D2, 1: spaces.Tuple((D2, BOX))}),
    "deep": spaces.Dict({"a": spaces.Tuple((spaces.Dict({"state": D3}), spaces.Text(3)))}),
}


def batch_of(space: Any, seed: int) -> tuple[dict[Any, Any], list[Any]]:
    """Returns raw leaves as the engine keeps them, and the values they are made of."""
    space.seed(seed)
    values = [space.sample() for _ in range(NUM)]
    if "uint64" in str(space):
        values = [value >> np.uint64(1) for value in values]
    flatten = flattener(space)
    rows = [(value,) if flatten is None else flatten(value) for value in values]
    leaves: dict[Any, Any] = {}
    for (path, spec), column in zip(leaves_of(space).items(), zip(*rows, strict=True), strict=True):
        if isinstance(spec, ArraySpec):
            leaves[path] = np.stack([np.asarray(x, spec.dtype) for x in column])
        else:
            leaves[path] = list(column)
    return leaves, values


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("name", SAMPLED)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_decoded_values_fit_the_spec_and_encode_to_the_same_leaves(
    name: str, categorical: bool, seed: int
) -> None:
    space = SAMPLED[name]
    codec = SpaceCodec(space, space, categorical_action_encoding=categorical)
    leaves, _ = batch_of(space, seed)
    decoded = codec.decode_observation(
        {k: v if isinstance(v, list) else torch.from_numpy(v.copy()) for k, v in leaves.items()}
    )
    assert list(decoded) == [field.key for field in codec.observation_fields]
    for key, value in decoded.items():
        if key in codec.object_observations:
            continue
        spec = codec.observation_spec[key]
        assert value.dtype == spec.dtype
        assert value.shape == (NUM, *spec.shape)
        assert spec.expand(NUM, *spec.shape).is_in(value)
    actions = dict(zip(codec.action_keys, decoded.values(), strict=True))
    encoded = codec.encode_action(actions, NUM)
    assert list(encoded) == list(leaves)
    for path, array in encoded.items():
        if isinstance(leaves[path], list):
            assert array == leaves[path]
            continue
        assert array.dtype == leaves[path].dtype
        np.testing.assert_array_equal(array, leaves[path], strict=True)


@pytest.mark.parametrize("categorical", [True, False])
@pytest.mark.parametrize("name", [n for n in SAMPLED if "uint64" not in n])
def test_random_actions_of_the_spec_are_actions_of_the_space(name: str, categorical: bool) -> None:
    space = SAMPLED[name]
    codec = SpaceCodec(D2, space, categorical_action_encoding=categorical)
    torch.manual_seed(0)
    random = codec.action_spec.expand(NUM, *codec.action_spec.shape).rand()
    actions = {}
    for key in codec.action_keys:
        if key in codec.object_actions:
            return  # a NonTensor spec gives its example, not a value of the space
        actions[key] = random[key] if isinstance(codec.action_spec, Composite) else random
    encoded = codec.encode_action(actions, NUM)
    build = builder(space)
    for i in range(NUM):
        leaves = [column[i] for column in encoded.values()]
        assert space.contains(leaves[0] if build is None else build(leaves))


def test_what_is_identity() -> None:
    space = spaces.Dict({"a": D3, "b": BOX, "c": spaces.Box(0, 1, ()), "d": spaces.Text(2)})
    codec = SpaceCodec(space, D2)
    assert not codec.observation_is_identity
    assert codec.identity_observations == (("a", ("a",)), ("b", ("b",)))
    assert codec.object_observations == ("d",)
    assert SpaceCodec(BOX, D2).observation_is_identity
    assert not SpaceCodec(D2, D2, categorical_action_encoding=False).observation_is_identity
    raw = torch.zeros(NUM, 2)
    assert SpaceCodec(BOX, D2).decode_observation({(): raw})["observation"] is raw
    action = torch.ones(NUM, dtype=torch.int64)
    array = SpaceCodec(BOX, D2).encode_action({"action": action}, NUM)[()]
    assert np.shares_memory(array, action.numpy())


def test_observations_beyond_their_space_have_no_one_hot_form() -> None:
    codec = SpaceCodec(spaces.Dict({"a": D3}), D2, categorical_action_encoding=False)
    with pytest.raises(SpecError, match="observation/a should be a choice from 0 to 2"):
        codec.decode_observation({("a",): torch.tensor([0, 3])})
    codec = SpaceCodec(spaces.Box(0, 2**64 - 1, (1,), np.uint64), D2)
    with pytest.raises(SpecError, match="2\\*\\*63"):
        codec.decode_observation({(): torch.from_numpy(np.array([[2**63]], np.uint64))})


def _encode(space: Any, value: Any, *, categorical: bool = True, num: int = 2) -> Any:
    codec = SpaceCodec(D2, space, categorical_action_encoding=categorical)
    return codec.encode_action({"action": value}, num)[()]


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (D3, torch.tensor([1, 2], dtype=torch.int32), np.array([1, 2])),
        (D3, torch.tensor([1, 2], dtype=torch.uint8), np.array([1, 2])),
        (BOX, torch.ones(2, 2, dtype=torch.float64), np.ones((2, 2), np.float32)),
        (BOX, torch.ones(2, 2, dtype=torch.bfloat16), np.ones((2, 2), np.float32)),
        (BOX, torch.ones(2, 2, requires_grad=True), np.ones((2, 2), np.float32)),
        (BOX, torch.arange(4.0).view(2, 2).t(), np.array([[0, 2], [1, 3]], np.float32)),
        (spaces.Box(0, 9, (), np.int8), torch.tensor([[1], [9]]), np.array([1, 9], np.int8)),
        (spaces.Box(0, 1, (1,), bool), torch.tensor([[1], [0]]), np.array([[True], [False]])),
        (spaces.MultiBinary(1), torch.tensor([[True], [False]]), np.array([[1], [0]], np.int8)),
        (BOX, torch.full((2, 2), torch.nan), np.full((2, 2), np.nan, np.float32)),
    ],
)
def test_other_dtypes_that_lose_nothing_are_taken(space: Any, value: Any, expected: Any) -> None:
    np.testing.assert_array_equal(_encode(space, value), expected, strict=True)


def test_one_hot_rows_of_any_dtype_are_taken() -> None:
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        rows = torch.tensor([[0, 0, 1], [1, 0, 0]]).to(dtype)
        array = _encode(spaces.Discrete(3, start=5), rows, categorical=False)
        np.testing.assert_array_equal(array, np.array([7, 5]), strict=True)


@pytest.mark.parametrize(
    ("space", "value", "expected", "actual"),
    [
        (D3, torch.tensor([0.0, 1.0]), "torch.int64 of shape (2,)", "torch.float32"),
        (D3, torch.tensor([[0], [1]]), "shape (2,)", "shape (2, 1)"),
        (D3, torch.tensor([0, 1, 2]), "shape (2,)", "shape (3,)"),
        (D3, torch.tensor([0, 3]), "from 0 to 2", "3"),
        (D3, torch.tensor([-1, 0]), "from 0 to 2", "-1"),
        (D3, torch.tensor([-1, 0], dtype=torch.int8), "from 0 to 2", "-1"),
        (D3, [0, 1], "torch.int64 of shape (2,)", "a list"),
        (MD, torch.tensor([[0, 2], [2, 0]]), "[1, 2]", "2"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), torch.full((2, 2, 2), 2), "[[1, 2], [3, 4]]", "2"),
        (spaces.MultiBinary(1), torch.tensor([[2], [0]]), "from 0 to 1", "2"),
        (BOX, torch.ones(2, 2, dtype=torch.int64), "torch.float32", "torch.int64"),
        (BOX, torch.ones(2, 2, dtype=torch.complex64), "torch.float32", "torch.complex64"),
        (BOX, torch.ones(2, 3), "shape (2, 2)", "shape (2, 3)"),
        (spaces.Box(0, 9, (1,), np.uint8), torch.tensor([[256], [0]]), "0 to 255", "256"),
        (spaces.Box(0, 9, (1,), np.uint64), torch.tensor([[-1], [0]]), "0 to 1844", "-1"),
        (spaces.Box(0, 1, (1,), bool), torch.tensor([[2], [0]]), "0 to 1", "2"),
        (spaces.Tuple((BOX, BOX)), torch.ones(2, 2), "shape (2, 2, 2)", "shape (2, 2)"),
        (spaces.Tuple((D3, D3)), torch.tensor([[0, 1], [5, 0]]), "from 0 to 2", "5"),
        (spaces.Text(3), ["a"], "a list of 2 values", "a list of length 1"),
        (spaces.Text(3), None, "a list of 2 values", "NoneType"),
    ],
)
def test_actions_that_are_refused(space: Any, value: Any, expected: str, actual: str) -> None:
    with pytest.raises(SpecError) as caught:
        _encode(space, value)
    assert caught.value.key.startswith("action")
    assert expected in caught.value.expected
    assert actual in caught.value.actual


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 0, 0], [1, 0, 0]],
        [[0, 1, 1], [0, 0, 0]],
        [[0, 1, 1], [1, 0, 0]],
        [[0, 2, 0], [1, 0, 0]],
        [[-1, 0, 0], [1, 0, 0]],
        [[0.5, 0.5, 0], [1, 0, 0]],
    ],
)
def test_rows_that_are_not_one_hot_are_refused(rows: Any) -> None:
    with pytest.raises(SpecError, match="action should be one-hot"):
        _encode(D3, torch.tensor(rows), categorical=False)
    pairs = torch.cat([torch.tensor([[1, 0], [0, 1]]), torch.tensor(rows)], dim=-1)
    with pytest.raises(SpecError, match="action should be one-hot"):
        _encode(MD, pairs, categorical=False)


def test_a_missing_action_key_is_named() -> None:
    codec = SpaceCodec(D2, spaces.Dict({"arm": spaces.Dict({"a": D2}), "leg": D2}))
    zeros = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(SpecError, match=r"action/arm/a should be there, as \('arm', 'a'\)"):
        codec.encode_action({"leg": zeros}, 2)
    encoded = codec.encode_action({"leg": zeros, ("arm", "a"): zeros, "more": zeros}, 2)
    assert set(encoded) == {("arm", "a"), ("leg",)}


def test_no_rows_at_all() -> None:
    assert _encode(D3, torch.zeros(0, dtype=torch.int64), num=0).shape == (0,)
    assert _encode(D3, torch.zeros(0, 3), categorical=False, num=0).shape == (0,)


@pytest.mark.parametrize("categorical", [True, False])
def test_a_masked_multi_discrete_action_is_one_choice(categorical: bool) -> None:
    space = spaces.MultiDiscrete([2, 3], start=[0, 10])
    observation = spaces.Dict({"action_mask": spaces.MultiBinary((2, 3)), "x": BOX})
    codec = SpaceCodec(observation, space, categorical_action_encoding=categorical)
    # GymWrapper cannot take the mask as MultiBinary; as a Box it can.
    boxed = spaces.Dict({"action_mask": spaces.Box(0, 1, (2, 3), np.int8), "x": BOX})
    theirs = GymWrapper(SpacesEnv(boxed, space), categorical_action_encoding=categorical)
    assert codec.action_spec == theirs.action_spec
    choice = torch.arange(6)
    action = choice if categorical else torch.nn.functional.one_hot(choice, 6).bool()
    array = codec.encode_action({"action": action}, 6)[()]
    assert array.tolist() == [[0, 10], [0, 11], [0, 12], [1, 10], [1, 11], [1, 12]]
    (field,) = codec.action_fields
    torch.testing.assert_close(field.codec.decode([torch.from_numpy(array)], key="action"), action)


def test_a_conversion_that_the_user_registered_is_used() -> None:
    from torchrl.envs.libs.gym import _conversion_registry, register_gym_spec_conversion

    class Mission(spaces.Space[Any]):
        pass

    assert SpaceCodec(Mission(), D2).observation_spec["observation"] == NonTensor(())
    register_gym_spec_conversion(Mission)(
        lambda spec, **kwargs: NonTensor((), example_data="go there")
    )
    try:
        spec = SpaceCodec(Mission(), D2).observation_spec["observation"]
    finally:
        _conversion_registry.pop(Mission)
    assert spec.example_data == "go there"
