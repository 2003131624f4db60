"""Rows of TorchRL envs as TensorDicts, nested and stacked as the envs' own are.

Knows TensorDicts, trees of leaves and the engine's rows. Does not know EnvBase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
)
from torchrl.envs.utils import _aggregate_end_of_traj

from shoal.adapters.torchrl_trees import (
    Branch,
    Leaf,
    as_data,
    build,
    leaves_of,
    to_numpy,
)
from shoal.engine.spec import ABSENT, ArraySpec, LeafPath
from shoal.errors import SpecError
from shoal.torchrl.fresh import fresh_tensordict
from shoal.torchrl.masks import step_mask
from shoal.torchrl.options import kwargs_per_reset
from shoal.torchrl.selection import Selection
from shoal.torchrl.torchrl_columns import ActionColumns, Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine import Engine
    from shoal.torchrl.rows import ResetRequest

__all__ = ["TorchRLRows"]

Array = np.ndarray[Any, Any]
_Pair = tuple[str, Array, Array]  # a key, rows of steps, rows of resets


class TorchRLRows:
    """The rows of TorchRL envs; see `Rows` for what its members do."""

    plain = None

    def __init__(
        self,
        engine: Engine,
        schemas: Sequence[Schema],
        reset_keys: Sequence[Any],
        *,
        is_lazy: bool = False,
        leaf_devices: bool = False,
        env_ids: Sequence[int] | None = None,
    ) -> None:
        """Takes over an engine.

        Args:
            engine: runs the envs.
            schemas: of each env; one and the same object where they do not differ.
            reset_keys: the masks of a reset.
            is_lazy: results are lazy stacks of one TensorDict per env.
            leaf_devices: leaves go to the devices where the envs have them.
            env_ids: some of the envs, in this order.
        """
        self.engine = engine
        self._gather = engine.gatherer
        self._chosen = Selection(engine.num_envs, env_ids)
        self._num_envs = self._chosen.count
        self._schemas = list(schemas)
        self._schema = self._schemas[0]
        self._is_dense = (
            all(schema is self._schema for schema in self._schemas) and self._schema.is_dense
        )
        self._is_lazy = is_lazy or not self._is_dense
        self._always_lazy = is_lazy
        self._leaf_devices = leaf_devices
        # Elsewhere objects are pickled, which costs least for arrays.
        self._keeps_tensors = engine.config.backend == "serial"
        self._reset_keys = [key if isinstance(key, tuple) else (key,) for key in reset_keys]
        self._size = torch.Size((self._num_envs, *self._schema.batch_size))
        self._is_simple = self._reset_keys == [("_reset",)] and not self._schema.batch_size
        self.steps_in_one = self._is_simple and not self._is_lazy and env_ids is None
        self._flat = self._flat_rows()
        self._inputs = ActionColumns(
            engine.spec.action,
            self._schemas,
            self._chosen,
            keeps_tensors=self._keeps_tensors,
            is_lazy=self._is_lazy,
        )

    def select(self, env_ids: Sequence[int], reset_keys: Sequence[Any]) -> TorchRLRows:
        """Returns the rows of some envs, in this order."""
        rows = TorchRLRows(
            self.engine,
            [self._schemas[i] for i in env_ids],
            reset_keys,
            is_lazy=self._always_lazy,
            leaf_devices=self._leaf_devices,
            env_ids=env_ids,
        )
        rows._inputs.share_turns(self._inputs)
        return rows

    def some(self, env_ids: Array) -> TorchRLRows:
        """Returns the rows of some envs, for one call."""
        twin = object.__new__(TorchRLRows)
        twin.__dict__.update(self.__dict__)
        twin._chosen = Selection(self.engine.num_envs, env_ids)
        twin._num_envs = len(env_ids)
        twin._schemas = [self._schemas[i] for i in env_ids.tolist()]
        twin._schema = twin._schemas[0]
        twin._size = torch.Size((len(env_ids), *self._size[1:]))
        twin._inputs = self._inputs.some(twin._chosen, twin._schemas)
        return twin

    @property
    def fresh_rows(self) -> Array | None:
        """Bool ``[N]``: who was just reset; ``None`` for nobody."""
        return self._gather.is_fresh if self._gather.any_fresh else None

    def _flat_rows(self) -> tuple[list[_Pair], list[_Pair]] | None:
        """Returns the rows of steps and roots, if all of them are arrays with plain names."""
        observation = self.engine.spec.observation
        leaves = self._schema.following_leaves
        if self._is_lazy or not all(
            len(leaf.path) == 1
            and isinstance(observation[leaf.path], ArraySpec)
            and (not self._leaf_devices or leaf.device is None or leaf.device.type == "cpu")
            for leaf in leaves
        ):
            return None
        pairs = {leaf.path: (leaf.path[0], *self._gather.rows_of(leaf.path)) for leaf in leaves}
        return list(pairs.values()), [pairs[leaf.path] for leaf in self._schema.root_leaves]

    # --- in ------------------------------------------------------------------------

    def encode(self, tensordict: TensorDictBase) -> Any:
        """Returns what a step of the envs takes."""
        actions = self._inputs.encode(tensordict, None, None)
        self._inputs.take_turn()
        return actions

    def step(
        self,
        tensordict: TensorDictBase,
        *,
        autoreset: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor | None:
        """Steps the envs, or those in the mask, which may be a part of an env's own batch."""
        mask = step_mask(tensordict, self._size)
        at: Array | None = None
        if mask is not None:
            at = np.flatnonzero(mask.reshape(self._num_envs, -1).any(-1))
            at = None if len(at) == self._num_envs else at
        if at is None or len(at):
            actions = self._inputs.encode(tensordict, at, mask)
            self._inputs.take_turn()
            self.engine.step_rows(actions, self._chosen.env_ids(at), autoreset=autoreset)
        return None if mask is None else torch.from_numpy(mask)

    # --- resets --------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None, kwargs: dict[str, Any]) -> None:
        """Resets the envs, or what the masks name, which may be a part of an env's own batch."""
        request = self.reset_request(tensordict, kwargs)
        if request is not None:
            self.engine.reset_rows(request[0], kwargs=request[1])

    def reset_request(
        self, tensordict: TensorDictBase | None, kwargs: dict[str, Any]
    ) -> ResetRequest | None:
        """Returns what a reset asks of the engine; ``None`` for nothing."""
        per_env = kwargs_per_reset(kwargs, self._num_envs)
        masks = self._masks(tensordict)
        at = np.arange(self._num_envs)
        if masks is not None:
            assert tensordict is not None
            at = self._rows_to_reset(tensordict)
            if not len(at):
                return None
        self._inputs.take_turn()
        has_more = tensordict is not None and self._has_more(tensordict)
        plain = not has_more and (per_env is None or all(map(_is_default, per_env)))
        ids = self._chosen.env_ids(None if len(at) == self._num_envs else at)
        if plain and (self._is_simple or (masks is not None and self._are_ends(masks, at))):
            return ids, None
        requests = []
        for i in self._chosen.ordered_list(list(range(self._num_envs)), at):
            request: dict[str, Any] = {} if per_env is None else dict(per_env[i])
            request["after_end"] = False
            if tensordict is not None and (masks is not None or has_more):
                # An env whose part is empty gets no TensorDict at all.
                request["tensordict"] = self._entries(tensordict[i], self._schemas[i]) or None
            requests.append(request)
        return ids, requests

    def _masks(self, tensordict: TensorDictBase | None) -> dict[tuple[str, ...], Array] | None:
        """Returns the masks that a TensorDict holds; ``None`` if it has none."""
        if tensordict is None:
            return None
        masks = {}
        for key in self._reset_keys:
            mask = tensordict.get(key, None)
            if mask is not None:
                masks[key] = to_numpy(mask)
        return masks or None

    def _rows_to_reset(self, tensordict: TensorDictBase) -> Array:
        """Returns the positions of the envs to reset, ascending.

        Raises:
            ValueError: there are masks for some groups of agents, and not for others.
            SpecError: a mask has the wrong size or is not boolean.
        """
        root = tensordict.get("_reset", None)
        if root is None:
            root = _aggregate_end_of_traj(tensordict, reset_keys=self._reset_keys)
        if root.dtype != torch.bool or root.shape[: len(self._size)] != self._size:
            raise SpecError(
                key="_reset",
                expected=f"bool of shape {(*self._size, 1)}",
                actual=f"{root.dtype} of shape {tuple(root.shape)}",
            )
        return np.flatnonzero(to_numpy(root).reshape(self._num_envs, -1).any(-1))

    def _has_more(self, tensordict: TensorDictBase) -> bool:
        """Returns whether there is something besides the masks that a reset may read."""
        if isinstance(tensordict, LazyStackedTensorDict):
            # Row by row: what differs between rows cannot be had as one.
            return any(map(self._has_more, tensordict.tensordicts))
        return any(path[-1] != "_reset" for path, _ in _entries_of(tensordict))

    def _are_ends(self, masks: dict[tuple[str, ...], Array], at: Array) -> bool:
        """Returns whether the masks name just what the last step has ended."""
        if self._gather.any_fresh and self._chosen.pick(self._gather.is_fresh)[at].any():
            return False
        ends = self.engine.rows.observation
        for key, mask in masks.items():
            done = ends.get((*key[:-1], "done"))
            if done is None or len(masks) != len(self._reset_keys):
                return False
            ended = self._chosen.pick(done)[at]
            if not np.array_equal(mask[at].reshape(len(at), -1), ended.reshape(len(at), -1)):
                return False
        return True

    def _entries(self, row: TensorDictBase, schema: Schema) -> dict[LeafPath, Any]:
        entries: dict[LeafPath, Any] = {}
        for path, value in _entries_of(row):
            if isinstance(value, torch.Tensor):
                # One that a transform outside has given another shape means something else.
                if path not in schema.known or tuple(value.shape) == schema.known[path]:
                    entries[path] = value if self._keeps_tensors else _portable(value)
            else:
                entries[path] = value
        return entries

    # --- out -----------------------------------------------------------------------

    def stepped(self, unwanted: tuple[Any, ...] = ()) -> TensorDictBase:
        """Returns ``next`` of the last step, terminal observations included."""
        if self._flat is not None:
            pick = self._chosen.pick
            found = {
                key: torch.from_numpy(pick(rows))
                for key, rows, _ in self._flat[0]
                if not unwanted or (key,) not in unwanted
            }
            return fresh_tensordict(found, self._size)
        if self._is_lazy:
            whole = self._stacked(lambda schema: schema.following, newer=None)
            return whole.exclude(*unwanted) if unwanted else whole
        values = [
            None if leaf.path in unwanted else self._values(leaf, None, old=True)
            for leaf in self._schema.following_leaves
        ]
        return build(self._schema.following, iter(values), (self._num_envs,))

    def present(self, *, none_at_end: bool = False) -> TensorDictBase:
        """Returns the root: what to act on now, with its done flags."""
        newer = self._chosen.newer(self._gather.is_fresh) if self._gather.any_fresh else None
        if self._flat is not None:
            pick = self._chosen.pick_mixed
            found = {key: pick(pair, newer) for key, *pair in self._flat[1]}
            self._inputs.hand_out(found)
            return fresh_tensordict(found, self._size)
        if self._is_lazy:
            return self._stacked(lambda schema: schema.root, newer=newer)
        values = [self._values(leaf, newer) for leaf in self._schema.root_leaves]
        return build(self._schema.root, iter(values), (self._num_envs,))

    def _values(self, leaf: Leaf, newer: Array | None, *, old: bool = False) -> Any:
        """Returns the entries of all envs under one leaf: a tensor, or data."""
        rows, reset_rows = self._gather.rows_of(leaf.path)
        if isinstance(self.engine.spec.observation[leaf.path], ArraySpec):
            pair = (rows, reset_rows)
            return self._placed(leaf, self._chosen.pick_mixed(pair, None if old else newer))
        column = self._chosen.pick_mixed_list((rows, reset_rows), newer)
        if leaf.kind == "data":
            return as_data(column, 1 + len(leaf.shape))
        column = [_zeros(leaf) if value is None else value for value in column]
        return self._placed(leaf, torch.stack(column))

    def _placed(self, leaf: Leaf, value: torch.Tensor) -> torch.Tensor:
        if self._leaf_devices and leaf.device is not None and leaf.device.type != "cpu":
            return value.to(leaf.device)
        return value

    def _stacked(self, tree_of: Any, newer: Array | None) -> TensorDictBase:
        """Returns one TensorDict per env, stacked densely where they allow it."""
        columns: dict[LeafPath, Any] = {}
        for path, spec in self.engine.spec.observation.items():
            rows, reset_rows = self._gather.rows_of(path)
            if isinstance(spec, ArraySpec):
                columns[path] = self._chosen.pick_mixed((rows, reset_rows), newer)
            else:
                columns[path] = self._chosen.pick_mixed_list((rows, reset_rows), newer)
        tensordicts = []
        for i, schema in enumerate(self._schemas):
            tree: Branch = tree_of(schema)
            values = (self._one(leaf, columns[leaf.path][i]) for leaf in leaves_of(tree))
            tensordicts.append(build(tree, values))
        if self._always_lazy:
            return LazyStackedTensorDict(*tensordicts, stack_dim=0)
        return LazyStackedTensorDict.maybe_dense_stack(tensordicts, 0)

    def _one(self, leaf: Leaf, value: Any) -> Any:
        if leaf.kind == "data":
            return as_data(value, len(leaf.shape))
        if isinstance(value, np.ndarray | np.generic):
            value = torch.from_numpy(np.asarray(value).copy())
        if value is ABSENT or (value is None and leaf.kind == "collection"):
            return None
        if value is None:  # nobody has stepped or reset this env yet
            value = _zeros(leaf)
        return self._placed(leaf, value) if isinstance(value, torch.Tensor) else value


def _entries_of(tensordict: TensorDictBase, parents: LeafPath = ()) -> Iterator[tuple[Any, Any]]:
    """Returns path and value of what a reset may read.

    Stacks of unlike parts go as a whole, for their entries cannot be had one by one; but
    not the masks in them.
    """
    for name in tensordict.keys():  # noqa: SIM118, a TensorDict is no dict
        if not parents and name in ("next", "_step"):
            continue
        path = (*parents, name)
        value = tensordict.get(name)
        if isinstance(value, LazyStackedTensorDict):
            mask = value.get("_reset", None)
            if mask is not None:
                yield (*path, "_reset"), mask
                value = value.exclude("_reset")
            if not value.is_empty():
                yield path, value
        elif isinstance(value, TensorDictBase):
            yield from _entries_of(value, path)
        elif isinstance(value, NonTensorData | NonTensorStack):
            yield path, value.data if isinstance(value, NonTensorData) else value.tolist()
        else:
            yield path, value


def _portable(value: torch.Tensor) -> Any:
    """Returns a copy that is pickled cheaply."""
    try:
        return to_numpy(value).copy()
    except TypeError:  # bfloat16 and its like
        return value.detach().cpu().clone()


def _zeros(leaf: Leaf) -> torch.Tensor:
    return torch.zeros([max(n, 0) for n in leaf.shape], dtype=leaf.dtype)


def _is_default(kwargs: Mapping[str, Any]) -> bool:
    """Returns whether reset arguments ask for what a reset after an end does."""
    return not kwargs or (list(kwargs) == ["set_state"] and kwargs["set_state"] is False)
