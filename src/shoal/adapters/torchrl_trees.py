"""The entries of an env's TensorDicts as a tree of leaves, read off its specs.

Knows torch, tensordict and TorchRL's specs. Does not know envs or the engine.

A leaf of fixed shape travels as an array. Non-tensor data, shapes with ``-1``, dtypes
that numpy lacks, and collections of a class of their own travel as objects. A lazy
stack of unlike specs is a node with one tree for each of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from torchrl.data import Composite, NonTensor, StackedComposite

from shoal.engine.spec import ArraySpec, LeafPath, LeafSpec, ObjectSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

__all__ = ["Branch", "Leaf", "Node", "Stack", "build", "leaves_of", "read", "tree_of", "write"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry.

    Attributes:
        path: its keys; the part of a lazy stack is a key such as ``"[0]"``.
        spec: how it travels.
        shape: its shape in one env, ``-1`` where that varies.
        dtype: of its tensors.
        kind: a tensor as an array, a tensor as an object, other data, or a collection.
        device: where the env has it.
    """

    path: LeafPath
    spec: LeafSpec
    shape: tuple[int, ...]
    kind: Literal["array", "tensor", "data", "collection"]
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """A nested TensorDict, or the root."""

    batch_size: torch.Size
    children: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """A lazy stack of TensorDicts that differ; ``dim`` counts from the env's own batch."""

    dim: int
    parts: tuple[Branch, ...]


Node = Leaf | Branch | Stack


def tree_of(*specs: Composite) -> Branch:
    """Returns the tree of all entries of some composites, with sorted keys."""
    return _branch(list(specs), ())


def _branch(specs: list[Composite], path: LeafPath) -> Branch:
    found: dict[str, list[Any]] = {}
    for spec in specs:
        for name, child in spec.items():
            if child is not None:
                found.setdefault(name, []).append(child)
    children = {name: _node(found[name], (*path, name)) for name in sorted(found)}
    return Branch(torch.Size(specs[0].shape), children)


def _node(specs: list[Any], path: LeafPath) -> Node:
    stacked = [spec for spec in specs if isinstance(spec, StackedComposite)]
    if stacked:
        # Rewards of unlike agents, say, may well be alike: then they are no lazy stack.
        dim = stacked[0].stack_dim
        columns = zip(*[spec.unbind(dim) for spec in specs], strict=True)
        parts = [_branch(list(part), (*path, f"[{k}]")) for k, part in enumerate(columns)]
        return Stack(dim, tuple(parts))
    if all(isinstance(spec, Composite) and spec.data_cls is None for spec in specs):
        return _branch(specs, path)
    return _leaf(specs[0], path)


def _leaf(spec: Any, path: LeafPath) -> Leaf:
    if isinstance(spec, Composite):
        return Leaf(path, ObjectSpec(str(spec.data_cls)), tuple(spec.shape), "collection")
    shape = tuple(spec.shape)
    if is_non_tensor(spec):
        return Leaf(path, ObjectSpec("non-tensor data"), shape, "data")
    if all(n >= 0 for n in shape):
        try:
            dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
        except TypeError:  # bfloat16 and its like
            pass
        else:
            return Leaf(path, ArraySpec(shape, dtype), shape, "array", spec.dtype, spec.device)
    described = ObjectSpec(f"{spec.dtype} of shape {shape}")
    return Leaf(path, described, shape, "tensor", spec.dtype, spec.device)


def is_non_tensor(spec: Any) -> bool:
    """Returns whether a leaf spec stands for Python objects."""
    parts = getattr(spec, "_specs", None)
    return isinstance(parts[0] if parts else spec, NonTensor)


def leaves_of(node: Node) -> Iterator[Leaf]:
    """Returns the leaves in the order of `read`."""
    match node:
        case Leaf():
            yield node
        case Branch(_, children):
            for child in children.values():
                yield from leaves_of(child)
        case Stack(_, parts):
            for part in parts:
                yield from leaves_of(part)


def read(branch: Branch, tensordict: Any, num_lead: int = 0) -> list[Any]:
    """Returns the entries of a TensorDict, ``None`` for those that are not there.

    Args:
        branch: its tree.
        tensordict: of one env, or of a batch.
        num_lead: how many batch dimensions come before those of one env.
    """
    found: list[Any] = []
    _read(branch, tensordict, num_lead, found)
    return found


def _read(branch: Branch, tensordict: Any, num_lead: int, found: list[Any]) -> None:
    # Its own dict answers in a tenth of the time.
    entries = tensordict._tensordict if type(tensordict) is TensorDict else tensordict
    for name, child in branch.children.items():
        value = None if entries is None else entries.get(name, None)
        match child:
            case Leaf():
                found.append(value)
            case Branch():
                _read(child, value, num_lead, found)
            case Stack(dim, parts):
                rows = [None] * len(parts) if value is None else value.unbind(num_lead + dim)
                for part, row in zip(parts, rows, strict=True):
                    _read(part, row, num_lead, found)


def write(branch: Branch, tensordict: TensorDictBase, values: Iterator[Any]) -> None:
    """Sets entries of one env's TensorDict; ``None`` leaves what is there.

    Args:
        branch: the tree of the entries.
        tensordict: changed. Nested TensorDicts are made where they are missing.
        values: in the order of `read`.
    """
    for name, child in branch.children.items():
        match child:
            case Leaf():
                value = next(values)
                if value is not None:
                    tensordict.set(name, value)
            case Branch(batch_size):
                inner = tensordict.get(name, None)
                made = inner if inner is not None else TensorDict({}, batch_size=batch_size)
                write(child, made, values)
                if inner is None and not made.is_empty():
                    tensordict.set(name, made)
            case Stack(dim, parts):
                inner = tensordict.get(name, None)
                rows = (
                    [TensorDict({}, batch_size=part.batch_size) for part in parts]
                    if inner is None
                    else inner.unbind(dim)
                )
                for part, row in zip(parts, rows, strict=True):
                    write(part, row, values)
                tensordict.set(name, LazyStackedTensorDict(*rows, stack_dim=dim))


def build(branch: Branch, values: Iterator[Any], lead: Sequence[int] = ()) -> TensorDict:
    """Returns a new TensorDict with these entries; ``None`` leaves one out.

    Args:
        branch: its tree.
        values: in the order of `read`, tensors ``[*lead, *shape]`` or collections.
        lead: the batch dimensions before those of one env.
    """
    entries: dict[str, Any] = {}
    for name, child in branch.children.items():
        match child:
            case Leaf():
                value = next(values)
                if value is not None:
                    entries[name] = value
            case Branch():
                inner = build(child, values, lead)
                if inner._tensordict:
                    entries[name] = inner
            case Stack(dim, parts):
                rows = [build(part, values, lead) for part in parts]
                entries[name] = LazyStackedTensorDict(*rows, stack_dim=len(lead) + dim)
    size = torch.Size((*lead, *branch.batch_size))
    return TensorDict._new_unsafe(entries, batch_size=size)


def as_data(value: Any, num_dims: int) -> Any:
    """Returns Python objects as TensorDicts carry them; lists are rows of a batch."""
    if num_dims and isinstance(value, list):
        return NonTensorStack(*[as_data(row, num_dims - 1) for row in value])
    return NonTensorData(value)


def to_numpy(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a tensor as an array, sharing its memory where that can be."""
    try:
        array: np.ndarray[Any, Any] = value.numpy()
    except (RuntimeError, TypeError):  # on a device, with a gradient, or lazily conjugated
        array = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    return array
