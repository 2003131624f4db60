"""The slab's layout: nothing overlaps, everything is aligned, views are what they say."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.core.layout import Word, plan_layout, view_arrays
from shoal.engine.spec import ArraySpec, EnvSpec, ObjectSpec, describe_path

DTYPES = ["bool", "int8", "uint8", "int16", "int64", "uint64", "float16", "float32", "float64"]
DTYPES += ["complex64", "complex128", ">f4"]

array_specs = st.builds(
    ArraySpec,
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(DTYPES).map(np.dtype),
)
paths = st.lists(st.text("ab/", max_size=2), max_size=3).map(tuple)
trees = st.dictionaries(paths, array_specs | st.just(ObjectSpec("thing")), min_size=1, max_size=4)
specs = st.builds(EnvSpec, trees, trees, st.dictionaries(paths, array_specs, max_size=2))


@given(spec=specs, num_envs=st.integers(1, 9), num_workers=st.integers(1, 4))
def test_fields_are_aligned_and_do_not_overlap(spec, num_envs, num_workers):
    layout = plan_layout(spec, num_envs, num_workers)
    fields = sorted(layout.fields.values(), key=lambda field: field.offset)
    ends = [f.offset + int(np.prod(f.shape)) * f.dtype.itemsize for f in fields]
    assert all(field.offset % 64 == 0 for field in fields)
    for end, following in itertools.pairwise(zip(ends, fields, strict=True)):
        assert end[0] <= following[1].offset
    assert layout.nbytes >= max(ends)


@given(spec=specs, num_envs=st.integers(1, 9))
def test_views_keep_what_is_written_apart(spec, num_envs):
    layout = pickle.loads(pickle.dumps(plan_layout(spec, num_envs, 2)))
    memory = bytearray(max(layout.nbytes, 1))
    arrays = view_arrays(layout, memory)
    groups = [arrays.action, arrays.observation, arrays.reset_observation]
    groups += [arrays.info, arrays.reset_info]
    views = [view for group in groups for view in group.values()]
    views += [arrays.words, arrays.engine_asleep, arrays.op, arrays.status]
    views += [arrays.reward, arrays.terminated, arrays.truncated]
    for number, view in enumerate(views):
        view[...] = number % 2 if view.dtype == bool else number
    for number, view in enumerate(views):
        assert (view == (number % 2 if view.dtype == bool else number)).all()


@given(spec=specs)
def test_every_array_leaf_has_rows_and_no_object_leaf_has(spec):
    layout = plan_layout(spec, 3, 1)
    for leaves, names in (
        (spec.observation, layout.observation),
        (spec.observation, layout.reset_observation),
        (spec.action, layout.action),
        (spec.info, layout.info),
        (spec.info, layout.reset_info),
    ):
        expected = [path for path, leaf in leaves.items() if isinstance(leaf, ArraySpec)]
        assert list(names) == expected
        for path, name in names.items():
            assert layout.fields[name].shape == (3, *leaves[path].shape)
            assert layout.fields[name].dtype == leaves[path].dtype


def test_each_worker_has_a_cache_line_of_words():
    spec = EnvSpec({(): ArraySpec((), np.dtype("u1"))}, {(): ArraySpec((), np.dtype("u1"))})
    arrays = view_arrays(plan_layout(spec, 2, 3), bytearray(4096))
    assert arrays.words.shape == (3, 8)
    assert arrays.words[0].nbytes == 64
    assert len(Word) <= 8


def test_a_leaf_holds_numbers_only():
    for dtype in ("O", "U3", "S3", "M8[s]", "V4"):
        with pytest.raises(TypeError, match="ObjectSpec"):
            ArraySpec((), np.dtype(dtype))


@given(spec=specs)
def test_specs_survive_pickling_and_cannot_be_changed(spec):
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert list(again.observation) == list(spec.observation)
    with pytest.raises(TypeError):
        spec.observation["new"] = ObjectSpec()


def test_paths_in_words():
    assert describe_path("observation", ()) == "observation"
    assert describe_path("observation", ("robot", "0")) == "observation/robot/0"
    assert str(ArraySpec((2, 3), np.dtype("f4"))) == "float32 of shape (2, 3)"
