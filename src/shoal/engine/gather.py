"""Rows into batches: copies of what the rows of some envs hold.

Knows specs, views and notes. Does not know backends or slots.

Keeps, per env, the leaves that have no fixed shape, and which of its two sets of
rows holds the present observation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.batch import Batch
from shoal.engine.spec import EnvSpec, LeafPath, ObjectSpec

if TYPE_CHECKING:
    from shoal.engine.core.layout import Arrays
    from shoal.engine.core.messages import EnvNotes

__all__ = ["Gatherer"]

Array = np.ndarray[Any, Any]


class Gatherer:
    """Builds batches from the rows.

    Attributes:
        is_fresh: bool ``[num_envs]``: the present observation is that of a reset, in
            the second set of rows.
        any_fresh: false only if none is.
        observation_objects: per path ``[num_envs]`` objects of the last step; for
            leaves without a fixed shape.
        reset_objects: the same for the last reset.
        infos: the info dict of each env's last step, if the engine keeps them.
        reset_infos: the same for the last reset.
    """

    def __init__(self, spec: EnvSpec, arrays: Arrays, num_envs: int, *, keep_infos: bool) -> None:
        self._arrays = arrays
        self._keep_infos = keep_infos
        self._all_ids = np.arange(num_envs)
        self._nobody = np.zeros(0, np.int64)
        self.is_fresh = np.zeros(num_envs, np.bool_)
        self.any_fresh = False
        paths = [p for p, leaf in spec.observation.items() if isinstance(leaf, ObjectSpec)]
        self._order = list(spec.observation)
        self.observation_objects: dict[LeafPath, Array] = {}
        self.reset_objects: dict[LeafPath, Array] = {}
        for path in paths:
            self.observation_objects[path] = np.empty(num_envs, object)
            self.reset_objects[path] = np.empty(num_envs, object)
        self.infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]

    def note(self, notes: dict[int, EnvNotes]) -> None:
        """Keeps what came beside the rows."""
        for env_id, note in notes.items():
            for path, value in (note.observation or {}).items():
                self.observation_objects[path][env_id] = value
            for path, value in (note.reset_observation or {}).items():
                self.reset_objects[path][env_id] = value
            if note.info is not None:
                self.infos[env_id] = note.info
            if note.reset_info is not None:
                self.reset_infos[env_id] = note.reset_info

    def set_fresh(self, env_ids: Array | None, fresh: Array | bool) -> None:
        """Notes where the present observation of these envs (``None``: all) lies."""
        if env_ids is not None:
            self.is_fresh[env_ids] = fresh
            self.any_fresh = bool(np.count_nonzero(self.is_fresh))
        elif isinstance(fresh, bool):
            self.is_fresh.fill(fresh)
            self.any_fresh = fresh
        else:
            self.is_fresh[...] = fresh
            self.any_fresh = True  # perhaps; it only has to be right when false

    def current(self, env_ids: Array | None) -> dict[LeafPath, Array]:
        """Returns the present observation of these envs, per leaf, as fresh arrays."""
        present: dict[LeafPath, Array] = {}
        newer = self._newer(env_ids)
        for path in self._order:
            rows, reset_rows = self.rows_of(path)
            # A slice is a view, an index a copy; the caller owns what he gets.
            leaf = rows.copy() if env_ids is None else rows[env_ids]
            if newer is not None:
                leaf[newer] = reset_rows[newer if env_ids is None else env_ids[newer]]
            present[path] = leaf
        return present

    def _newer(self, env_ids: Array | None) -> Array | None:
        """Returns the positions whose present observation is that of a reset."""
        if not self.any_fresh:
            return None
        fresh = self.is_fresh if env_ids is None else self.is_fresh[env_ids]
        newer = fresh.nonzero()[0]
        return newer if len(newer) else None

    def rows_of(self, path: LeafPath) -> tuple[Array, Array]:
        """Returns both sets of rows of one leaf: of the last step, of the last reset."""
        if path in self.observation_objects:
            return self.observation_objects[path], self.reset_objects[path]
        return self._arrays.observation[path], self._arrays.reset_observation[path]

    def batch(self, env_ids: Array | None, *, after_reset: bool = False) -> Batch:
        """Returns the results of these envs (``None``: all)."""
        where: Any = slice(None) if env_ids is None else env_ids
        ids = (self._all_ids if env_ids is None else env_ids).copy()
        arrays = self._arrays
        if after_reset:
            none = self._nobody
            info_rows = arrays.reset_info
            return Batch(
                env_ids=ids,
                observation=self.current(env_ids),
                reward=np.zeros(len(ids)),
                terminated=np.zeros(len(ids), np.bool_),
                truncated=np.zeros(len(ids), np.bool_),
                reset_rows=none,
                final_observation={p: self.rows_of(p)[0][none] for p in self._order},
                info={path: rows[where].copy() for path, rows in info_rows.items()},
                infos=[self.reset_infos[i] for i in ids] if self._keep_infos else None,
                reset_infos=[] if self._keep_infos else None,
            )
        newer = self._newer(env_ids)
        if newer is None:
            newer = self._nobody
        reset_ids = newer if env_ids is None else env_ids[newer]
        return Batch(
            ids,
            self.current(env_ids),
            arrays.reward[where].copy(),
            arrays.terminated[where].copy(),
            arrays.truncated[where].copy(),
            newer,
            {path: self.rows_of(path)[0][reset_ids] for path in self._order},
            {path: rows[where].copy() for path, rows in arrays.info.items()},
            [self.infos[i] for i in ids] if self._keep_infos else None,
            [self.reset_infos[i] for i in reset_ids] if self._keep_infos else None,
        )
