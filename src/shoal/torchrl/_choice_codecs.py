"""Leaves that are one tensor in TorchRL and another shape, or several leaves, in the env.

Knows what `_leaf_codecs` knows. Choices as one-hot rows, several choices as one, and
the entries of a Tuple as one tensor are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import SpecError
from shoal.torchrl._leaf_codecs import Array, ArrayCodec, LeafCodec, shifted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymnasium import spaces
    from torchrl.data import TensorSpec

__all__ = ["ColumnsCodec", "FlatChoiceCodec", "MultiOneHotCodec", "OneHotCodec", "StackCodec"]


class OneHotCodec(ArrayCodec):
    """Choices as one-hot rows along the last dimension; `start` is the env's first choice."""

    is_identity = False

    def __init__(
        self, spec: TensorSpec, space_dtype: np.dtype[Any], num_choices: int, start: Array
    ) -> None:
        super().__init__(spec, space_dtype)
        self._num_choices = num_choices
        self._start = start
        self._torch_start = torch.from_numpy(start)

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        index = raws[0].to(torch.int64) - self._torch_start
        return _one_hot(index, self._num_choices, key).to(self.spec.dtype)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        array = self.checked(value, num_envs=num_envs, key=key, kinds="biuf")
        return [shifted(_hot_index(array, key), self._start, self.dtype)]


class MultiOneHotCodec(ArrayCodec):
    """Several choices as one-hot blocks, one after the other along the last dimension."""

    is_identity = False

    def __init__(
        self, spec: TensorSpec, space_dtype: np.dtype[Any], counts: Sequence[int], start: Array
    ) -> None:
        super().__init__(spec, space_dtype)
        self._counts = [int(count) for count in counts]
        self._ends = np.cumsum(self._counts)[:-1]
        self._start = start
        self._torch_start = torch.from_numpy(start)

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        index = (raws[0].to(torch.int64) - self._torch_start).unbind(-1)
        blocks = [_one_hot(i, n, key) for i, n in zip(index, self._counts, strict=True)]
        return torch.cat(blocks, dim=-1).to(self.spec.dtype)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        array = self.checked(value, num_envs=num_envs, key=key, kinds="biuf")
        blocks = np.split(array, self._ends, axis=-1)
        index = np.stack([_hot_index(block, key) for block in blocks], axis=-1)
        return [shifted(index, self._start, self.dtype)]


class FlatChoiceCodec:
    """All combinations of a MultiDiscrete space numbered as one choice, last digit fastest."""

    num_leaves = 1
    is_identity = False
    is_object = False

    def __init__(self, inner: LeafCodec, space: spaces.MultiDiscrete) -> None:
        self.spec = inner.spec
        self._inner = inner
        self._counts = tuple(int(n) for n in space.nvec)
        self._start = np.asarray(space.start, dtype=np.int64)
        self._dtype = np.dtype(space.dtype)
        strides = np.cumprod((1, *self._counts[:0:-1]))[::-1]
        self._torch_strides = torch.from_numpy(strides.astype(np.int64))
        self._torch_start = torch.from_numpy(self._start)

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        digits = raws[0].to(torch.int64) - self._torch_start
        return self._inner.decode([(digits * self._torch_strides).sum(-1)], key=key)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        (number,) = self._inner.encode(value, num_envs=num_envs, key=key)
        digits = np.stack(np.unravel_index(number, self._counts), axis=-1)
        return [shifted(digits, self._start, self._dtype)]


class ColumnsCodec:
    """Several single numbers of the engine as one vector on this side."""

    is_identity = False
    is_object = False

    def __init__(self, inner: LeafCodec, space_dtypes: Sequence[np.dtype[Any]]) -> None:
        self.spec = inner.spec
        self.num_leaves = len(space_dtypes)
        self._inner = inner
        self._dtypes = space_dtypes

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        columns = torch.stack([raw.to(torch.int64) for raw in raws], dim=-1)
        return self._inner.decode([columns], key=key)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        (array,) = self._inner.encode(value, num_envs=num_envs, key=key)
        return [array[..., i].astype(dtype) for i, dtype in enumerate(self._dtypes)]


class StackCodec:
    """Several leaves with the same spec, stacked along a new first dimension."""

    is_identity = False
    is_object = False

    def __init__(self, spec: TensorSpec, children: Sequence[LeafCodec]) -> None:
        self.spec = spec
        self.num_leaves = sum(child.num_leaves for child in children)
        self._children = children

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        left = iter(raws)
        parts = [
            child.decode([next(left) for _ in range(child.num_leaves)], key=key)
            for child in self._children
        ]
        return torch.stack(parts, dim=1)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        shape = (num_envs, *self.spec.shape)
        if not isinstance(value, Tensor) or value.shape != shape:
            raise SpecError(
                key=key,
                expected=f"{self.spec.dtype} of shape {shape}",
                actual=f"of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}",
            )
        arrays: list[Any] = []
        for i, (child, part) in enumerate(zip(self._children, value.unbind(1), strict=True)):
            arrays += child.encode(part, num_envs=num_envs, key=f"{key}/{i}")
        return arrays


def _hot_index(array: Array, key: str) -> Array:
    index: Array = array.argmax(axis=-1)
    hot = np.take_along_axis(array, index[..., None], axis=-1)
    # As many entries as rows, and a one in each row: so it is one in every row.
    if np.count_nonzero(array) != index.size or not (hot == 1).all():
        raise SpecError(
            key=key,
            expected="one-hot: a single 1 in each row, and 0 elsewhere",
            actual=f"not: its rows add up to {np.unique(array.sum(axis=-1)).tolist()}",
        )
    return index


def _one_hot(index: Tensor, num_choices: int, key: str) -> Tensor:
    try:
        return torch.nn.functional.one_hot(index, num_choices)
    except RuntimeError as error:
        raise SpecError(
            key=key,
            expected=f"a choice from 0 to {num_choices - 1}, counted from the space's start",
            actual=f"from {int(index.min())} to {int(index.max())}",
        ) from error
