"""What results keep of the TensorDict that a call was given.

Knows TensorDicts and the rules of ``step_mdp``, of partial resets and of partial steps.
Does not know envs or the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)

from shoal.torchrl.tables import as_non_tensor

if TYPE_CHECKING:
    import numpy as np

__all__ = ["carry_over", "complete", "repeat_idle", "set_entry"]

_IN_NUMPY = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32})
_LEFT_BEHIND = frozenset({"next", "reward", "_reset"})
_NOTHING: frozenset[str] = frozenset()


def carry_over(before: TensorDict, root: TensorDict, fresh: np.ndarray[Any, Any] | None) -> None:
    """Adds to a new root what the one before has and the env does not return.

    These are the action and whatever a policy or a caller has put there. As in TorchRL
    they are zeros for envs that were reset, unless all were.

    Args:
        before: the root that was acted on.
        root: the new one.
        fresh: bool ``[N]``, the envs that were reset; ``None`` if there are none.
    """
    ids = None
    if fresh is not None:
        ids = fresh.nonzero()[0]
        ids = ids if 0 < len(ids) < len(fresh) else None
    _add_missing(before._tensordict, root, ids, _LEFT_BEHIND)


def _add_missing(
    others: dict[str, Any],
    root: TensorDict,
    fresh: np.ndarray[Any, Any] | None,
    left_behind: frozenset[str] = _NOTHING,
) -> None:
    mine = root._tensordict
    for key, value in others.items():
        present = mine.get(key)
        if present is None:
            if key not in left_behind:
                mine[key] = _kept(value, fresh)  # nobody else has this root yet
        elif type(present) is TensorDict and type(value) is TensorDict and key not in left_behind:
            _add_missing(value._tensordict, present, fresh)


def _kept(value: Any, fresh: np.ndarray[Any, Any] | None) -> Any:
    """Returns an entry for the next root, zero in these rows."""
    if fresh is None and type(value) is torch.Tensor:
        return value
    if type(value) is torch.Tensor and value.dtype in _IN_NUMPY:
        # Small arrays take numpy a sixth of the time that they take torch.
        try:
            kept = value.numpy().copy()
        except (TypeError, RuntimeError):  # a gradient, or another device
            pass
        else:
            kept[fresh] = 0
            return torch.from_numpy(kept)
    if is_tensor_collection(value):
        # Not the same object: what is written into it later must not show here.
        if fresh is None:
            return value.copy()
        return value.where(_others_of(fresh, len(value)), value.empty(), pad=0)
    if fresh is None:
        return value
    rows = _others_of(fresh, len(value)).to(value.device).reshape(-1, *[1] * (value.ndim - 1))
    return torch.where(rows, value, value.new_zeros(()))


def _others_of(env_ids: np.ndarray[Any, Any], num_envs: int) -> torch.Tensor:
    others = torch.ones(num_envs, dtype=torch.bool)
    others[torch.from_numpy(env_ids)] = False
    return others


def repeat_idle(
    stepped: TensorDictBase, before: TensorDictBase, moved: torch.Tensor
) -> TensorDictBase:
    """Returns a step's results with what the root says in the rows that did not step.

    Where the root has no such entry, or one of another shape, there are zeros; and
    ``None`` in place of objects.

    Args:
        stepped: the results; changed.
        before: the root.
        moved: bool ``[N, *batch of one env]``, what did step.
    """
    if isinstance(stepped, LazyStackedTensorDict):
        if stepped.stack_dim == 0:
            _fill_idle_rows(stepped, before, moved)
        rows = [
            repeat_idle(row, old, mask)
            for row, old, mask in zip(
                stepped.unbind(stepped.stack_dim),
                before.unbind(stepped.stack_dim),
                moved.unbind(stepped.stack_dim) if stepped.stack_dim < moved.ndim else moved,
                strict=False,
            )
        ]
        return LazyStackedTensorDict(*rows, stack_dim=stepped.stack_dim)
    for key, value in list(stepped.items()):
        old = before.get(key, None)
        if isinstance(value, NonTensorStack | NonTensorData):
            stepped.set(key, _idle_data(value, old, moved))
        elif isinstance(value, TensorDictBase):
            mended = repeat_idle(value, value.empty() if old is None else old, moved)
            if mended is not value:
                stepped.set(key, mended)
        elif is_tensor_collection(value):
            stepped.set(key, _idle_records(value, old, moved))
        else:
            fits = old is not None and old.shape == value.shape and old.dtype == value.dtype
            mask = moved.reshape((*moved.shape, *[1] * (value.ndim - moved.ndim)))
            old = old.to(value.device) if fits else torch.zeros_like(value)
            stepped.set(key, torch.where(mask.to(value.device), value, old))
    return stepped


def _fill_idle_rows(
    stepped: LazyStackedTensorDict, before: TensorDictBase, moved: torch.Tensor
) -> None:
    """Adds to rows that did not step what the others have: a class of its own has no zeros."""
    keys = {key for row in stepped.tensordicts for key in row.keys()}  # noqa: SIM118
    for row, old, mask in zip(stepped.tensordicts, before.unbind(0), moved, strict=True):
        for key in () if mask.any() else keys - set(row.keys()):
            if (value := old.get(key, None)) is not None:
                row.set(key, value)


def _idle_records(value: Any, old: Any, moved: torch.Tensor) -> Any:
    """Returns a tensorclass; its old rows where it has them, as it has no zeros."""
    if type(old) is not type(value) or bool(moved.all()):
        return value
    if moved.ndim == 0:
        return old
    rows = zip(moved, value.unbind(0), old.unbind(0), strict=True)
    chosen = [_idle_records(new, before, mask) for mask, new, before in rows]
    return LazyStackedTensorDict.maybe_dense_stack(chosen, 0)


def _idle_data(value: Any, old: Any, moved: torch.Tensor) -> Any:
    if moved.ndim == 0:
        return value if bool(moved) else NonTensorData(None) if old is None else old
    olds = [None] * len(moved) if old is None else old.tolist()
    choices = zip(moved.reshape(len(moved), -1).any(-1).tolist(), value.tolist(), olds, strict=True)
    return as_non_tensor([new if m else o for m, new, o in choices])


def complete(given: TensorDictBase, present: TensorDictBase) -> None:
    """Adds to a root, which is about to be reset in part, what it lacks of the present.

    So the rows outside the mask show what the envs last returned, not zeros.
    """
    if isinstance(given, LazyStackedTensorDict):
        # Row by row: what differs between rows cannot be had as one.
        for row, other in zip(given.tensordicts, present.unbind(given.stack_dim), strict=True):
            complete(row, other)
        return
    mine = set(given.keys())
    for key in sorted(present.keys()):
        if key not in mine:
            given.set(key, present.get(key).clone())
        elif is_tensor_collection(inner := given.get(key)) and isinstance(inner, TensorDictBase):
            complete(inner, present.get(key))


def set_entry(tensordict: TensorDict, key: str, value: Any) -> None:
    """Sets an entry whose batch size and device are known to fit."""
    tensordict._set_str(key, value, validated=True, inplace=False, non_blocking=False)
