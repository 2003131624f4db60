from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.adapters.spaces import builder, flattener, leaves_of
from shoal.engine.spec import ArraySpec, ObjectSpec
from shoal.errors import SpecError

D2, D3 = spaces.Discrete(2), spaces.Discrete(3)


class UserSpace(spaces.Space[Any]):
    """A space that nobody has heard of."""


class UserBox(spaces.Box):
    """Counts as a Box."""


class UserDict(spaces.Dict):
    """Counts as a Dict."""


LEAF_SPACES = [
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(0, 255, (), np.uint8),
    spaces.Box(0, 1, (2,), bool),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary((2, 2)),
    spaces.Text(5),
    spaces.Sequence(spaces.Discrete(3)),
    spaces.OneOf((spaces.Discrete(3), spaces.Text(2))),
]


@st.composite
def keyed(draw: st.DrawFn, children: st.SearchStrategy[Any]) -> spaces.Dict:
    keys = st.one_of(st.integers(0, 99), st.sampled_from(["state", "a", "b/c", "", "z"]))
    entries = draw(st.dictionaries(keys, children, min_size=1, max_size=3))
    # Gymnasium sorts the keys of a plain dict, which mixed ones do not survive.
    return spaces.Dict(collections.OrderedDict(entries))


nested_spaces = st.recursive(
    st.sampled_from(LEAF_SPACES),
    lambda children: st.one_of(
        keyed(children), st.lists(children, min_size=1, max_size=3).map(spaces.Tuple)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return type(b) is tuple and len(a) == len(b) and all(map(same, a, b))
    return a is b


@settings(max_examples=150, deadline=None)
@given(nested_spaces)
def test_round_trip_gives_the_very_same_leaf_values(space: spaces.Space[Any]) -> None:
    value = space.sample()
    leaves = leaves_of(space)
    flatten, build = flattener(space), builder(space)
    if flatten is None or build is None:
        assert flatten is None
        assert build is None
        assert list(leaves) == [()]
        return
    flat = flatten(value)
    assert len(flat) == len(leaves)
    for leaf, spec in zip(flat, leaves.values(), strict=True):
        if isinstance(spec, ArraySpec):
            assert np.shape(leaf) == spec.shape
            assert leaf.dtype == spec.dtype
    assert same(build(flat), value)


@pytest.mark.parametrize(
    ("space", "spec"),
    [
        (spaces.Box(-1, 1, (2,)), ArraySpec((2,), np.dtype("float32"))),
        (spaces.Box(0, 9, (), np.uint64), ArraySpec((), np.dtype("uint64"))),
        (UserBox(0, 1, (2,), bool), ArraySpec((2,), np.dtype("bool"))),
        (spaces.Discrete(3, start=5), ArraySpec((), np.dtype("int64"))),
        (spaces.Discrete(3, dtype=np.int8), ArraySpec((), np.dtype("int8"))),
        (spaces.MultiDiscrete([2, 3], dtype=np.uint16), ArraySpec((2,), np.dtype("uint16"))),
        (spaces.MultiBinary([2, 3]), ArraySpec((2, 3), np.dtype("int8"))),
        (spaces.Text(3), ObjectSpec("text")),
        (UserSpace(), ObjectSpec("a value of a UserSpace space")),
        (spaces.Graph(D2, None), ObjectSpec("a value of a Graph space")),
    ],
)
def test_leaf(space: spaces.Space[Any], spec: ArraySpec | ObjectSpec) -> None:
    assert leaves_of(space) == {(): spec}
    assert flattener(space) is None
    assert builder(space) is None


def test_paths_of_nested_spaces() -> None:
    space = UserDict({"robot": spaces.Dict({3: D2}), "pair": spaces.Tuple((D2, UserSpace()))})
    assert list(leaves_of(space)) == [("pair", "0"), ("pair", "1"), ("robot", "3")]
    build = builder(space)
    assert build is not None
    assert build((0, "x", 1)) == {"pair": (0, "x"), "robot": {3: 1}}


@pytest.mark.parametrize(
    ("space", "key", "words"),
    [
        (spaces.Dict({}), "action", "at least one entry"),
        (spaces.Dict({"a": spaces.Tuple(())}), "action/a", "at least one entry"),
        (spaces.Dict({1: D2, "1": D2}), "action", "keys 1 and '1'"),
    ],
)
def test_spaces_that_are_refused(space: spaces.Space[Any], key: str, words: str) -> None:
    for describe in (leaves_of, flattener, builder):
        with pytest.raises(SpecError, match=words) as caught:
            describe(space, root="action")
        assert caught.value.key == key


NESTED = spaces.Dict({"a": D2, "b": spaces.Dict({"c": D2, "d": spaces.Tuple((D2, D3))})})


@pytest.mark.parametrize(
    ("value", "key", "expected", "actual"),
    [
        ({"a": 0}, "observation/b", "'a'", "missing"),
        ({"a": 0, "z": 0}, "observation/b", "'z'", "missing"),
        ({"a": 0, "b": 0, "x": 0}, "observation/x", "'a', 'b'", "there"),
        ([0, 1], "observation", "mapping with the keys 'a', 'b'", "type list"),
        (None, "observation", "mapping", "NoneType"),
        ({"a": 0, "b": np.zeros(2)}, "observation/b", "mapping", "ndarray"),
        ({"a": 0, "b": {"c": 0}}, "observation/b/d", "'c'", "missing"),
        ({"a": 0, "b": {"c": 0, "d": 3}}, "observation/b/d", "tuple of length 2", "type int"),
        ({"a": 0, "b": {"c": 0, "d": "ab"}}, "observation/b/d", "tuple", "type str"),
        ({"a": 0, "b": {"c": 0, "d": (1,)}}, "observation/b/d", "length 2", "length 1"),
        (collections.defaultdict(int, a=0, z=0), "observation/b", "", "missing"),
    ],
)
def test_observations_that_are_refused(value: Any, key: str, expected: str, actual: str) -> None:
    flatten = flattener(NESTED)
    assert flatten is not None
    with pytest.raises(SpecError) as caught:
        flatten(value)
    assert caught.value.key == key
    assert expected in caught.value.expected
    assert actual in caught.value.actual


def test_other_mappings_and_sequences_are_taken() -> None:
    flatten = flattener(NESTED)
    assert flatten is not None
    value = collections.ChainMap({"a": 1}, {"b": {"c": 2, "d": np.array([3, 4])}})
    assert flatten(value) == (1, 2, 3, 4)
    single = flattener(spaces.Dict({"a": D2}))
    assert single is not None
    assert single({"a": 7}) == (7,)


def test_a_dict_that_makes_up_entries_is_neither_trusted_nor_changed() -> None:
    flatten = flattener(spaces.Dict({"a": D2, "b": D2}))
    assert flatten is not None
    value = collections.defaultdict(int, a=0, c=0)
    with pytest.raises(SpecError):
        flatten(value)
    assert set(value) == {"a", "c"}
