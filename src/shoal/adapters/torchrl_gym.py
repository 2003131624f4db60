"""Plain ``GymEnv``s: which they are, and quicker steps and resets for those below transforms.

Knows TorchRL's Gymnasium wrappers and Gymnasium's spaces. Does not know the engine.

A ``GymEnv`` without pixels, frame skip or info readers turns an action into a number or
an array, steps, and makes tensors of what comes back. It looks up how at every step,
which takes longer than CartPole's own step; what follows has looked it up once.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, OneHot, Unbounded
from torchrl.envs import GymEnv, GymWrapper, TransformedEnv

from shoal.adapters.shortcuts import short_step
from shoal.adapters.torchrl_trees import to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

__all__ = ["gymnasium_inside", "quicken"]

_DONE_KEYS = {"done", "terminated", "truncated"}


def gymnasium_inside(env: Any) -> Any:
    """Returns the Gymnasium env in a ``GymEnv`` that adds nothing to it, else ``None``."""
    if type(env) not in (GymEnv, GymWrapper):
        return None
    inner = env.__dict__.get("_env")
    adds_nothing = (
        isinstance(inner, gymnasium.Env)
        and env.batch_size == torch.Size([])
        and env.wrapper_frame_skip == 1
        and not env.from_pixels
        and not env.info_dict_reader
        and not env.run_type_checks
        and not env._allow_done_after_reset
        and env._convert_actions_to_numpy
        and not env.__dict__.get("_torchrl_native_autoreset", False)
        and (env.device is None or env.device.type == "cpu")
        and {str(key) for key in env.done_keys} == _DONE_KEYS
    )
    return inner if adds_nothing else None


def quicken(env: Any) -> None:
    """Gives the plain ``GymEnv`` below some transforms a quicker ``_step`` and ``_reset``.

    Only one that is simple enough. What they return is the same, to the bit and the dtype;
    a reset has all done flags at once, which TorchRL adds after it.
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    inner = gymnasium_inside(env)
    if inner is None or env.device is not None:
        return
    if _Quick.fits(env, inner):
        env.__dict__["_step"] = _QuickStep(env)
        env.__dict__["_reset"] = _QuickReset(env)
        env.__dict__["_complete_done"] = partial(_complete_done, type(env))


def _complete_done(kind: Any, done_spec: Any, data: TensorDictBase) -> TensorDictBase:
    # Called after every step, which has all flags.
    if data.keys() >= _DONE_KEYS:
        return data
    completed: TensorDictBase = kind._complete_done(done_spec, data)
    return completed


class _Quick:
    """A method of one plain ``GymEnv`` with one observation and one action.

    An object, so that a copy of the env calls the copy.
    """

    def __init__(self, env: Any) -> None:
        self.__setstate__(env)

    def __getstate__(self) -> Any:
        return self._env()

    def __setstate__(self, env: Any) -> None:
        # Weakly: the env holds on to this, and shall go when its owner lets it go.
        self._env = weakref.ref(env)
        self._is_ready = False

    def _prepare(self) -> None:
        """Looks up how to read actions and observations; a copy is complete only by now."""
        env: Any = self._env()
        inner = env.__dict__["_env"]
        self._step_env = short_step(inner)
        self._reset_env = inner.reset
        self._read_action = _action_reader(env.full_action_spec["action"], inner.action_space)
        ((self._key, spec),) = env.full_observation_spec.items(True, True)
        self._dtype = spec.dtype
        self._shape = torch.Size(spec.shape)
        self._no_batch = torch.Size([])
        self._is_ready = True

    @staticmethod
    def fits(env: Any, inner: Any) -> bool:
        """Returns whether an env is simple enough."""
        observations = list(env.full_observation_spec.items(True, True))
        if len(observations) != 1 or env.action_keys != ["action"] or env.reward_keys != ["reward"]:
            return False
        key, spec = observations[0]
        box = inner.observation_space
        return bool(
            _action_reader(env.full_action_spec["action"], inner.action_space) is not None
            and isinstance(key, str)
            and type(box) is spaces.Box
            and box.shape
            and isinstance(spec, Bounded | Unbounded)
            and tuple(spec.shape) == box.shape
            and env.reward_spec.dtype == torch.float32
            and tuple(env.reward_spec.shape) == (1,)
        )

    def _read(self, observation: Any) -> torch.Tensor:
        found = torch.as_tensor(observation, dtype=self._dtype)
        if found.shape != self._shape:
            raise RuntimeError(
                f"{self._env()} returned an observation of shape {tuple(found.shape)}, but its"
                f" space has {tuple(self._shape)}"
            )
        return found


class _QuickStep(_Quick):
    """The ``_step`` of a `_Quick` env."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self._is_ready:
            self._prepare()
        assert self._read_action is not None
        observation, reward, terminated, truncated, _ = self._step_env(
            self._read_action(tensordict.get("action"))
        )
        flags = np.array([[terminated], [truncated], [terminated or truncated]], np.bool_)
        ends, cuts, dones = torch.from_numpy(flags)
        entries = {
            self._key: self._read(observation),
            "reward": torch.tensor([float(reward)], dtype=torch.float32),
            "truncated": cuts,
            "done": dones,
            "terminated": ends,
        }
        return TensorDict._new_unsafe(entries, batch_size=self._no_batch)


class _QuickReset(_Quick):
    """The ``_reset`` of a `_Quick` env."""

    def __call__(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if not self._is_ready:
            self._prepare()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is not None and not mask.all():
            raise RuntimeError("a part of a single env cannot be reset: its mask is not all true")
        observation, _ = self._reset_env(**kwargs)
        ends, cuts, dones = torch.zeros(3, 1, dtype=torch.bool)
        entries = {
            self._key: self._read(observation),
            "terminated": ends,
            "truncated": cuts,
            "done": dones,
        }
        return TensorDict._new_unsafe(entries, batch_size=self._no_batch)


def _action_reader(spec: Any, space: Any) -> Callable[[torch.Tensor], Any] | None:
    if type(space) is spaces.Discrete and space.start == 0 and spec.dtype == torch.int64:
        if isinstance(spec, OneHot):
            return lambda action: int(to_numpy(action).argmax(-1))
        return int if isinstance(spec, Categorical) and not spec.shape else None
    if type(space) is spaces.Box and isinstance(spec, Bounded) and tuple(spec.shape) == space.shape:
        dtype = space.dtype
        return lambda action: to_numpy(action).astype(dtype)  # a copy: an env may keep it
    return None
