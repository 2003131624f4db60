"""Spaces as trees of leaf codecs: which tensors there are, and what they are made of.

Knows torch, torchrl, Gymnasium's spaces and how `adapters.spaces` names leaves. Does
not know batches of values, envs, or the engine.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Binary, Bounded, MultiCategorical, MultiOneHot, NonTensor
from torchrl.envs.libs.gym import (
    _gym_to_torchrl_spec_transform,
    gym_backend,
    set_gym_backend,
)

from shoal.adapters.spaces import Entry, entries_of
from shoal.engine.spec import LeafPath, describe_path
from shoal.torchrl._choice_codecs import (
    ColumnsCodec,
    FlatChoiceCodec,
    MultiOneHotCodec,
    OneHotCodec,
    StackCodec,
)
from shoal.torchrl._leaf_codecs import (
    BoxCodec,
    GridCodec,
    IndexCodec,
    LeafCodec,
    ObjectCodec,
    torch_dtype_of,
    widened,
)

if TYPE_CHECKING:
    from torchrl.data import TensorSpec

__all__ = ["Compiler", "Leaf", "Space", "Tree", "gymnasium_in_torchrl"]

Space = spaces.Space[Any]


@dataclass(frozen=True, slots=True)
class Leaf:
    codec: LeafCodec
    paths: tuple[LeafPath, ...]
    where: str


Tree = Leaf | dict[str, "Tree"]


@dataclass(frozen=True, slots=True)
class Compiler:
    is_categorical: bool

    def tree(
        self, space: Space, path: LeafPath, root: str, taken: frozenset[str] = frozenset()
    ) -> Tree:
        """Returns the fields of a space; `taken` are names that no key may be changed to."""
        where = describe_path(root, path)
        entries = entries_of(space, where=where)
        if entries is None:
            return Leaf(self._leaf(space, where), (path,), where)
        children = {e.name: self.tree(e.space, (*path, e.name), root) for e in entries}
        if isinstance(space, spaces.Tuple):
            return self._joined(entries, children, where)
        if "state" not in children or "observation" in taken | children.keys():
            return children
        return {("observation" if k == "state" else k): v for k, v in children.items()}

    def action_tree(
        self, observation_space: Space, action_space: Space, observation: dict[str, Tree]
    ) -> Tree:
        tree = self.tree(action_space, (), "action", frozenset(observation))
        mask = observation.get("action_mask")
        if (
            isinstance(action_space, spaces.MultiDiscrete)
            and isinstance(observation_space, spaces.Dict)
            and isinstance(mask, Leaf)
            and tuple(mask.codec.spec.shape) == tuple(action_space.nvec)
        ):
            count = int(np.prod(action_space.nvec))
            one_choice = spaces.Discrete(count, dtype=np.dtype(action_space.dtype).type)
            codec = self._leaf(one_choice, "action")
            if not self.is_categorical:
                codec.spec = codec.spec.to(torch.bool)
            return Leaf(FlatChoiceCodec(codec, action_space), ((),), "action")
        return tree

    def _joined(self, entries: tuple[Entry, ...], children: dict[str, Tree], where: str) -> Tree:
        """Returns the children of a Tuple as one leaf where that is possible."""
        leaves = [leaf for leaf in children.values() if isinstance(leaf, Leaf)]
        if len(leaves) < len(children) or any(leaf.codec.is_object for leaf in leaves):
            return children
        paths = tuple(path for leaf in leaves for path in leaf.paths)
        choices = [e.space for e in entries if isinstance(e.space, spaces.Discrete)]
        if len(choices) == len(entries) and len({int(s.n) for s in choices}) > 1:
            combined = spaces.MultiDiscrete(
                [s.n for s in choices], start=[s.start for s in choices], dtype=np.int64
            )
            dtypes = [np.dtype(s.dtype) for s in choices]
            return Leaf(ColumnsCodec(self._leaf(combined, where), dtypes), paths, where)
        specs = [leaf.codec.spec for leaf in leaves]
        if not all(type(spec) is type(specs[0]) and spec == specs[0] for spec in specs):
            return children
        codec = StackCodec(torch.stack(specs, 0), [leaf.codec for leaf in leaves])
        return Leaf(codec, paths, where)

    def _leaf(self, space: Space, where: str) -> LeafCodec:
        match space:
            case spaces.Box():
                return self._box(space, where)
            case spaces.Discrete():
                return self._discrete(space, where)
            case spaces.MultiDiscrete():
                return self._multi_discrete(space, where)
            case spaces.MultiBinary():
                dtype = np.dtype(space.dtype)
                spec = Binary(shape=space.shape, dtype=torch_dtype_of(dtype, key=where))
                return IndexCodec(spec, dtype, np.asarray(2), np.asarray(0))
            case _:
                return ObjectCodec(_object_spec(space))

    def _box(self, space: spaces.Box, where: str) -> LeafCodec:
        dtype = np.dtype(space.dtype)
        torch_dtype_of(dtype, key=where)
        plain = space
        if widened(dtype) != dtype:
            wide = widened(dtype)
            top = np.uint64(np.iinfo(wide).max)
            low, high = (
                np.minimum(bound.astype(np.uint64), top).astype(wide)
                for bound in (space.low, space.high)
            )
            plain = spaces.Box(low, high, dtype=wide.type)
        return BoxCodec(self._converted(plain), space)

    def _discrete(self, space: spaces.Discrete, where: str) -> LeafCodec:
        dtype = np.dtype(space.dtype)
        torch_dtype_of(dtype, key=where)
        start = np.asarray(space.start, dtype=np.int64)
        if not self.is_categorical:
            return OneHotCodec(self._converted(space), dtype, int(space.n), start)
        if widened(dtype) != dtype:
            space = spaces.Discrete(space.n, dtype=widened(dtype).type)
        return IndexCodec(self._converted(space), dtype, np.asarray(space.n), start)

    def _multi_discrete(self, space: spaces.MultiDiscrete, where: str) -> LeafCodec:
        dtype = np.dtype(space.dtype)
        torch_dtype_of(dtype, key=where)
        counts = space.nvec.astype(np.int64)
        start = space.start.astype(np.int64)
        rows = counts.reshape(-1, counts.shape[-1])
        if not (rows == rows[0]).all():
            # Lazy stacks of unlike specs, which GymWrapper has here, can hold no data.
            bounds = (torch.from_numpy(start), torch.from_numpy(start + counts - 1))
            spec = Bounded(*bounds, counts.shape, dtype=torch.int64)
            return GridCodec(spec, dtype, start, counts)
        if widened(dtype) != dtype:
            space = spaces.MultiDiscrete(space.nvec, dtype=widened(dtype).type)
        spec = self._converted(space)
        if isinstance(spec, MultiOneHot):
            return MultiOneHotCodec(spec, dtype, rows[0].tolist(), start)
        if not self.is_categorical:
            return OneHotCodec(spec, dtype, int(rows[0, 0]), start)
        is_uniform = not isinstance(spec, MultiCategorical)
        return IndexCodec(spec, dtype, rows[0, 0].reshape(()) if is_uniform else counts, start)

    def _converted(self, space: Space) -> TensorSpec:
        with gymnasium_in_torchrl():
            spec: TensorSpec = _gym_to_torchrl_spec_transform(
                space, categorical_action_encoding=self.is_categorical
            )
        return spec


def gymnasium_in_torchrl() -> AbstractContextManager[object]:
    # torchrl looks up spaces in one global library, which may be set to old gym.
    if gym_backend().__name__ == "gymnasium":
        return nullcontext()
    context: AbstractContextManager[object] = set_gym_backend("gymnasium")
    return context


def _object_spec(space: Space) -> TensorSpec:
    if not isinstance(space, spaces.Sequence | spaces.Graph | spaces.OneOf):
        try:
            with gymnasium_in_torchrl():
                spec = _gym_to_torchrl_spec_transform(space)
        except KeyError:
            pass  # torchrl has no conversion for it, nor has the user registered one
        else:
            if isinstance(spec, NonTensor):
                return spec
    return NonTensor(())
