"""Which rows a call concerns, from the masks in its tensordict.

Knows TensorDicts. Does not know envs or the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDict

from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDictBase

__all__ = ["rows_to_reset", "rows_to_step", "step_mask"]

Array = np.ndarray[Any, Any]


def rows_to_reset(tensordict: TensorDictBase | None, num_envs: int) -> Array | None:
    """Returns the ids of the envs to reset, ascending; ``None`` for all.

    An env is reset if any element of its part of the ``_reset`` mask is true.
    """
    return _rows(tensordict, "_reset", num_envs)


def rows_to_step(tensordict: TensorDictBase, num_envs: int) -> Array | None:
    """Returns the ids of the envs to step, ascending; ``None`` for all."""
    return _rows(tensordict, "_step", num_envs)


def step_mask(tensordict: TensorDictBase, batch_size: Sequence[int]) -> Array | None:
    """Returns the ``_step`` mask, bool ``[N, *batch of one env]``; ``None`` if it is all true.

    Raises:
        SpecError: it is not boolean, or has another size.
    """
    mask = tensordict.get("_step", None)
    if mask is None:
        return None
    # A copy: it may change as soon as the call is over.
    flags = np.array(mask.detach().cpu().numpy())
    wanted = tuple(batch_size)
    if flags.dtype != np.bool_ or flags.shape not in (wanted, (*wanted, 1)):
        raise SpecError(
            key="_step",
            expected=f"bool of shape {wanted}",
            actual=f"{flags.dtype} of shape {flags.shape}",
        )
    return None if flags.all() else flags.reshape(wanted)


def _rows(tensordict: TensorDictBase | None, key: str, num_envs: int) -> Array | None:
    if tensordict is None:
        return None
    if type(tensordict) is TensorDict:  # nearly always, and then there is hardly ever a mask
        mask = tensordict._tensordict.get(key)
    else:
        mask = tensordict.get(key, None)
    if mask is None:
        return None
    # The mask may change as soon as the call is over: only the ids are kept.
    flags = mask.detach().cpu().numpy()
    if flags.dtype != np.bool_ or flags.shape[:1] != (num_envs,):
        raise SpecError(
            key=key,
            expected=f"bool of shape ({num_envs}, 1)",
            actual=f"{flags.dtype} of shape {flags.shape}",
        )
    ids = np.flatnonzero(flags.reshape(num_envs, -1).any(-1))
    return None if len(ids) == num_envs else ids
