"""The ways to step many envs that are compared: plain Gymnasium, TorchRL and shoal.

Each contender imports its own library when it is opened. All of one env get the
same actions, made beforehand, and every peer runs with its default settings unless
its docstring says otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import gymnasium

__all__ = [
    "Contender",
    "GymnasiumAsync",
    "GymnasiumSync",
    "Raw",
    "ShoalEngine",
    "ShoalParallel",
    "TorchRLParallel",
    "TorchRLSerial",
    "env_maker",
    "make_env",
    "sample_actions",
]

_NUM_PREPARED = 256
_SEED = 7


def make_env(env_id: str) -> gymnasium.Env[Any, Any]:
    """Makes one Gymnasium env; an id may name its module first, as ``ale_py:ALE/Pong-v5``."""
    import gymnasium

    return gymnasium.make(env_id)


def env_maker(env_id: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Returns a factory of `make_env` that can be pickled."""
    return partial(make_env, env_id)


def shoal_maker(env_id: str) -> Any:
    """Returns what ``shoal.ParallelEnv`` is given: the id, as a user would write it.

    An Atari game needs a function: by its id, ``ParallelEnv`` makes it as TorchRL's
    ``GymEnv`` does, with a frame skip of 1, and would step another env than the rest.
    """
    return env_maker(env_id) if "ALE/" in env_id else env_id


def make_torchrl_env(env_id: str) -> Any:
    """Makes the same env for TorchRL.

    Not ``GymEnv(env_id)``: given an id of an Atari game, that one sets its frame skip
    to 1, and would step another env than the rest.
    """
    from torchrl.envs import GymWrapper

    return GymWrapper(make_env(env_id))


def sample_actions(env_id: str, *, num_envs: int, num_steps: int, seed: int) -> np.ndarray:
    """Returns random actions ``[num_steps, num_envs, ...]`` for a Discrete or a Box space."""
    from gymnasium import spaces

    env = make_env(env_id)
    space = env.action_space
    env.close()
    rng = np.random.default_rng(seed)
    shape = (num_steps, num_envs, *(space.shape or ()))
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.start, space.start + space.n, size=shape, dtype=np.int64)
    if isinstance(space, spaces.Box):
        return rng.uniform(space.low, space.high, size=shape).astype(space.dtype)
    raise TypeError(f"cannot sample actions of {env_id}: its action space is {space}")


class Contender(ABC):
    """One way to step ``num_envs`` envs.

    Attributes:
        name: what the tables call it.
        num_envs: env-steps per vector step.
    """

    name: str

    def __init__(self, env_id: str, num_envs: int) -> None:
        self.env_id = env_id
        self.num_envs = num_envs

    @abstractmethod
    def open(self) -> None:
        """Builds the envs and resets them once.

        Raises:
            ImportError: the library it needs is not installed.
        """

    @abstractmethod
    def run(self, num_steps: int) -> float:
        """Makes ``num_steps`` vector steps and returns the seconds that they took."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; may be called once after `open`."""

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def actions(self) -> np.ndarray:
        """The prepared actions; the same for every contender of the same size."""
        return sample_actions(
            self.env_id, num_envs=self.num_envs, num_steps=_NUM_PREPARED, seed=_SEED
        )


class Raw(Contender):
    """One Gymnasium env in this process, resets included: what one core can do at best."""

    name = "raw env, one core"

    def __init__(self, env_id: str) -> None:
        super().__init__(env_id, 1)

    def open(self) -> None:
        self._env = make_env(self.env_id)
        self._env.reset(seed=0)
        self._prepared = list(self.actions()[:, 0])

    def run(self, num_steps: int) -> float:
        step, reset = self._env.step, self._env.reset
        started_at = perf_counter()
        for action in islice(cycle(self._prepared), num_steps):
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                reset()
        return perf_counter() - started_at

    def close(self) -> None:
        self._env.close()


class _GymnasiumVector(Contender):
    """A Gymnasium vector env; the step after an episode's end is its reset, as by default."""

    def make(self) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        raise NotImplementedError

    def open(self) -> None:
        self._envs = self.make()
        self._envs.reset(seed=0)
        self._prepared = list(self.actions())

    def run(self, num_steps: int) -> float:
        step = self._envs.step
        started_at = perf_counter()
        for actions in islice(cycle(self._prepared), num_steps):
            step(actions)
        return perf_counter() - started_at

    def close(self) -> None:
        self._envs.close()


class GymnasiumSync(_GymnasiumVector):
    """Gymnasium's ``SyncVectorEnv``: all envs in this process, one after the other."""

    name = "Gymnasium SyncVectorEnv"

    def make(self) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        from gymnasium.vector import SyncVectorEnv

        return SyncVectorEnv([env_maker(self.env_id)] * self.num_envs)


class GymnasiumAsync(_GymnasiumVector):
    """Gymnasium's ``AsyncVectorEnv``: one process per env, observations in shared memory."""

    name = "Gymnasium AsyncVectorEnv"

    def make(self) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        from gymnasium.vector import AsyncVectorEnv

        return AsyncVectorEnv([env_maker(self.env_id)] * self.num_envs)


class TorchRLContender(Contender):
    """A TorchRL ``EnvBase``, stepped by ``step_and_maybe_reset``."""

    def make(self) -> Any:
        """Returns the batched env."""
        raise NotImplementedError

    def open(self) -> None:
        self._env = self.make()
        self._data = self._env.reset()
        self._prepared = torch_actions(self._env, self.actions())

    def run(self, num_steps: int) -> float:
        step, data = self._env.step_and_maybe_reset, self._data
        started_at = perf_counter()
        for action in islice(cycle(self._prepared), num_steps):
            data.set("action", action)
            _, data = step(data)
        elapsed_s = perf_counter() - started_at
        self._data = data
        return elapsed_s

    def close(self) -> None:
        self._env.close()


def torch_actions(env: Any, actions: np.ndarray) -> Sequence[Any]:
    """Returns the same actions as tensors in the encoding that the env asks for."""
    import torch

    tensors = torch.from_numpy(actions)
    spec = env.full_action_spec["action"]
    if spec.shape != tensors.shape[1:]:  # TorchRL encodes discrete actions one-hot
        tensors = torch.nn.functional.one_hot(tensors, spec.shape[-1])
    return list(tensors.to(spec.dtype).unbind(0))


class TorchRLSerial(TorchRLContender):
    """TorchRL's ``SerialEnv`` over ``GymWrapper``."""

    name = "TorchRL SerialEnv"

    def make(self) -> Any:
        from torchrl.envs import SerialEnv

        return SerialEnv(self.num_envs, partial(make_torchrl_env, self.env_id))


class TorchRLParallel(TorchRLContender):
    """TorchRL's ``ParallelEnv`` over ``GymWrapper``, one process per env.

    Its workers are forked: by default each one would import torch anew, for seconds.
    How fast they step afterwards does not depend on it.
    """

    name = "TorchRL ParallelEnv"

    def make(self) -> Any:
        from torchrl.envs import ParallelEnv

        maker = partial(make_torchrl_env, self.env_id)
        return ParallelEnv(self.num_envs, maker, mp_start_method="fork")


class ShoalEngine(Contender):
    """``shoal.engine.Engine``: numpy arrays in and out, no torch."""

    name = "shoal Engine"

    def open(self) -> None:
        from shoal.adapters.gymnasium import GymnasiumFactory
        from shoal.engine import Engine

        factory = GymnasiumFactory.of(self.env_id, {})
        self.engine = Engine([factory] * self.num_envs, backend="processes", num_processes=None)
        self.engine.reset(seed=list(range(self.num_envs)))
        self._prepared = list(self.actions())

    def run(self, num_steps: int) -> float:
        step = self.engine.step
        started_at = perf_counter()
        for actions in islice(cycle(self._prepared), num_steps):
            step(actions)
        return perf_counter() - started_at

    def close(self) -> None:
        self.engine.close()


class ShoalParallel(TorchRLContender):
    """``shoal.ParallelEnv``, stepped by ``step_and_maybe_reset``."""

    name = "shoal ParallelEnv"

    def make(self) -> Any:
        from shoal import ParallelEnv

        return ParallelEnv(self.num_envs, shoal_maker(self.env_id))
