"""The factory of TorchRL envs, and the Gymnasium env that a plain ``GymEnv`` is about.

Knows torch, TorchRL's wrappers and both adapters. Does not know the engine.

A ``GymEnv`` without pixels, frame skip or info readers does nothing that the Gymnasium
adapter does not do for a tenth of the price, so its worker steps the env inside it.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
from typing import TYPE_CHECKING, Any

import gymnasium
import torch
from torchrl.envs import EnvBase, GymWrapper

from shoal.adapters.gymnasium import GymnasiumEnv
from shoal.adapters.torchrl import TorchRLEnv
from shoal.adapters.torchrl_calls import call_env, close_env
from shoal.adapters.torchrl_gym import gymnasium_inside, quicken

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["EitherFactory", "GymnasiumInside", "TorchRLFactory"]


# Threads may build envs at the same time, and be given the same one.
_one_at_a_time = threading.Lock()


class GymnasiumInside(GymnasiumEnv):
    """A plain ``GymEnv``: stepped as the Gymnasium env inside it, else asked itself.

    Attributes:
        torchrl_env: the ``GymEnv``.
    """

    def __init__(self, torchrl_env: GymWrapper, env: Any, *, is_apart: bool) -> None:
        super().__init__(env)
        self.torchrl_env = torchrl_env
        self._is_apart = is_apart

    def seed(self, seed: int | None) -> int | None:  # type: ignore[override]
        """Seeds the env; returns the seed that TorchRL's rule has for the env after it."""
        if seed is None:
            return None
        if self._is_apart:
            torch.manual_seed(seed)
        following: int | None = self.torchrl_env.set_seed(seed)
        return following

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the ``GymEnv``, or returns an attribute; dots lead on."""
        if name == "?spaces":
            encoding = self.torchrl_env._categorical_action_encoding
            return self.observation_space, self.action_space, encoding
        return call_env(self.torchrl_env, name, args, kwargs)

    def close(self) -> None:
        """Closes the env."""
        close_env(self.torchrl_env)


class TorchRLFactory:
    """Builds one env of TorchRL, in whichever process it is called.

    Attributes:
        create_env_fn: a callable that returns an ``EnvBase``, or an ``EnvCreator``.
        kwargs: its keyword arguments.
        is_cheap: see `shoal.engine.env.EnvFactory`.
        num_threads: torch threads of a worker; ``None`` leaves them.
        may_unwrap: a plain ``GymEnv`` may be stepped as the Gymnasium env inside it.
        keep_graph: see `TorchRLEnv`.
        built: where envs of this process note that they were built, if one process has
            them all: a function may return the same env twice, which is then copied.
        caller_pid: the process of the caller, whose threads, generators and warnings are
            left alone; ``None`` if no other process builds the env.
        quiet: workers show no warnings, as TorchRL's (``filter_warnings_subprocess``).
    """

    preload = ("torchrl.envs", __name__)
    shares_memory = True

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase],
        kwargs: Mapping[str, Any],
        *,
        is_cheap: bool = False,
        num_threads: int | None = None,
        may_unwrap: bool = True,
        keep_graph: bool = False,
        built: weakref.WeakSet[EnvBase] | None = None,
        caller_pid: int | None = None,
        quiet: bool = False,
    ) -> None:
        self.create_env_fn = create_env_fn
        self.kwargs = dict(kwargs)
        self.is_cheap = is_cheap
        self.num_threads = num_threads
        self.may_unwrap = may_unwrap
        self.keep_graph = keep_graph
        self.built = built
        self.caller_pid = caller_pid
        self.quiet = quiet

    def __call__(self) -> TorchRLEnv | GymnasiumInside:
        """Builds the env and adapts it. Raises what `build` raises."""
        is_apart = self.caller_pid is not None and os.getpid() != self.caller_pid
        if is_apart and self.quiet:
            warnings.filterwarnings("ignore")
        if is_apart and self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        return adapted(
            self._of_its_own(self.build()),
            may_unwrap=self.may_unwrap,
            is_apart=is_apart,
            keep_graph=self.keep_graph,
        )

    def build(self) -> EnvBase:
        """Builds the env of TorchRL; a Gymnasium env gets TorchRL's wrapper.

        Raises:
            TypeError: the callable returned something else.
        """
        env = self.create_env_fn(**self.kwargs)
        if isinstance(env, gymnasium.Env):
            env = GymWrapper(env, categorical_action_encoding=True)
        if not isinstance(env, EnvBase):
            raise TypeError(
                "create_env_fn must return a torchrl EnvBase or a gymnasium.Env,"
                f" but returned a {type(env).__module__}.{type(env).__qualname__}"
            )
        return env

    def _of_its_own(self, env: EnvBase) -> EnvBase:
        if self.built is None:
            return env
        with _one_at_a_time:
            if env in self.built:
                try:
                    env = copy.deepcopy(env)
                except Exception as exc:  # noqa: BLE001 - border: foreign code
                    warnings.warn(
                        f"create_env_fn returned the same {type(env).__name__} more than once, and"
                        f" it cannot be copied ({type(exc).__name__}: {exc}): its state is shared."
                        " Let the function build a new env at every call.",
                        stacklevel=2,
                    )
            self.built.add(env)
        return env


class EitherFactory:
    """Builds an env of a kind that only its function knows.

    Attributes:
        create_env_fn: a callable that returns an ``EnvBase`` or a ``gymnasium.Env``.
        kwargs: its keyword arguments.
        num_threads: torch threads of a worker.
        may_unwrap: see `TorchRLFactory`.
        caller_pid: see `TorchRLFactory`.
    """

    preload = TorchRLFactory.preload
    is_cheap = False
    shares_memory = True

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        kwargs: Mapping[str, Any],
        *,
        num_threads: int,
        may_unwrap: bool,
        caller_pid: int | None,
    ) -> None:
        self.create_env_fn = create_env_fn
        self.kwargs = dict(kwargs)
        self.num_threads = num_threads
        self.may_unwrap = may_unwrap
        self.caller_pid = caller_pid

    def __call__(self) -> TorchRLEnv | GymnasiumEnv:
        """Builds the env."""
        is_apart = self.caller_pid is not None and os.getpid() != self.caller_pid
        if is_apart:
            torch.set_num_threads(self.num_threads)
        env = self.create_env_fn(**self.kwargs)
        if isinstance(env, EnvBase):
            return adapted(env, may_unwrap=self.may_unwrap, is_apart=is_apart)
        return GymnasiumEnv(env)


def adapted(
    env: EnvBase, *, may_unwrap: bool, is_apart: bool, keep_graph: bool = False
) -> TorchRLEnv | GymnasiumInside:
    """Returns an env of TorchRL as the engine's; see `TorchRLFactory` for the options."""
    env.set_spec_lock_()
    inner = gymnasium_inside(env) if may_unwrap and not keep_graph else None
    if inner is not None:
        return GymnasiumInside(env, inner, is_apart=is_apart)
    quicken(env)
    return TorchRLEnv(env, keep_graph=keep_graph, is_apart=is_apart)
