"""A TorchRL env as the engine's env: everything a step takes or returns is a leaf.

Knows torch, tensordict and TorchRL's EnvBase. Does not know the engine or workers.
Imported only where such an env lives.

What the engine calls the observation holds everything that a step returns here:
observations, rewards and done flags of any nesting. What it calls the action holds
everything that a step takes: actions and states, and what the caller has put into
``next``, as recurrent policies do.
"""

from __future__ import annotations

import inspect
import random
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
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv
from torchrl.envs.common import EnvMetaData
from torchrl.envs.utils import _terminated_or_truncated

from shoal.adapters.calls import SPECIAL, answer, call_or_read
from shoal.adapters.torchrl_trees import (
    Branch,
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

__all__ = [
    "GIVEN",
    "NEXT",
    "OTHERS",
    "STEP_MASK",
    "Inputs",
    "TorchRLEnv",
    "call_env",
    "close_env",
    "snapshot",
]

GIVEN = ("<given>",)
"""An action leaf: which states, then which entries of ``next``, the caller gave. Bits."""
STEP_MASK = ("<step>",)
"""An action leaf of envs with a batch of their own: which of it to step."""
OTHERS = ("<others>",)
"""An action leaf, mostly absent: entries that do not fit their specs, as they came."""
NEXT = "<next>"
"""First key of the action leaves that were found in ``next``."""

_MAX_BITS = 63


class Inputs:
    """What a step of one env takes, read off its specs.

    Attributes:
        actions: the tree of the actions, all of which have to be given.
        states: the tree of the states; the env knows those that are not given.
        following: the tree of states that the env returns too, so that a policy may have
            put them into ``next``.
        has_mask: the env has a batch, part of which may be stepped.
        leaves: all of it as action leaves of the engine.
    """

    def __init__(self, specs: Mapping[Any, Any], batch_size: torch.Size) -> None:
        inputs, outputs = specs["input_spec"], specs["output_spec"]
        self.actions = tree_of(inputs["full_action_spec"])
        self.states = tree_of(inputs["full_state_spec"])
        returned = {leaf.path for leaf in leaves_of(tree_of(outputs["full_observation_spec"]))}
        self.following = _only(self.states, returned)
        self.has_mask = bool(batch_size)
        self.state_leaves = list(leaves_of(self.states))
        self.next_leaves = list(leaves_of(self.following))
        self.leaves: dict[LeafPath, LeafSpec] = {
            leaf.path: leaf.spec for leaf in leaves_of(self.actions)
        }
        self.action_leaves = list(leaves_of(self.actions))
        # A state may be an action, too: then it has been given.
        self.state_leaves = [leaf for leaf in self.state_leaves if leaf.path not in self.leaves]
        self.states = _only(self.states, {leaf.path for leaf in self.state_leaves})
        self.leaves.update({leaf.path: leaf.spec for leaf in self.state_leaves})
        self.leaves.update({(NEXT, *leaf.path): leaf.spec for leaf in self.next_leaves})
        if len(self.state_leaves) + len(self.next_leaves) > _MAX_BITS:
            raise SpecError(
                key="full_state_spec",
                expected=f"at most {_MAX_BITS} states, those in next among them",
                actual=f"{len(self.state_leaves)} and {len(self.next_leaves)}",
            )
        self.has_bits = bool(self.state_leaves)
        if self.has_bits:
            self.leaves[GIVEN] = ArraySpec((), np.dtype(np.int64))
        self.leaves[OTHERS] = ObjectSpec("entries that do not fit", is_optional=True)
        if self.has_mask:
            self.leaves[STEP_MASK] = ArraySpec(tuple(batch_size), np.dtype(np.bool_))


def _only(branch: Branch, paths: set[LeafPath]) -> Branch:
    """Returns the part of a tree with these leaves; none of a lazy stack."""
    children: dict[str, Any] = {}
    for name, child in branch.children.items():
        if isinstance(child, Leaf):
            if child.path in paths:
                children[name] = child
        elif isinstance(child, Branch):
            inner = _only(child, paths)
            if inner.children:
                children[name] = inner
        elif any(leaf.path in paths for leaf in leaves_of(child)):
            children[name] = child
    return Branch(branch.batch_size, children)


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
        states = [_entry(leaf, next(values)) for leaf in inputs.state_leaves]
        following = [_entry(leaf, next(values)) for leaf in inputs.next_leaves]
        if inputs.has_bits:
            bits = int(next(values))
            states = [value if bits >> k & 1 else None for k, value in enumerate(states)]
            write(inputs.states, tensordict, iter(states))
            bits >>= len(states)
            if bits:
                following = [value if bits >> k & 1 else None for k, value in enumerate(following)]
                preset = TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
                write(inputs.following, preset, iter(following))
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
            _seed_generators(seed)
        following: int | None = self.env.set_seed(seed)
        return following

    def save_rng(self) -> object:
        """Returns the states of the global generators and, if found, the env's own."""
        own = _own_generator(self.env)
        own_state = None if own is None else own.bit_generator.state
        return torch.get_rng_state(), np.random.get_state(), random.getstate(), own_state

    def load_rng(self, state: object) -> None:
        """Puts back what `save_rng` returned."""
        if not isinstance(state, tuple):
            return
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
        own = _own_generator(self.env)
        if own is not None and state[3] is not None:
            own.bit_generator.state = state[3]

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the env, or returns an attribute; see `call_env`."""
        if name == "set_seed" and args and self._is_apart:
            _seed_generators(args[0])
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


def _own_generator(env: Any) -> np.random.Generator | None:
    """Returns the generator of a Gymnasium env at the bottom, if there is one."""
    inner = env
    while getattr(inner, "__dict__", {}).get("_modules", {}).get("base_env") is not None:
        inner = inner.base_env
    inner = getattr(inner, "__dict__", {}).get("_env")
    inner = getattr(inner, "unwrapped", inner)
    generator = getattr(inner, "_np_random", None)
    return generator if isinstance(generator, np.random.Generator) else None


def close_env(env: Any) -> None:
    """Closes an env of TorchRL, whatever it says of itself.

    Most envs never note that they are open, so that cannot be asked; and a batched one
    refuses to be closed twice.
    """
    parameters = inspect.signature(env.close).parameters
    if "raise_if_closed" in parameters:
        env.close(raise_if_closed=False)
    else:
        env.close()


def _seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def call_env(env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a method of an env, or returns an attribute; dots lead on. See also `calls`.

    What cannot leave the process is left out: the env itself, which ``to`` returns, and
    the locks in a state dict, which is a copy.

    Raises:
        AttributeError: it has no such attribute.
        TypeError: it is not callable, but there are arguments.
    """
    if name == "?describe":
        return EnvMetaData.metadata_from_env(env)

    def find(path: str) -> Any:
        found: Any = env
        for part in path.split("."):
            found = getattr(found, part)
        return found

    if name in SPECIAL:
        return answer(env, find, name, args, kwargs)
    found = call_or_read(find(name), f"{name} of {type(env).__name__}", args, kwargs)
    last = name.rpartition(".")[2]
    if last == "state_dict":
        return snapshot(found)
    return None if last == "to" else found


def snapshot(state: Any) -> Any:
    """Returns a copy of a state dict, with ``None`` for locks, which belong to one process."""
    if isinstance(state, dict):
        return type(state)((key, snapshot(value)) for key, value in state.items())
    if isinstance(state, torch.Tensor | TensorDictBase):
        return state.detach().clone()
    is_lock = hasattr(state, "acquire") and hasattr(state, "release")
    return None if is_lock else state
