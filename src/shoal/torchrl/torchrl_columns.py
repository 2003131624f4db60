"""What TorchRL envs are sent: actions, states and masks as columns of leaves.

Knows TensorDicts, trees of leaves and specs. Does not know the engine or EnvBase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from shoal.adapters.torchrl_inputs import GIVEN, NEXT, OTHERS, STEP_MASK, Inputs
from shoal.adapters.torchrl_trees import Leaf, leaves_of, read, to_numpy, tree_of
from shoal.engine.spec import ABSENT, ArraySpec, LeafPath, LeafSpec, describe_path
from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shoal.torchrl.selection import Selection

__all__ = ["ActionColumns", "Schema"]

Array = np.ndarray[Any, Any]


class Schema:
    """What one env takes and returns.

    Attributes:
        inputs: what a step takes.
        following: the tree of what ``next`` holds.
        root: the tree of what a root holds: the same without rewards.
    """

    def __init__(self, specs: Mapping[Any, Any], batch_size: torch.Size) -> None:
        outputs = specs["output_spec"]
        observation, done = outputs["full_observation_spec"], outputs["full_done_spec"]
        self.batch_size = torch.Size(batch_size)
        self.inputs = Inputs(specs, self.batch_size)
        self.following = tree_of(observation, outputs["full_reward_spec"], done)
        self.root = tree_of(observation, done)
        self.following_leaves = list(leaves_of(self.following))
        self.root_leaves = list(leaves_of(self.root))
        self.known = {leaf.path: leaf.shape for leaf in self.following_leaves}
        self.is_dense = all(leaf.kind in ("array", "data") for leaf in self.following_leaves)


class ActionColumns:
    """Turns the TensorDict of a step into one column per action leaf.

    States that the envs returned and still have need not travel back. It knows them by the
    tensors that it handed out, as long as nobody has written into these, and nobody else
    has stepped or reset the envs.
    """

    def __init__(
        self,
        spec: Mapping[LeafPath, LeafSpec],
        schemas: Sequence[Schema],
        chosen: Selection,
        *,
        keeps_tensors: bool,
        is_lazy: bool,
    ) -> None:
        """Takes what the rows know.

        Args:
            spec: the action leaves of the engine.
            schemas: of each env.
            chosen: which envs.
            keeps_tensors: objects stay tensors, as they stay in this process.
            is_lazy: rows are looked at one by one.
        """
        self._spec = spec
        self._schemas = schemas
        self._schema = schemas[0]
        self._chosen = chosen
        self._keeps_tensors = keeps_tensors
        self._is_lazy = is_lazy
        self._zeros: dict[LeafPath, Array] = {}
        self._states = [leaf.path for leaf in self._schema.inputs.state_leaves]
        self._handed: dict[LeafPath, tuple[torch.Tensor, int]] = {}
        self._turn: list[ActionColumns] = [self]

    def some(self, chosen: Selection, schemas: Sequence[Schema]) -> ActionColumns:
        """Returns what does the same for some envs."""
        twin = object.__new__(ActionColumns)
        twin.__dict__.update(self.__dict__)
        twin._chosen = chosen
        twin._schemas = schemas
        twin._schema = schemas[0]
        twin._handed = {}
        return twin

    def share_turns(self, other: ActionColumns) -> None:
        """Says that another object sends to the same envs."""
        self._turn = other._turn

    def encode(self, tensordict: TensorDictBase, at: Array | None, mask: Array | None) -> Any:
        """Returns the actions of the envs at some positions (``None``: all), by ascending id."""
        if not self._is_lazy and not isinstance(tensordict, LazyStackedTensorDict):
            columns = self._columns(self._schema.inputs, tensordict, self._chosen.count, mask)
            return self._chosen.ordered(columns, at)
        rows = tensordict.unbind(0)
        order = self._chosen.ordered_list(list(range(self._chosen.count)), at)
        found: list[dict[LeafPath, Any]] = []
        for k in order if at is None else [int(k) for k in order]:
            own = None if mask is None else mask[k : k + 1]
            columns = self._columns(self._schemas[k].inputs, rows[k].unsqueeze(0), 1, own)
            found.append({path: column[0] for path, column in columns.items()})
        actions: dict[LeafPath, Any] = {}
        for path, leaf in self._spec.items():
            if path == OTHERS:
                if any(row.get(path) for row in found):
                    actions[path] = [row.get(path) for row in found]
                continue
            column = [row.get(path, ABSENT) for row in found]
            actions[path] = np.stack(column) if isinstance(leaf, ArraySpec) else column
        return actions

    def _columns(
        self, inputs: Inputs, tensordict: TensorDictBase, num_rows: int, mask: Array | None
    ) -> dict[LeafPath, Any]:
        """Returns one column per action leaf of envs that are alike."""
        columns: dict[LeafPath, Any] = {}
        values = read(inputs.actions, tensordict, 1)
        for leaf, value in zip(inputs.action_leaves, values, strict=True):
            if value is None:
                raise SpecError(
                    key=describe_path("action", leaf.path),
                    expected=f"there, under {leaf.path}",
                    actual="missing",
                )
            self._add(columns, leaf.path, leaf, value, num_rows)
        if inputs.has_bits:
            self._add_states(inputs, tensordict, num_rows, columns)
        if inputs.has_mask:
            size = (num_rows, *self._schema.batch_size)
            columns[STEP_MASK] = np.ones(size, np.bool_) if mask is None else mask
        return columns

    def _add_states(
        self,
        inputs: Inputs,
        tensordict: TensorDictBase,
        num_rows: int,
        columns: dict[LeafPath, Any],
    ) -> None:
        values = read(inputs.states, tensordict, 1)
        values += read(inputs.following, tensordict.get("next", None), 1)
        leaves = [*inputs.state_leaves, *inputs.next_leaves]
        bits = 0
        for k, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
            path = leaf.path if k < len(inputs.state_leaves) else (NEXT, *leaf.path)
            if value is not None and not self._is_own(path, value):
                bits |= 1 << k
                self._add(columns, path, leaf, value, num_rows)
            elif isinstance(leaf.spec, ArraySpec) and isinstance(self._spec[path], ArraySpec):
                columns[path] = self._no_state(path, leaf.spec, num_rows)
            else:
                columns[path] = [None] * num_rows
        columns[GIVEN] = np.full(num_rows, bits, np.int64)

    def _no_state(self, path: LeafPath, spec: ArraySpec, num_rows: int) -> Array:
        zeros = self._zeros.get(path)
        if zeros is None or len(zeros) != num_rows:
            zeros = self._zeros[path] = np.zeros((num_rows, *spec.shape), spec.dtype)
        return zeros

    def _is_own(self, path: LeafPath, value: Any) -> bool:
        """Returns whether a state is what the envs have returned, and still have."""
        handed = self._handed.get(path)
        return (
            handed is not None
            and handed[0] is value
            and handed[1] == value._version
            and self._turn[0] is self
        )

    def take_turn(self) -> None:
        """Notes that the envs are about to move on: what was handed out is old then."""
        self._handed.clear()
        self._turn[0] = self

    def hand_out(self, found: dict[str, torch.Tensor]) -> None:
        """Notes the states in a root that is handed out."""
        for path in self._states:
            value = found.get(path[0])
            if value is not None and not value.is_inference():
                self._handed[path] = (value, value._version)

    def _add(
        self, columns: dict[LeafPath, Any], path: LeafPath, leaf: Leaf, value: Any, num_rows: int
    ) -> None:
        """Adds a column; what does not fit its spec goes along as it is.

        TorchRL does not hold actions against their specs, and some envs rely on it.
        """
        if leaf.kind == "array" and isinstance(value, torch.Tensor):
            fits = value.shape[1:] == leaf.shape and _keeps_kind(value.dtype, leaf)
            if self._keeps_tensors and value.requires_grad and torch.is_grad_enabled():
                fits = False  # a copy in the rows would silently cut the graph
            if not fits and path == leaf.path:
                others = columns.setdefault(OTHERS, [{} for _ in range(num_rows)])
                rows = list(value.unbind(0)) if self._keeps_tensors else list(to_numpy(value))
                for row, found in zip(rows, others, strict=True):
                    found[path] = row.copy() if isinstance(row, np.ndarray) else row
                value = torch.zeros((num_rows, *leaf.shape), dtype=leaf.dtype)
        columns[path] = self._column(leaf, value, num_rows)

    def _column(self, leaf: Leaf, value: Any, num_rows: int) -> Any:
        if leaf.kind == "data":
            rows = value.tolist()
            return rows if isinstance(rows, list) and len(rows) == num_rows else [rows] * num_rows
        if isinstance(self._spec.get(leaf.path, leaf.spec), ArraySpec):
            return to_numpy(value)
        if leaf.kind == "array" and not self._keeps_tensors:
            return list(to_numpy(value).copy())
        return list(value.unbind(0))


def _keeps_kind(dtype: torch.dtype, leaf: Leaf) -> bool:
    """Returns whether numbers of a dtype may be stored as those of a leaf."""
    if dtype == leaf.dtype:
        return True
    assert leaf.dtype is not None
    return torch.can_cast(dtype, leaf.dtype) and leaf.dtype != torch.bool
