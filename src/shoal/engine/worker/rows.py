"""Writing what an env returned into its rows, checked on every step.

The check that every step pays for is exact (type, dtype object, shape) and costs
about as much as the copy of four floats. What does not pass it goes to `conform`,
which accepts what can be stored without changing it, or raises.

Knows numpy views and specs. Does not know envs, or where the memory lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from shoal.engine.core.conform import conform
from shoal.engine.spec import ArraySpec, LeafPath, LeafSpec, ObjectSpec, describe_path
from shoal.errors import SpecError

__all__ = ["ObservationWriter", "as_flag", "as_reward", "leaf_writer", "row_writers"]

Write = Callable[[int, Any], None]


def leaf_writer(rows: np.ndarray[Any, Any], spec: ArraySpec, key: str) -> Write:
    """Returns ``write(i, value)``, which checks ``value`` and copies it into row ``i``.

    Args:
        rows: this worker's rows of one leaf, ``[num_rows, *spec.shape]``.
        spec: what a row must be.
        key: the leaf's name, for messages.
    """
    writes = row_writers(rows, spec, key)
    return lambda i, value: writes[i](value)


def row_writers(
    rows: np.ndarray[Any, Any], spec: ArraySpec, key: str
) -> list[Callable[[Any], None]]:
    """Returns ``write(value)`` for each row; see `leaf_writer`."""
    make = _array_row_writer if spec.shape else _scalar_row_writer
    return [make(rows[i : i + 1], spec, key) for i in range(len(rows))]


def _array_row_writer(
    row: np.ndarray[Any, Any], spec: ArraySpec, key: str
) -> Callable[[Any], None]:
    view = row[0]
    dtype, shape, array_type = row.dtype, spec.shape, np.ndarray

    def write(value: Any) -> None:
        # dtype objects of the plain numeric types exist once per process, so `is`
        # decides at a tenth of the price of `==`; a twin only takes the longer way.
        if value.__class__ is array_type and value.dtype is dtype and value.shape == shape:
            view[...] = value
        else:
            view[...] = conform(value, spec, key)

    return write


def _scalar_row_writer(
    row: np.ndarray[Any, Any], spec: ArraySpec, key: str
) -> Callable[[Any], None]:
    exact: set[type] = {spec.dtype.type}
    # Python's own numbers have no width of their own; these hold any that fits.
    if spec.dtype == np.int64:
        exact.add(int)
    elif spec.dtype == np.float64:
        exact.add(float)
    elif spec.dtype == np.bool_:
        exact.add(bool)

    def write(value: Any) -> None:
        if value.__class__ in exact:
            try:
                row[0] = value
                return
            except OverflowError:
                pass  # conform says it better
        row[0] = conform(value, spec, key)

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
        self._leaves = leaves
        self._rows = rows
        self._flatteners = flatteners
        self._writers: list[tuple[LeafPath, Write | None]] = []
        for path, leaf in leaves.items():
            key = describe_path("observation", path)
            write = leaf_writer(rows[path], leaf, key) if isinstance(leaf, ArraySpec) else None
            self._writers.append((path, write))

    def bound_writes(
        self, keep_objects: Callable[[int, dict[LeafPath, Any]], None]
    ) -> list[Callable[[Any], None]]:
        """Returns ``write(observation)`` for each row.

        Args:
            keep_objects: called with a row and its leaves without a fixed shape.
        """
        leaf = self._leaves.get(())
        plain = all(flatten is None for flatten in self._flatteners)
        if plain and isinstance(leaf, ArraySpec):
            return row_writers(self._rows[()], leaf, describe_path("observation", ()))

        def write(i: int, observation: Any) -> None:
            objects = self.write(i, observation)
            if objects is not None:
                keep_objects(i, objects)

        return [partial(write, i) for i in range(len(self._flatteners))]

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
