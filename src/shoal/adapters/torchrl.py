"""A TorchRL env as the engine's env: everything a step takes or returns is a leaf.

Knows torch, tensordict and TorchRL's EnvBase. Does not know the engine or workers.
Imported only where such an env lives.

What the engine calls the observation holds everything that a step returns here:
observations, rewards and done flags of any nesting. What it calls the action holds
everything that a step takes: actions and states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torchrl.data import NonTensor
from torchrl.envs import EnvBase

from shoal.engine.spec import ArraySpec, EnvSpec, LeafPath, LeafSpec, ObjectSpec, describe_path
from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tensordict import TensorDictBase
    from torchrl.data import Composite

__all__ = ["TorchRLEnv", "TorchRLFactory", "leaves_of_specs"]

_MASK = "_reset"


def leaves_of_specs(*specs: Composite) -> dict[LeafPath, LeafSpec]:
    """Returns the leaves of composite specs, sorted by key.

    A leaf of fixed shape and of a dtype that numpy has travels as an array; any other
    travels as an object.
    """
    leaves: dict[LeafPath, LeafSpec] = {}
    for spec in specs:
        for key, leaf in spec.items(True, True):
            leaves[(key,) if isinstance(key, str) else tuple(key)] = _leaf_of(leaf)
    return dict(sorted(leaves.items()))


def _leaf_of(leaf: Any) -> LeafSpec:
    dtype = getattr(leaf, "dtype", None)
    if isinstance(leaf, NonTensor) or dtype is None or any(n < 0 for n in leaf.shape):
        return ObjectSpec(type(leaf).__name__)
    try:
        numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:  # bfloat16 and its like
        return ObjectSpec(str(dtype))
    return ArraySpec(tuple(leaf.shape), numpy_dtype)


class TorchRLEnv:
    """An ``EnvBase`` as the engine sees it.

    Attributes:
        env: the TorchRL env.
        spec: its leaves: what a step takes, and what it returns.
    """

    def __init__(self, env: EnvBase) -> None:
        """Reads the specs; does not reset the env.

        Raises:
            TypeError: it is something else.
        """
        if not isinstance(env, EnvBase):
            raise TypeError(f"expected a torchrl EnvBase, but got {type(env).__name__}")
        self.env = env
        self.spec = EnvSpec(
            observation=leaves_of_specs(
                env.full_observation_spec, env.full_reward_spec, env.full_done_spec
            ),
            action=leaves_of_specs(env.full_action_spec, env.full_state_spec),
        )
        self._inputs = [(_key(path), leaf) for path, leaf in self.spec.action.items()]
        self._outputs = [(_key(path), leaf) for path, leaf in self.spec.observation.items()]
        self._absent_after_reset = {_key_of(key) for key in env.reward_keys}
        self._zeros = {
            key: np.zeros(leaf.shape, leaf.dtype)
            for key, leaf in self._outputs
            if isinstance(leaf, ArraySpec)
        }
        self._done_keys = list(env.done_keys)
        # What the env returned last. A stateless env reads its own past from it, and a
        # caller need not send it back.
        self._root: TensorDictBase | None = None
        self.flatten_observation: Callable[[Any], Sequence[Any]] | None = self._flatten
        self.build_action: Callable[[Sequence[Any]], Any] | None = tuple

    # --- the contract --------------------------------------------------------------

    @torch.no_grad()
    def step(self, action: Sequence[Any]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Steps the env with the leaves of ``spec.action``.

        Returns:
            What ``next`` holds, and whether any of its done flags is true.
        """
        tensordict = self._present()
        for (key, leaf), value in zip(self._inputs, action, strict=True):
            tensordict.set(key, _as_entry(value, leaf))
        tensordict = self.env.step(tensordict)
        following = tensordict.get("next")
        self._root = self.env._step_mdp(tensordict)
        is_done = any(bool(following.get(key).any()) for key in self._done_keys)
        return following, 0.0, is_done, False, {}

    @torch.no_grad()
    def reset(
        self,
        seed: int | None = None,
        tensordict: Mapping[LeafPath, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[TensorDictBase, dict[str, Any]]:
        """Resets the env, or the part of its batch that a mask names.

        Args:
            seed: seeds the env first.
            tensordict: entries that its reset may read, a ``_reset`` mask among them.
            **kwargs: handed to the env's own reset.
        """
        if seed is not None:
            self.env.set_seed(seed)
        given = None
        if tensordict is not None:
            given = (
                self._present()
                if (_MASK,) in tensordict
                else TensorDict({}, batch_size=self.env.batch_size)
            )
            for path, value in tensordict.items():
                given.set(_key(path), torch.as_tensor(value))
        self._root = self.env.reset(given, **kwargs)
        return self._root, {}

    @torch.no_grad()
    def autoreset(self) -> tuple[TensorDictBase, dict[str, Any]]:
        """Resets what is done, as ``EnvBase.maybe_reset`` does after a step."""
        self._root = self.env.maybe_reset(self._present())
        return self._root, {}

    def seed(self, seed: int | None) -> None:
        """Seeds the env; ``None`` changes nothing."""
        if seed is not None:
            self.env.set_seed(seed)

    def save_rng(self) -> object:
        """Returns ``None``: which generators an env draws from is not known."""
        return None

    def load_rng(self, state: object) -> None:
        """Does nothing; see `save_rng`."""

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the env, or returns an attribute; dots lead on."""
        found: Any = self.env
        for part in name.split("."):
            found = getattr(found, part)
        if callable(found):
            return found(*args, **kwargs)
        if args or kwargs:
            raise TypeError(f"{name} of {type(self.env).__name__} takes no arguments")
        return found

    def close(self) -> None:
        """Closes the env."""
        if not self.env.is_closed:
            self.env.close()

    # --- leaves --------------------------------------------------------------------

    def _present(self) -> TensorDictBase:
        # A copy: the env writes into what it is given.
        if self._root is None:
            return TensorDict({}, batch_size=self.env.batch_size, device=self.env.device)
        return self._root.copy()

    def _flatten(self, tensordict: TensorDictBase) -> list[Any]:
        return [self._leaf(tensordict, key, leaf) for key, leaf in self._outputs]

    def _leaf(self, tensordict: TensorDictBase, key: Any, leaf: LeafSpec) -> Any:
        value = tensordict.get(key, None)
        if value is None:
            if key in self._absent_after_reset:
                return self._zeros.get(key)
            raise SpecError(
                key=describe_path("observation", (key,) if isinstance(key, str) else key),
                expected=str(leaf),
                actual="missing",
            )
        if isinstance(leaf, ArraySpec):
            return value.detach().cpu().numpy()
        return _as_object(value)


class TorchRLFactory:
    """Builds one `TorchRLEnv`, in whichever process it is called.

    Attributes:
        create_env_fn: a callable that returns an ``EnvBase``, or an ``EnvCreator``.
        kwargs: its keyword arguments.
        num_threads: torch threads of the process that builds it; ``None`` leaves them.
    """

    preload = ("torchrl.envs", __name__)
    is_cheap = False

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase],
        kwargs: Mapping[str, Any],
        *,
        num_threads: int | None = None,
    ) -> None:
        self.create_env_fn = create_env_fn
        self.kwargs = dict(kwargs)
        self.num_threads = num_threads

    def __call__(self) -> TorchRLEnv:
        """Builds the env.

        Raises:
            TypeError: the callable returned something else.
        """
        if self.num_threads is not None and torch.get_num_threads() != self.num_threads:
            torch.set_num_threads(self.num_threads)
        return TorchRLEnv(self.create_env_fn(**self.kwargs))


def _key(path: LeafPath) -> Any:
    return path[0] if len(path) == 1 else path


def _key_of(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key


def _as_entry(value: Any, leaf: LeafSpec) -> Any:
    if isinstance(leaf, ArraySpec):
        # A row is a copy of this step's own, so its memory can be handed on.
        return torch.from_numpy(np.asarray(value, leaf.dtype))
    return value if isinstance(value, torch.Tensor) else NonTensorData(value)


def _as_object(value: Any) -> Any:
    if isinstance(value, NonTensorData | NonTensorStack):
        return value.tolist() if isinstance(value, NonTensorStack) else value.data
    return value
