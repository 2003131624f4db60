"""A TorchRL env as the engine's env: everything a step takes or returns is a leaf.

Knows torch, tensordict and TorchRL's EnvBase. Does not know the engine or workers.
Imported only where such an env lives.

What the engine calls the observation holds everything that a step returns here:
observations, rewards and done flags of any nesting. What it calls the action holds
everything that a step takes: actions and states, and what the caller has put into
``next``, as recurrent policies do.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from torchrl.envs import (
    Compose,
    EnvBase,
    Transform,
    TransformedEnv,
)
from torchrl.envs.utils import _terminated_or_truncated

from shoal.adapters.torchrl_calls import call_env, close_env
from shoal.adapters.torchrl_generators import (
    has_known_generator,
    load_generators,
    save_generators,
    seed_generators,
)
from shoal.adapters.torchrl_inputs import GIVEN, OTHERS, STEP_MASK, Inputs
from shoal.adapters.torchrl_trees import (
    Leaf,
    as_data,
    leaves_of,
    read,
    to_numpy,
    tree_of,
    write,
)
from shoal.engine.spec import (
    ArraySpec,
    EnvSpec,
    LeafPath,
    LeafSpec,
    ObjectSpec,
    describe_path,
)
from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["TorchRLEnv"]


class TorchRLEnv:
    """An ``EnvBase`` as the engine sees it.

    Attributes:
        env: the TorchRL env.
        spec: its leaves: what a step takes, and what it returns.
    """

    def __init__(self, env: EnvBase, *, keep_graph: bool = False, is_apart: bool = False) -> None:
        """Reads the specs; does not reset the env.

        Args:
            env: the TorchRL env.
            keep_graph: steps and resets record gradients, and every leaf is an object, so
                that they stay attached to it. Only within one process.
            is_apart: the env has a process of its own: no gradients, and a seed is for
                torch's, numpy's and Python's global generators, too.
        """
        self.env = env
        self._keep_graph = keep_graph
        self._is_apart = is_apart
        specs = env.specs
        outputs = specs["output_spec"]
        self._inputs = Inputs(specs, env.batch_size)
        self._outputs = tree_of(
            outputs["full_observation_spec"],
            outputs["full_reward_spec"],
            outputs["full_done_spec"],
        )
        self._leaves = list(leaves_of(self._outputs))
        self.spec = EnvSpec(
            observation={leaf.path: self._travels(leaf.spec) for leaf in self._leaves},
            action={
                path: leaf if path in (GIVEN, STEP_MASK, OTHERS) else self._travels(leaf)
                for path, leaf in self._inputs.leaves.items()
            },
            undoes_resets=has_known_generator(env),
        )
        # Not all of a step's entries are there after a reset.
        lasting = tree_of(outputs["full_observation_spec"], outputs["full_done_spec"])
        rewards = {leaf.path for leaf in self._leaves}
        rewards -= {leaf.path for leaf in leaves_of(lasting)}
        self._none_after_reset = [
            np.zeros(leaf.spec.shape, leaf.spec.dtype)
            if leaf.path in rewards and isinstance(leaf.spec, ArraySpec)
            else None
            for leaf in self._leaves
        ]
        self._may_miss = rewards
        self._observed = {
            leaf.path for leaf in leaves_of(tree_of(outputs["full_observation_spec"]))
        }
        self._done_spec = outputs["full_done_spec"]
        self._simple_done = bool(env._simple_done)
        self._resets_itself = bool(env.__dict__.get("_torchrl_native_autoreset", False))
        self._hooks = _hooks_of(env)
        self._is_plain = (
            type(env).step is EnvBase.step
            and self._hooks is None
            and not env.run_type_checks
            and all(len(leaf.path) == 1 for leaf in self._leaves)
        )
        self._plain_shapes = [
            (leaf.path[0], torch.Size(leaf.shape))
            for leaf in self._leaves
            if leaf.kind == "array" and leaf.path not in self._observed
        ]
        self._plain_rewards = [path[0] for path in rewards]
        # What the env returned last. A stateless env reads its own past from it, and a
        # caller need not send it back.
        self._root: TensorDictBase | None = None
        self._ended = False
        self._graph_matters = False  # it leads out of the env, not only to its parameters
        self._has_stepped = False
        self._has_warned = False
        self.build_action: Callable[[Sequence[Any]], Any] | None = tuple

    @property
    def flatten_observation(self) -> Callable[[Any], Sequence[Any]] | None:
        """See `shoal.engine.env.Env`. Made anew, since it would hold on to its own owner."""
        return self._flatten

    def _travels(self, spec: LeafSpec) -> LeafSpec:
        if self._keep_graph and isinstance(spec, ArraySpec):
            return ObjectSpec(str(spec))
        return spec

    # --- the contract --------------------------------------------------------------

    def step(self, action: Sequence[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the env with the leaves of ``spec.action``.

        Returns:
            What ``next`` holds, and whether part of the env is to be reset.
        """
        root = self._root
        if root is None:
            root = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        with torch.set_grad_enabled(not self._is_apart and torch.is_grad_enabled()):
            try:
                needs_all = self._take_inputs(root, action)
                if self._resets_itself:
                    stepped, self._root = self.env.step_and_maybe_reset(root)
                    following = stepped.get("next")
                elif needs_all or not self._is_plain:
                    following = self._full_step(root)
                else:
                    following = self._plain_step(root)
            except BaseException:
                for key in ("next", "_step"):
                    root.pop(key, None)  # the root of an env that has not stepped
                raise
        self._ended = self._has_ended(following)
        return following, 0.0, self._ended, False, {}

    def _full_step(self, root: TensorDictBase) -> TensorDictBase:
        """Steps as ``EnvBase.step_and_maybe_reset`` does, up to the reset."""
        stepped = self.env.step(root)
        self._root = self.env._step_mdp(stepped)
        self._root.pop("_step", None)  # the mask was for this step
        if self._hooks is not None:
            stepped, self._root = self._hooks(stepped, self._root)
        following: TensorDictBase = stepped.get("next")
        return following

    def _plain_step(self, root: TensorDictBase) -> TensorDictBase:
        """Does the same where `_full_step` has nothing to add: most of its time is questions."""
        following = self.env._step(root)
        entries = following._tensordict if type(following) is TensorDict else {}
        for key, shape in self._plain_shapes:
            value = entries.get(key)
            if value is None or value.shape != shape:
                # EnvBase completes done flags and gives rewards their shape.
                following = self.env._step_proc_data(following)
                break
        if type(following) is not TensorDict or type(root) is not TensorDict:
            root.set("next", following)
            self._root = self.env._step_mdp(root)
            return following
        kept = dict(root._tensordict)
        kept.update(following._tensordict)
        for key in self._plain_rewards:
            kept.pop(key, None)
        self._root = TensorDict._new_unsafe(kept, batch_size=root.batch_size, device=root.device)
        return following

    def _has_ended(self, following: TensorDictBase) -> bool:
        if self._simple_done:
            return bool(following.get("done").any())
        return bool(_terminated_or_truncated(following.copy(), self._done_spec, key=None))

    def _take_inputs(self, tensordict: TensorDictBase, leaves: Sequence[Any]) -> bool:
        """Adds what a step takes to the root; returns whether it is more than usual."""
        inputs = self._inputs
        values = iter(leaves)
        needs_all = False
        write(
            inputs.actions,
            tensordict,
            iter([_entry(leaf, next(values)) for leaf in inputs.action_leaves]),
        )
        states = [next(values) for _ in inputs.state_leaves]
        following = [next(values) for _ in inputs.next_leaves]
        bits = int(next(values)) if inputs.has_bits else 0
        if bits:
            given = [
                _entry(leaf, value) if bits >> k & 1 else None
                for k, (leaf, value) in enumerate(
                    zip(
                        (*inputs.state_leaves, *inputs.next_leaves),
                        (*states, *following),
                        strict=True,
                    )
                )
            ]
            write(inputs.states, tensordict, iter(given[: len(states)]))
            if bits >> len(states):
                preset = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
                write(inputs.following, preset, iter(given[len(states) :]))
                tensordict.set("next", preset)
                needs_all = True
        others = next(values)
        self._graph_matters = False
        self._has_stepped = True
        if others is not None:
            for path, value in others.items():
                entry = as_tensor(value)
                tensordict.set(path, entry)
                self._graph_matters |= isinstance(entry, torch.Tensor) and entry.requires_grad
        if inputs.has_mask:
            mask = next(values)
            if not mask.all():
                tensordict.set("_step", torch.from_numpy(mask))
                needs_all = True
        return needs_all

    def reset(
        self,
        seed: int | None = None,
        tensordict: Mapping[LeafPath, Any] | None = None,
        *,
        after_end: bool = True,
        **kwargs: Any,
    ) -> tuple[TensorDictBase, dict[str, Any]]:
        """Resets the env, or the part of its batch that has ended or that a mask names.

        Without arguments it does what ``EnvBase.maybe_reset`` does after a step that has
        ended something, and else resets all of it.

        Args:
            seed: seeds the env first, and resets all of it.
            tensordict: entries that its reset may read, a ``_reset`` mask among them.
            after_end: false resets all of it, even if only a part has ended.
            **kwargs: handed to the env's own reset.
        """
        with torch.set_grad_enabled(not self._is_apart and torch.is_grad_enabled()):
            if seed is not None:
                self.seed(seed)
            explicit = seed is not None or tensordict is not None or kwargs or not after_end
            if self._root is not None and self._ended and not explicit:
                root = self._root if self._resets_itself else self.env.maybe_reset(self._present())
            elif tensordict is None:
                root = self.env.reset(**kwargs)
            else:
                given = self._given(tensordict)
                if all(path[-1] == "_reset" for path in tensordict):
                    kwargs["select_reset_only"] = True
                root = self.env.reset(given, **kwargs)
            self._root = root
            self._ended = False
            self._graph_matters = not self._is_apart
            self._has_stepped = False
            return root, {}

    def _given(self, entries: Mapping[LeafPath, Any]) -> TensorDictBase:
        has_mask = any(path[-1] == "_reset" for path in entries)
        if has_mask and self._root is not None:
            given = self._present()
        else:
            given = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        for path, value in entries.items():
            if isinstance(value, np.ndarray):
                value = torch.from_numpy(value)
            elif not isinstance(value, torch.Tensor) and not is_tensor_collection(value):
                value = as_data(value, 0)
            given.set(path, value)
        return given

    def seed(self, seed: int | None) -> int | None:
        """Seeds the env; returns the seed that its own rule has for the env after it."""
        if seed is None:
            return None
        if self._is_apart:
            seed_generators(seed)
        following: int | None = self.env.set_seed(seed)
        return following

    def save_rng(self) -> object:
        """Returns the states of the global generators and, if found, the env's own."""
        return save_generators(self.env)

    def load_rng(self, state: object) -> None:
        """Puts back what `save_rng` returned."""
        load_generators(self.env, state)

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the env, or returns an attribute; see `call_env`."""
        if name == "set_seed" and args and self._is_apart:
            seed_generators(args[0])
        return call_env(self.env, name, args, kwargs)

    def close(self) -> None:
        """Closes the env."""
        close_env(self.env)

    # --- leaves --------------------------------------------------------------------

    def _present(self) -> TensorDictBase:
        # A copy: the env writes into what it is given.
        if self._root is None:
            return TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        return self._root.copy()

    def _flatten(self, tensordict: TensorDictBase) -> list[Any]:
        values = read(self._outputs, tensordict)
        for k, leaf in enumerate(self._leaves):
            value = values[k]
            if value is None:
                if leaf.path not in self._may_miss:
                    raise SpecError(
                        key=describe_path("observation", leaf.path),
                        expected=str(leaf.spec),
                        actual="missing",
                    )
                values[k] = self._none_after_reset[k]
            elif leaf.kind == "array":
                values[k] = value if self._keep_graph else self._detached(leaf, value)
            elif leaf.kind == "data":
                values[k] = _data_of(value)
            elif not self._keep_graph:
                values[k] = _at_home(value.detach())
        return values

    def _detached(self, leaf: Leaf, value: torch.Tensor) -> Any:
        # A graph that only leads to an env's own parameters is cut, as in a worker.
        if value.requires_grad and self._graph_matters:
            lost = (
                f"{'.'.join(leaf.path)}, which requires gradients: they are lost. Set the"
                " share_individual_td argument of the SerialEnv to True to keep them"
            )
            if not self._has_stepped:
                raise RuntimeError(f"Cannot update a view of a tensordict with {lost}")
            # Policies that are rolled out without no_grad look the same, and want none.
            if not self._has_warned:
                warnings.warn(f"a step returned {lost}", stacklevel=2)
                self._has_warned = True
        return to_numpy(value)


def _hooks_of(env: Any) -> Any:
    """Returns what an env does after ``step_mdp``, ``None`` if that is nothing.

    A transformed env always has such a method, which asks every transform.
    """
    inner = env
    while isinstance(inner, TransformedEnv):
        transforms = inner.transform
        every = transforms.transforms if isinstance(transforms, Compose) else [transforms]
        if any(type(t)._post_step_mdp_hooks is not Transform._post_step_mdp_hooks for t in every):
            return env._post_step_mdp_hooks
        inner = inner.base_env
    return None if inner._post_step_mdp_hooks is None else env._post_step_mdp_hooks


def _entry(leaf: Leaf, value: Any) -> Any:
    if leaf.kind == "array":
        if isinstance(value, torch.Tensor) or value is None:
            return value
        # A row is a copy of this step's own, so its memory can be handed on.
        return torch.from_numpy(np.asarray(value, leaf.spec.dtype))  # type: ignore[union-attr]
    if leaf.kind == "data" and value is not None:
        return as_data(value, len(leaf.shape))
    return value


def _at_home(value: Any) -> Any:
    """Returns a tensor or collection in this process's memory; of no device if it had none."""
    return value if value.device is None or value.device.type == "cpu" else value.cpu()


def as_tensor(value: Any) -> Any:
    """Returns an array as a tensor, anything else as it is."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _data_of(value: Any) -> Any:
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value
