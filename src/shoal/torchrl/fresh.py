"""TensorDicts made quickly, of entries that are known to fit.

Knows how tensordict keeps its members. Does not know what they stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

__all__ = ["fresh_tensordict"]

# What a TensorDict has beside its entries and its batch size; read from one, so that this
# follows the library. Its own constructor takes twice as long for a handful of entries.
_MEMBERS = dict(TensorDict._new_unsafe({}, batch_size=torch.Size([])).__dict__)


def fresh_tensordict(entries: dict[str, Any], batch_size: torch.Size) -> TensorDict:
    """Returns a TensorDict without a device.

    Args:
        entries: what it holds; it keeps this dict.
        batch_size: with which the shapes of all entries begin.
    """
    made: TensorDict = object.__new__(TensorDict)
    members = made.__dict__
    members.update(_MEMBERS)
    members["_tensordict"] = entries
    members["_batch_size"] = batch_size
    return made
