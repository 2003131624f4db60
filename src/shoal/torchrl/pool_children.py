"""The envs of a pool before they run: instances, makers and factories by backend.

Knows both adapters. Does not know how a pool sends or receives.
"""

from __future__ import annotations

import math
import os
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torchrl.envs import EnvBase

from shoal.adapters.coroutines import AsyncGymnasiumFactory
from shoal.adapters.torchrl_factory import TorchRLFactory
from shoal.errors import UsageError
from shoal.torchrl.children import GymnasiumChildren
from shoal.torchrl.torchrl_children import GymnasiumMaker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.adapters.gymnasium import GymnasiumDescription

__all__ = [
    "AsyncChildren",
    "GivenEnv",
    "async_factories",
    "makers_of",
    "masks_of",
    "num_processes_for",
    "share_spaces",
    "wrapping_factories",
]


class GivenEnv:
    """An env that was built by the caller, as a maker of one."""

    def __init__(self, env: Any) -> None:
        """Keeps the env."""
        self.env = env
        self._is_used = False

    def __call__(self) -> Any:
        """Returns the env; once."""
        if self._is_used:
            raise UsageError(
                f"the pool was given a {type(self.env).__name__} and has closed it, so it cannot"
                " start again; give it a function that makes the env"
            )
        self._is_used = True
        return self.env


def makers_of(env_makers: Any) -> list[Any]:
    """Returns one maker per env.

    Args:
        env_makers: a Gymnasium id, a callable, an env, or a sequence of those. Anything but
            a sequence stands for one env.
    """
    if isinstance(env_makers, str) or not isinstance(env_makers, list | tuple):
        env_makers = [env_makers]
    return [GivenEnv(maker) if _is_env(maker) else maker for maker in env_makers]


def _is_env(maker: Any) -> bool:
    # An EnvBase can be called, as every nn.Module can.
    if isinstance(maker, EnvBase):
        return True
    return (
        not isinstance(maker, type)
        and hasattr(maker, "step")
        and hasattr(maker, "reset")
        and hasattr(maker, "observation_space")
    )


def num_processes_for(num_envs: int, envs_per_worker: Any) -> int:
    """Returns the number of worker processes.

    Raises:
        ValueError: ``envs_per_worker`` is no positive integer.
    """
    if (
        isinstance(envs_per_worker, bool)
        or not isinstance(envs_per_worker, int)
        or envs_per_worker < 1
    ):
        raise ValueError(f"envs_per_worker is an integer >= 1, not {envs_per_worker!r}")
    return math.ceil(num_envs / envs_per_worker)


def masks_of(worker_affinity: Any, num_processes: int) -> list[list[int]] | None:
    """Returns the cores of each worker process.

    Args:
        worker_affinity: one collection of cores per worker, or a function from its number.
        num_processes: how many workers there are.

    Raises:
        ValueError: masks for another number of workers, an empty one, or a core that this
            process may not use.
        TypeError: something else than integers.
    """
    if worker_affinity is None:
        return None
    if callable(worker_affinity):
        worker_affinity = [worker_affinity(number) for number in range(num_processes)]
    masks = [_mask_of(mask, number) for number, mask in enumerate(worker_affinity)]
    if len(masks) != num_processes:
        raise ValueError(
            f"worker_affinity holds {len(masks)} masks for {num_processes} worker processes; give"
            " one for each"
        )
    return masks


def _mask_of(mask: Any, number: int) -> list[int]:
    name = f"worker_affinity[{number}]"
    try:
        cores = list(mask)
    except TypeError:
        raise TypeError(f"{name} is a collection of core numbers, not {mask!r}") from None
    if not all(isinstance(core, Integral) and not isinstance(core, bool) for core in cores):
        raise TypeError(f"{name} holds core numbers, which are integers; not {cores}")
    if not cores:
        raise ValueError(f"{name} is empty: a worker needs at least one core")
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(cores)
    if wrong := sorted(set(cores) - usable):
        raise ValueError(
            f"{name} names cores {wrong}, and this process may use {sorted(usable)} only"
        )
    return [int(core) for core in cores]


def share_spaces(descriptions: Sequence[GymnasiumDescription]) -> bool:
    """Returns whether Gymnasium envs have the same spaces."""
    first = descriptions[0]
    return all(
        other.observation_space == first.observation_space
        and other.action_space == first.action_space
        for other in descriptions[1:]
    )


def wrapping_factories(makers: list[Any], kwargs: list[dict[str, Any]]) -> list[Any]:
    """Returns factories that give Gymnasium envs TorchRL's wrapper: they differ in spaces."""
    return [
        TorchRLFactory(maker if callable(maker) else GymnasiumMaker(maker), own, may_unwrap=False)
        for maker, own in zip(makers, kwargs, strict=True)
    ]


def async_factories(makers: list[Any], kwargs: list[dict[str, Any]]) -> list[Any]:
    """Returns factories of envs whose reset and step are coroutines.

    Raises:
        TypeError: an id: what Gymnasium makes of it is a plain env.
    """
    for maker in makers:
        if not callable(maker):
            raise TypeError(
                f"backend='asyncio' runs envs whose reset and step are `async def`, and {maker!r}"
                " names a plain one; use backend='threading' or 'multiprocessing'"
            )
    return [AsyncGymnasiumFactory(m, own) for m, own in zip(makers, kwargs, strict=True)]


class AsyncChildren(GymnasiumChildren):
    """Envs with Gymnasium's members whose reset and step are coroutines; see `Children`."""

    def factories(
        self, makers: list[Any], kwargs: list[dict[str, Any]], backend: str = ""
    ) -> list[Any]:
        """Returns one factory per env."""
        return async_factories(makers, kwargs)
