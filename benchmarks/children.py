"""Envs of TorchRL as the children of batched envs: how each kind is made, and who steps it.

The ``env_id`` of these contenders is a key of `CHILDREN`. Knows TorchRL's envs and shoal's
front for them; no item and no bar.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal._compare.contenders import (
    ShoalParallel,
    TorchRLContender,
    TorchRLSerial,
    sample_actions,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CHEETAH",
    "CHILDREN",
    "GYM_ENV",
    "TRANSFORMED",
    "BareChild",
    "ShoalParallelById",
    "ShoalParallelChildren",
    "ShoalSerialChildren",
    "TorchRLForkedChildren",
    "TorchRLSerialChildren",
    "TorchRLSpawnedChildren",
]

_CARTPOLE = "CartPole-v1"
_NUM_PREPARED = 256
_SEED = 7


# Functions of a module, because TorchRL's spawned workers are given them by name.


def make_gym_env() -> Any:
    """CartPole in TorchRL's ``GymEnv``, nothing else."""
    from torchrl.envs import GymEnv

    return GymEnv(_CARTPOLE)


def make_transformed() -> Any:
    """The same under two transforms, in the worker."""
    from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv

    return TransformedEnv(make_gym_env(), Compose(StepCounter(), RewardSum()))


def make_cheetah() -> Any:
    """The half-cheetah of dm_control, which has no Gymnasium env inside it."""
    # Said again by every worker, in the middle of the table.
    warnings.filterwarnings("ignore", module="glfw")
    from absl import logging

    logging.set_verbosity(logging.ERROR)
    from torchrl.envs import DMControlEnv

    return DMControlEnv("cheetah", "run")


GYM_ENV = "GymEnv"
TRANSFORMED = "TransformedEnv"
CHEETAH = "DMControlEnv"
CHILDREN: dict[str, Callable[[], Any]] = {
    GYM_ENV: make_gym_env,
    TRANSFORMED: make_transformed,
    CHEETAH: make_cheetah,
}


class _OverChildren(TorchRLContender):
    """A contender whose envs, and whose actions, are those of a kind of child."""

    @property
    def maker(self) -> Callable[[], Any]:
        """The function that makes one child."""
        return CHILDREN[self.env_id]

    def actions(self) -> np.ndarray:
        if self.env_id != CHEETAH:
            return sample_actions(
                _CARTPOLE, num_envs=self.num_envs, num_steps=_NUM_PREPARED, seed=_SEED
            )
        env = self.maker()
        spec = env.full_action_spec["action"]
        env.close()
        low, high = spec.space.low.numpy(), spec.space.high.numpy()
        shape = (_NUM_PREPARED, self.num_envs, *spec.shape)
        return np.random.default_rng(_SEED).uniform(low, high, size=shape)


class BareChild(_OverChildren):
    """One child in this process by its own ``step_and_maybe_reset``: what one core can do."""

    name = "bare env, one core"

    def __init__(self, env_id: str) -> None:
        super().__init__(env_id, 1)

    def make(self) -> Any:
        return self.maker()

    def actions(self) -> np.ndarray:
        one: np.ndarray = super().actions()[:, 0]
        return one


class TorchRLSerialChildren(_OverChildren):
    """TorchRL's ``SerialEnv``."""

    name = TorchRLSerial.name

    def make(self) -> Any:
        from torchrl.envs import SerialEnv

        return SerialEnv(self.num_envs, self.maker)


class TorchRLSpawnedChildren(_OverChildren):
    """TorchRL's ``ParallelEnv`` as it is by default: a fresh interpreter per env.

    Each one imports torch anew, so that the start takes seconds per env and core.
    """

    name = "TorchRL ParallelEnv, spawned"
    start_method = "spawn"

    def make(self) -> Any:
        from torchrl.envs import ParallelEnv

        return ParallelEnv(self.num_envs, self.maker, mp_start_method=self.start_method)


class TorchRLForkedChildren(TorchRLSpawnedChildren):
    """TorchRL's ``ParallelEnv`` of forked processes, which start at once and share pages.

    Not its default; here because it may be the faster one, and can be had at any size.
    """

    name = "TorchRL ParallelEnv, forked"
    start_method = "fork"


class ShoalSerialChildren(_OverChildren):
    """``shoal.SerialEnv``."""

    name = "shoal SerialEnv"

    def make(self) -> Any:
        from shoal import SerialEnv

        return SerialEnv(self.num_envs, self.maker)


class ShoalParallelChildren(_OverChildren):
    """``shoal.ParallelEnv``."""

    name = ShoalParallel.name

    def make(self) -> Any:
        from shoal import ParallelEnv

        return ParallelEnv(self.num_envs, self.maker)


class ShoalParallelById(ShoalParallel):
    """``shoal.ParallelEnv`` given the Gymnasium id of what the children of `GYM_ENV` wrap."""

    name = "shoal ParallelEnv, by id"

    def __init__(self, env_id: str, num_envs: int) -> None:
        """Takes what the others take; there is only one id."""
        super().__init__(_CARTPOLE, num_envs)
