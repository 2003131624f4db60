"""Actions into the rows, checked before anything moves.

Knows specs and views. Does not know backends or slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.core.conform import conform
from shoal.engine.spec import ArraySpec, EnvSpec, LeafPath, describe_path
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.engine.core.layout import Arrays

__all__ = ["ActionWriter"]

Array = np.ndarray[Any, Any]


class ActionWriter:
    """Checks the actions of some envs and writes them into their rows."""

    def __init__(self, spec: EnvSpec, arrays: Arrays, num_envs: int) -> None:
        self._leaves = dict(spec.action)
        self._rows = arrays.action
        self._num_envs = num_envs
        self._objects: dict[int, dict[LeafPath, Any]] = {}  # what `write` was given last
        self._needed = {
            path
            for path, leaf in self._leaves.items()
            if isinstance(leaf, ArraySpec) or not leaf.is_optional
        }
        arrays_only = all(isinstance(self._leaves[path], ArraySpec) for path in self._needed)
        self._expected: list[tuple[LeafPath, Array, tuple[int, ...], Any]] = []
        if arrays_only:
            for path, leaf in self._leaves.items():
                if not isinstance(leaf, ArraySpec):
                    continue
                rows = self._rows[path]
                self._expected.append((path, rows, leaf.shape, rows.dtype))

    def write(self, actions: Any, env_ids: Array | None) -> dict[int, dict[LeafPath, Any]] | None:
        """Writes the actions of ``env_ids`` (``None``: all), one row per env.

        Args:
            actions: an array ``[n, *shape]`` where the action is a single leaf, else a
                mapping from leaf path to array; a path of one name may be given as text.
                Leaves without a fixed shape are sequences of ``n`` objects.
            env_ids: the envs, ascending.

        Returns:
            The leaves without a fixed shape, per env, or ``None`` if there are none.

        Raises:
            SpecError: the wrong number of rows, shape, dtype or keys. Nothing was written.
        """
        if self._write_exact(actions, env_ids):
            return None
        checked, objects = self.check(actions, env_ids)
        for path, array in checked.items():
            self._rows[path][... if env_ids is None else env_ids] = array
        if objects is not None:
            self._objects.update(objects)
        return objects

    def _write_exact(self, actions: Any, env_ids: Array | None) -> bool:
        """Writes actions that fit to the letter; returns whether they do."""
        expected = self._expected
        if isinstance(actions, np.ndarray):
            actions = {(): actions}
        if not isinstance(actions, dict) or not expected or len(actions) != len(expected):
            return False
        num_rows = self._num_envs if env_ids is None else len(env_ids)
        for path, _, shape, dtype in expected:
            value = actions.get(path)
            if not isinstance(value, np.ndarray) or value.dtype != dtype:
                return False
            if value.shape != (num_rows, *shape):
                return False
        for path, rows, _, _ in expected:
            rows[... if env_ids is None else env_ids] = actions[path]
        return True

    def holds(self, actions: Any, env_ids: Array | None) -> bool:
        """Returns whether the rows of these envs (``None``: all) hold just these actions."""
        where: Any = slice(None) if env_ids is None else env_ids
        checked, objects = self.check(actions, env_ids)
        try:
            if objects is not None and objects != {i: self._objects.get(i) for i in objects}:
                return False
        except Exception:  # noqa: BLE001 - border: foreign objects; arrays have no answer
            return False
        # Bit for bit: an action may hold NaN.
        return all(
            self._rows[path][where].tobytes() == array.tobytes() for path, array in checked.items()
        )

    def check(
        self, actions: Any, env_ids: Array | None
    ) -> tuple[dict[LeafPath, Array], dict[int, dict[LeafPath, Any]] | None]:
        """Returns the actions as arrays that fit, and the objects; see `write`."""
        num_rows = self._num_envs if env_ids is None else len(env_ids)
        values = self._by_path(actions)
        checked: dict[LeafPath, Array] = {}
        objects: dict[int, dict[LeafPath, Any]] | None = None
        for path, leaf in self._leaves.items():
            if path not in values:
                continue
            key = describe_path("action", path)
            if isinstance(leaf, ArraySpec):
                batched = ArraySpec((num_rows, *leaf.shape), leaf.dtype)
                checked[path] = conform(values[path], batched, key)
                continue
            column = list(values[path])
            if len(column) != num_rows:
                raise SpecError(
                    key=key, expected=f"{num_rows} objects", actual=f"{len(column)} objects"
                )
            objects = {} if objects is None else objects
            ids = range(num_rows) if env_ids is None else env_ids.tolist()
            for env_id, value in zip(ids, column, strict=True):
                objects.setdefault(env_id, {})[path] = value
        return checked, objects

    def _by_path(self, actions: Any) -> dict[LeafPath, Any]:
        if not isinstance(actions, Mapping):
            if list(self._leaves) == [()]:
                return {(): actions}
            raise SpecError(
                key="action",
                expected=f"a mapping with the leaves {sorted(self._leaves)}",
                actual=f"a {type(actions).__name__}",
            )
        values = {(p,) if isinstance(p, str) else tuple(p): v for p, v in actions.items()}
        for path in {**self._leaves, **values}:
            missing = path in self._needed and path not in values
            if missing or path not in self._leaves:
                raise SpecError(
                    key=describe_path("action", path),
                    expected="given" if missing else f"one of {sorted(self._leaves)}",
                    actual="missing" if missing else "an extra leaf",
                )
        return values
