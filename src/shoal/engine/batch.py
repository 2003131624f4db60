"""What one `recv` returns.

A record of numpy arrays that belong to the caller. Does not know where the memory
came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from shoal.engine.spec import LeafPath

__all__ = ["Batch"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Results of some envs, in env order. Row ``k`` belongs to ``env_ids[k]``.

    The arrays are fresh: no later call changes them.

    Attributes:
        env_ids: int64 ``[n]``, ascending.
        observation: per leaf path ``[n, *shape]``; what to act on next. Where an
            episode ended and the env was reset, this is the reset observation. Leaves
            without a fixed shape are object arrays ``[n]``.
        reward: float64 ``[n]``; zeros after a reset.
        terminated: bool ``[n]``: the episode reached a final state.
        truncated: bool ``[n]``: the episode was cut off.
        reset_rows: int64 ``[m]``: the rows whose env was reset after its episode ended.
        final_observation: per leaf path ``[m, *shape]``: the last observation of those
            episodes, in the order of ``reset_rows``.
        info: per path of ``spec.info`` ``[n, *shape]``; of the step also where the env
            was reset.
        infos: whole info dicts, one per row, if the engine keeps them; else ``None``.
        reset_infos: info dicts of the resets, in the order of ``reset_rows``, likewise.
    """

    env_ids: Array
    observation: dict[LeafPath, Array]
    reward: Array
    terminated: Array
    truncated: Array
    reset_rows: Array
    final_observation: dict[LeafPath, Array]
    info: dict[LeafPath, Array]
    infos: list[dict[str, Any]] | None = None
    reset_infos: list[dict[str, Any]] | None = None

    @property
    def done(self) -> Array:
        """Terminated or truncated: bool ``[n]``."""
        return np.asarray(self.terminated | self.truncated)

    def __len__(self) -> int:
        return len(self.env_ids)
