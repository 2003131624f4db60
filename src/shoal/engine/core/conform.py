"""Does a value fit a leaf? The full check, for values the fast check let pass by.

Arithmetic over numpy arrays. Does not know envs, rows or memory.

What is accepted besides the exact dtype: lists and scalars; integers and booleans
of another width whose every value survives; floats of another width, which are
rounded as Gymnasium and TorchRL round them. A float is never made an integer, a
finite number never an infinite one, and no shape is ever stretched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.engine.spec import ArraySpec

__all__ = ["conform"]


def conform(value: Any, spec: ArraySpec, key: str) -> np.ndarray[Any, Any]:
    """Returns ``value`` as an array of exactly the spec's shape and dtype.

    Raises:
        SpecError: it has another shape, or another dtype that would change a value.
    """
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as exc:
        raise _misfit(spec, key, f"a {type(value).__name__} that is no array ({exc})") from exc
    if array.dtype.kind not in "biufc":
        raise _misfit(spec, key, _describe(value, array))
    if array.shape != spec.shape:
        raise _misfit(spec, key, _describe(value, array))
    if array.dtype == spec.dtype:
        return array.astype(spec.dtype, copy=False)
    return _cast(value, array, spec, key)


def _cast(
    value: Any, array: np.ndarray[Any, Any], spec: ArraySpec, key: str
) -> np.ndarray[Any, Any]:
    source, target = array.dtype.kind, spec.dtype.kind
    if target in "iub" and source not in "iub":
        raise _misfit(spec, key, _describe(value, array))
    if target != "c" and source == "c":
        raise _misfit(spec, key, _describe(value, array))
    with np.errstate(all="ignore"):
        cast = array.astype(spec.dtype)
        if source in "fc":
            # Rounding is accepted, overflow is not.
            same = np.isfinite(cast) == np.isfinite(array)
        else:
            same = (cast.real if target == "c" else cast).astype(array.dtype) == array
            if target in "iu" and source in "iu":
                # A negative number and a huge one can share their bits.
                same &= (cast < 0) == (array < 0)
    if not np.all(same):
        bad = array[~same] if array.ndim else array
        raise _misfit(spec, key, f"{_describe(value, array)} holding {bad.flat[0]!r}")
    return np.asarray(cast)


def _describe(value: Any, array: np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{array.dtype} of shape {array.shape}"
    if array.dtype.kind not in "biufc" or array.ndim == 0:
        text = repr(value)
        return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
    return f"a {type(value).__name__} that makes {array.dtype} of shape {array.shape}"


def _misfit(spec: ArraySpec, key: str, actual: str) -> SpecError:
    return SpecError(key=key, expected=str(spec), actual=actual)
