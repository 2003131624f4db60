"""One tensor of an env on the TorchRL side, and the arrays of the engine behind it.

Knows torch, torchrl's specs and Gymnasium's spaces. Does not know names, nesting or
envs: `specs` puts these leaves together.

A codec works on whole batches: `decode` takes raw tensors ``[num_envs, *shape]`` of
the engine's dtypes, `encode` returns arrays of that form. Actions come from the user,
so `encode` checks what it gets; observations were checked where they were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymnasium import spaces
    from torchrl.data import TensorSpec

__all__ = [
    "ArrayCodec",
    "BoxCodec",
    "GridCodec",
    "IndexCodec",
    "LeafCodec",
    "ObjectCodec",
    "shifted",
    "torch_dtype_of",
    "widened",
]

Array = NDArray[Any]

# torch has these dtypes by name only: hardly any operation takes them. Every value of
# the first two fits into the wider type; for the last, `decode` refuses what does not.
_WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def widened(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the numpy dtype of the tensors that hold values of a numpy dtype."""
    return np.dtype(_WIDENED.get(dtype.name, dtype))


def torch_dtype_of(dtype: np.dtype[Any], *, key: str) -> torch.dtype:
    """Returns the torch dtype that holds values of a numpy dtype.

    It is the same dtype, except that uint16 becomes int32, and uint32 and uint64
    become int64.

    Raises:
        SpecError: torch has no such dtype.
    """
    found = getattr(torch, widened(dtype).name, None)
    if not isinstance(found, torch.dtype):
        raise SpecError(key=key, expected="of a dtype that torch has", actual=f"of dtype {dtype}")
    return found


class LeafCodec(Protocol):
    """One leaf `TensorSpec` and its way to and from the engine's leaves.

    Attributes:
        spec: the spec of one env.
        num_leaves: how many leaves of the engine it stands for.
        is_identity: ``decode`` returns what it is given.
        is_object: values are lists of Python objects rather than tensors.
    """

    spec: TensorSpec
    num_leaves: int
    is_identity: bool
    is_object: bool

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        """Returns the batch as the spec describes it; `key` is for messages."""

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        """Returns one array or list per leaf; raises `SpecError` if the value does not fit."""


class ObjectCodec:
    """Python objects, passed through as lists."""

    num_leaves = 1
    is_identity = False
    is_object = True

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        return raws[0]

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        if not isinstance(value, list | tuple) or len(value) != num_envs:
            came = f"of length {len(value)}" if hasattr(value, "__len__") else "without a length"
            raise SpecError(
                key=key,
                expected=f"a list of {num_envs} values",
                actual=f"a {type(value).__name__} {came}",
            )
        return [list(value)]


class ArrayCodec:
    """A single numeric leaf."""

    num_leaves = 1
    is_identity = True
    is_object = False

    def __init__(self, spec: TensorSpec, space_dtype: np.dtype[Any]) -> None:
        self.spec = spec
        self.dtype = space_dtype
        self._shape = tuple(spec.shape)
        self._torch_dtype = spec.dtype  # asking the spec for it takes a property of its own

    def checked(self, value: Any, *, num_envs: int, key: str, kinds: str) -> Array:
        """Returns a tensor as an array, after a look at its shape and its kind of numbers."""
        if (
            type(value) is Tensor
            and value.dtype is self._torch_dtype
            and value.shape == (num_envs, *self._shape)
        ):
            try:
                quick: Array = value.numpy()
                return quick
            except (TypeError, RuntimeError):  # a gradient, another device, a dtype of torch's own
                pass
        if not isinstance(value, Tensor):
            raise SpecError(
                key=key, expected=self._wanted(num_envs), actual=f"a {type(value).__name__}"
            )
        if value.shape != (num_envs, *self._shape) or _kind_of(value.dtype) not in kinds:
            raise SpecError(
                key=key,
                expected=self._wanted(num_envs),
                actual=f"{value.dtype} of shape {tuple(value.shape)}",
            )
        if value.dtype.is_floating_point and value.dtype != self.spec.dtype:
            value = value.to(self.spec.dtype)  # also numpy has no bfloat16
        array: Array = value.detach().cpu().numpy()
        return array

    def _wanted(self, num_envs: int) -> str:
        return f"{self.spec.dtype} of shape {(num_envs, *self._shape)}"


class BoxCodec(ArrayCodec):
    """A Box. One of shape () is a tensor of shape (1,); wide unsigned types are widened."""

    def __init__(self, spec: TensorSpec, space: spaces.Box) -> None:
        super().__init__(spec, np.dtype(space.dtype))
        self._space_shape = tuple(space.shape)
        self._widens = self.dtype.name in _WIDENED
        self.is_identity = not self._widens and self._space_shape == self._shape
        self._kinds = "f" if self.dtype.kind == "f" else "biu"

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        tensor = raws[0]
        if self.is_identity:
            return tensor
        if self._widens:
            tensor = tensor.to(self.spec.dtype)
            if self.dtype.name == "uint64" and bool((tensor < 0).any()):
                raise SpecError(
                    key=key, expected="below 2**63, which is all that int64 holds", actual="not"
                )
        return tensor.reshape(len(tensor), *self._shape)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        array = self.checked(value, num_envs=num_envs, key=key, kinds=self._kinds)
        if array.dtype != self.dtype:
            if self._kinds == "biu":
                _check_fits(array, self.dtype, key)
            array = array.astype(self.dtype)
        return [array if self.is_identity else array.reshape(num_envs, *self._space_shape)]


class GridCodec(ArrayCodec):
    """Integers from `low` up to, not including, `low + counts`, passed on as they are."""

    def __init__(
        self, spec: TensorSpec, space_dtype: np.dtype[Any], low: Array, counts: Array
    ) -> None:
        super().__init__(spec, space_dtype)
        self._low = low
        self._counts = counts
        self.is_identity = space_dtype == np.int64

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        return raws[0].to(self.spec.dtype)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        array = self.checked(value, num_envs=num_envs, key=key, kinds="biu")
        _check_range(array.astype(np.int64) - self._low, self._counts, key)
        return [array.astype(self.dtype, copy=False)]


class IndexCodec(ArrayCodec):
    """Choices counted from 0 on this side, from `start` on the env's side."""

    def __init__(
        self, spec: TensorSpec, space_dtype: np.dtype[Any], counts: Array, start: Array
    ) -> None:
        super().__init__(spec, space_dtype)
        self._counts = counts
        self._start = start
        self._is_shifted = bool(start.any())
        self._torch_start = torch.from_numpy(start)
        self.is_identity = not self._is_shifted and space_dtype.name not in _WIDENED

    def decode(self, raws: Sequence[Any], *, key: str) -> Any:
        tensor = raws[0]
        if self._is_shifted:
            tensor = tensor.to(torch.int64) - self._torch_start
        return tensor.to(self.spec.dtype)

    def encode(self, value: Any, *, num_envs: int, key: str) -> list[Any]:
        array = self.checked(value, num_envs=num_envs, key=key, kinds="biu")
        _check_range(array, self._counts, key)
        return [shifted(array, self._start if self._is_shifted else None, self.dtype)]


def _kind_of(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "f"
    return "c" if dtype.is_complex else "b" if dtype is torch.bool else "i"


def _check_fits(array: Array, dtype: np.dtype[Any], key: str) -> None:
    if not array.size or np.can_cast(array.dtype, dtype, "safe"):
        return
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if int(array.min()) < low or int(array.max()) > high:
        raise SpecError(
            key=key,
            expected=f"within {low} to {high}, since its dtype is {dtype}",
            actual=f"within {array.min()} to {array.max()}",
        )


def _check_range(array: Array, counts: Array, key: str) -> None:
    if not array.size:
        return
    # A negative number is a huge one without its sign, so one comparison does both ends.
    unsigned = array.view(f"u{array.dtype.itemsize}")
    is_fine = unsigned.max() < counts if counts.ndim == 0 else (unsigned < counts).all()
    if not is_fine:
        wrong = array[~((array >= 0) & (array < counts))]
        raise SpecError(
            key=key,
            expected=f"a choice from 0 to {_last_choice(counts)}",
            actual=f"{wrong.flat[0]}",
        )


def _last_choice(counts: Array) -> str:
    last = counts - 1
    return str(last.tolist() if last.ndim else int(last))


def shifted(array: Array, start: Array | None, dtype: np.dtype[Any]) -> Array:
    if start is not None:
        array = array.astype(np.int64, copy=False) + start
    return array.astype(dtype, copy=False)
