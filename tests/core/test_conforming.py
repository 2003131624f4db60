"""Does a value fit a leaf: stored without changing it, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shoal.engine.core.conform import conform
from shoal.engine.spec import ArraySpec
from shoal.errors import SpecError

DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32"]
DTYPES += ["float64", "complex64", "complex128"]
dtypes = st.sampled_from(DTYPES).map(np.dtype)
shapes = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
values = st.tuples(dtypes, shapes).flatmap(
    lambda drawn: hnp.arrays(drawn[0], drawn[1], elements=None)
)


@given(value=values, dtype=dtypes)
def test_what_is_accepted_is_stored_unchanged(value, dtype):
    spec = ArraySpec(value.shape, dtype)
    try:
        stored = conform(value, spec, "x")
    except SpecError:
        return
    assert stored.dtype == dtype
    assert stored.shape == value.shape
    if value.dtype.kind in "biu":
        for before, after in zip(value.ravel().tolist(), stored.ravel().tolist(), strict=True):
            assert before == after
    else:
        assert dtype.kind in "fc"
        assert (np.isfinite(value) == np.isfinite(stored)).all()


@given(value=values)
def test_the_same_dtype_is_always_accepted(value):
    stored = conform(value, ArraySpec(value.shape, value.dtype), "x")
    assert stored.tobytes() == value.tobytes()


@given(value=values, shape=shapes)
def test_no_shape_is_stretched(value, shape):
    if shape != value.shape:
        with pytest.raises(SpecError, match="shape"):
            conform(value, ArraySpec(shape, value.dtype), "x")


@pytest.mark.parametrize(
    ("value", "shape", "dtype"),
    [
        (300, (), "uint8"),
        (np.int64(300), (), "uint8"),
        (-1, (), "uint8"),
        (np.nan, (), "uint8"),
        (0.7, (), "uint8"),
        (1.0, (), "uint8"),
        ([1.0], (1,), "bool"),
        (2, (), "bool"),
        (2**63, (), "int64"),
        (np.uint64(2**63), (), "int64"),
        (-1, (), "uint64"),
        (2**70, (), "int64"),
        (2**53 + 1, (), "float64"),
        (2**63 - 1, (), "float64"),
        (70000, (), "float16"),
        (1e39, (), "float32"),
        (1j, (), "float64"),
        ([[1, 2, 3], [1, 2, 3]], (3, 2), "int64"),
        ([1], (3,), "int64"),
        (1, (3,), "int64"),
        ([1, 2, 3], (), "int64"),
        ([[1], [1, 2]], (2,), "int64"),
        (None, (), "float64"),
        ("1", (), "float64"),
        (object(), (), "float64"),
        ({"a": 1}, (), "float64"),
        (b"\x01", (), "uint8"),
    ],
)
def test_what_would_change_is_refused(value, shape, dtype):
    with pytest.raises(SpecError) as caught:
        conform(value, ArraySpec(shape, np.dtype(dtype)), "observation/x")
    assert caught.value.key == "observation/x"
    assert caught.value.expected == f"{np.dtype(dtype)} of shape {shape}"
    assert caught.value.actual


@pytest.mark.parametrize(
    ("value", "dtype", "stored"),
    [
        (0.1, "float32", np.float32(0.1)),
        (np.float64(1) / 3, "float16", np.float16(1 / 3)),
        (np.nan, "float32", np.nan),
        (np.inf, "float32", np.inf),
        (True, "uint8", 1),
        (np.int64(255), "uint8", 255),
        (1, "bool", True),
        (3, "complex64", 3 + 0j),
        (np.int64(3), "complex128", 3 + 0j),
        (2.5, "complex64", 2.5 + 0j),
        (np.array(1.5, ">f8"), "float64", 1.5),
        (2**53, "float64", 2.0**53),
    ],
)
def test_what_keeps_its_value_is_accepted(value, dtype, stored):
    got = conform(value, ArraySpec((), np.dtype(dtype)), "x")
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, stored)


def test_the_bad_element_is_named():
    with pytest.raises(SpecError, match=r"holding np.int64\(300\)"):
        conform(np.array([1, 300, 2]), ArraySpec((3,), np.dtype("uint8")), "x")
    with pytest.raises(SpecError, match="a list that makes int64 of shape"):
        conform([1, 2], ArraySpec((3,), np.dtype("uint8")), "x")
