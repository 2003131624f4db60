"""Writing what an env returned into its rows, checked on every step.

The check that every step pays for is exact (type, dtype object, shape) and costs
about as much as the copy of four floats. What does not pass it goes to `conform`,
which accepts what can be stored without changing it, or raises.

Knows numpy views and specs. Does not know envs, or where the memory lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.engine.core.conform import conform
from shoal.engine.spec import ArraySpec, LeafPath, LeafSpec, ObjectSpec, describe_path
from shoal.errors import SpecError

__all__ = ["ObservationWriter", "as_flag", "as_reward", "leaf_writer"]

Write = Callable[[int, Any], None]

_FLAGS = (bool, np.bool_)


def leaf_writer(rows: np.ndarray[Any, Any], spec: ArraySpec, key: str) -> Write:
    """Returns ``write(i, value)``, which checks ``value`` and copies it into row ``i``.

    Args:
        rows: this worker's rows of one leaf, ``[num_rows, *spec.shape]``.
        spec: what a row must be.
        key: the leaf's name, for messages.
    """
    if spec.shape:
        return _array_writer(rows, spec, key)
    return _scalar_writer(rows, spec, key)


def _array_writer(rows: np.ndarray[Any, Any], spec: ArraySpec, key: str) -> Write:
    views = list(rows)
    dtype, shape, array_type = rows.dtype, spec.shape, np.ndarray

    def write(i: int, value: Any) -> None:
        # dtype objects of the plain numeric types exist once per process, so `is`
        # decides at a tenth of the price of `==`; a twin only takes the longer way.
        if value.__class__ is array_type and value.dtype is dtype and value.shape == shape:
            views[i][...] = value
        else:
            views[i][...] = conform(value, spec, key)

    return write


def _scalar_writer(rows: np.ndarray[Any, Any], spec: ArraySpec, key: str) -> Write:
    exact: set[type] = {spec.dtype.type}
    # Python's own numbers have no width of their own; these hold any that fits.
    if spec.dtype == np.int64:
        exact.add(int)
    elif spec.dtype == np.float64:
        exact.add(float)
    elif spec.dtype == np.bool_:
        exact.add(bool)

    def write(i: int, value: Any) -> None:
        if value.__class__ in exact:
            try:
                rows[i] = value
                return
            except OverflowError:
                pass  # conform says it better
        rows[i] = conform(value, spec, key)

    return write


class ObservationWriter:
    """Writes whole observations of one worker's envs into one set of rows.

    Attributes:
        has_objects: some leaves have no fixed shape and are returned by `write`.
    """

    def __init__(
        self,
        leaves: Mapping[LeafPath, LeafSpec],
        rows: Mapping[LeafPath, np.ndarray[Any, Any]],
        flatteners: Sequence[Callable[[Any], Sequence[Any]] | None],
    ) -> None:
        self.has_objects = any(isinstance(leaf, ObjectSpec) for leaf in leaves.values())
        self._flatteners = flatteners
        self._writers: list[tuple[LeafPath, Write | None]] = []
        for path, leaf in leaves.items():
            key = describe_path("observation", path)
            is_array = isinstance(leaf, ArraySpec)
            write = leaf_writer(rows[path], leaf, key) if is_array else None
            self._writers.append((path, write))

    def fast_write(self) -> Write | None:
        """Returns ``write(i, observation)`` where that is all there is to do."""
        (path, write), *more = self._writers
        if more or path != () or any(flatten is not None for flatten in self._flatteners):
            return None
        return write

    def write(self, i: int, observation: Any) -> dict[LeafPath, Any] | None:
        """Writes one observation; returns its leaves without a fixed shape, if any.

        Raises:
            SpecError: a leaf is missing, is one too many, or does not fit.
        """
        flatten = self._flatteners[i]
        values = (observation,) if flatten is None else flatten(observation)
        objects: dict[LeafPath, Any] | None = None
        for (path, write), value in zip(self._writers, values, strict=True):
            if write is not None:
                write(i, value)
            else:
                if objects is None:
                    objects = {}
                objects[path] = value
        return objects


def as_reward(value: Any) -> float:
    """Returns one reward as a float; arrays of one element count as a number.

    Raises:
        SpecError: it is no real number.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.size != 1:
        raise SpecError(key="reward", expected="a real number", actual=_describe(value, array))
    return float(array.reshape(()))


def as_flag(value: Any, key: str) -> bool:
    """Returns one ``terminated`` or ``truncated`` as a bool.

    Raises:
        SpecError: it is neither a boolean nor 0 nor 1.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biu" or array.size != 1 or array.reshape(()) not in (0, 1):
        raise SpecError(key=key, expected="a bool", actual=_describe(value, array))
    return bool(array.reshape(()))


def _describe(value: Any, array: np.ndarray[Any, Any]) -> str:
    if isinstance(value, np.ndarray):
        return f"{array.dtype} of shape {array.shape}"
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
