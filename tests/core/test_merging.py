"""One spec for envs that differ."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.core.merge import agree_on_spec, builder_from, flattener_to, merge_specs
from shoal.engine.spec import ABSENT, ArraySpec, EnvSpec, ObjectSpec
from shoal.errors import SpecError

FLOATS = ArraySpec((3,), np.dtype(np.float32))
INTS = ArraySpec((), np.dtype(np.int64))
TEXT = ObjectSpec("text")
EXTRA = ObjectSpec("extra", is_optional=True)

leaves = st.sampled_from([FLOATS, INTS, TEXT, EXTRA])
trees = st.dictionaries(st.sampled_from([("a",), ("b",), ("c", "d"), ()]), leaves)


@given(st.lists(trees, min_size=1, max_size=4))
def test_what_all_have_alike_stays_and_the_rest_becomes_objects(parts):
    merged = merge_specs([EnvSpec(observation=part, action=part) for part in parts])
    assert merged.observation == merged.action
    assert set(merged.observation) == {path for part in parts for path in part}
    for path, leaf in merged.observation.items():
        found = [part.get(path) for part in parts]
        if all(one == found[0] for one in found):
            assert leaf == found[0]
        else:
            assert isinstance(leaf, ObjectSpec)
            present = [one for one in found if one is not None]
            assert leaf.is_optional == all(one == EXTRA for one in present)


@given(st.lists(trees, min_size=1, max_size=4))
def test_values_find_their_way_there_and_back(parts):
    specs = [EnvSpec(observation=part, action=part) for part in parts]
    merged = merge_specs(specs)
    for number, spec in enumerate(specs):
        own = [(number, path) for path in spec.observation]
        flatten = flattener_to(merged, spec, lambda values: values)
        values = own if flatten is None else list(flatten(own))
        by_path = dict(zip(merged.observation, values, strict=True))
        for path in merged.observation:
            expected = (number, path) if path in spec.observation else ABSENT
            assert by_path[path] == expected
        build = builder_from(merged, spec, tuple)
        assert list(build(values)) == own


def test_a_lone_leaf_among_others():
    lone = EnvSpec(observation={(): FLOATS}, action={(): INTS})
    merged = merge_specs([lone, EnvSpec(observation={("a",): INTS}, action={("b",): INTS})])
    flatten = flattener_to(merged, lone, None)
    assert dict(zip(merged.observation, flatten("it"), strict=True)) == {(): "it", ("a",): ABSENT}
    build = builder_from(merged, lone, None)
    assert build(["act", ABSENT]) == "act"


def test_envs_that_agree_share_the_very_spec():
    spec = EnvSpec(observation={(): FLOATS}, action={(): INTS})
    twin = EnvSpec(observation={(): FLOATS}, action={(): INTS})
    assert agree_on_spec([spec, twin], mixed=True) is spec
    assert flattener_to(spec, twin, None) is None
    assert builder_from(spec, twin, None) is None


def test_envs_that_differ_are_refused_unless_they_may():
    specs = [EnvSpec(observation={(): leaf}, action={(): INTS}) for leaf in (FLOATS, INTS)]
    with pytest.raises(SpecError, match="Env 1: observation should be float32"):
        agree_on_spec(specs)
    assert agree_on_spec(specs, mixed=True).observation[()] == ObjectSpec("mixed")


def test_infos_that_contradict_each_other():
    specs = [EnvSpec(observation={}, action={}, info={("n",): leaf}) for leaf in (FLOATS, INTS)]
    with pytest.raises(SpecError, match="info/n"):
        merge_specs(specs)
