"""The contenders that only the benchmarks need: more peers, and more faces of shoal."""

from __future__ import annotations

import multiprocessing
from itertools import cycle, islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

from shoal._compare.contenders import (
    Contender,
    Raw,
    ShoalParallel,
    TorchRLSerial,
    env_maker,
)
from shoal.engine.system.cores import count_usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = [
    "EnvPool",
    "RawEverywhere",
    "ShoalRollout",
    "ShoalTransformed",
    "StableBaselines",
    "TorchRLSerialTransformed",
]


class RawEverywhere(Contender):
    """A raw env in one process per usable core, or in more, all at the same time.

    No batches, no waiting for each other: what is left of the limit while the machine
    is as busy as it is now. Far below 1.00, it is the machine that is short.
    """

    def __init__(
        self,
        env_id: str,
        raw: Callable[[str], Contender] = Raw,
        *,
        num_processes: int | None = None,
    ) -> None:
        """Takes who steps one env, and how many do; ``None``: as many as there are usable cores."""
        super().__init__(env_id, num_processes or count_usable_cores())
        self._raw = raw(env_id)
        self.name = self._raw.name.replace("one core", "all cores")

    def open(self) -> None:
        with self._raw:  # a missing library is found, and any is imported, in this process
            self._raw.run(1)
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(self.num_envs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_raw, args=(self._raw, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.run(1)

    def run(self, num_steps: int) -> float:
        started_at = perf_counter()
        for pipe in self._pipes:
            pipe.send(num_steps)
        for pipe in self._pipes:
            pipe.recv()
        return perf_counter() - started_at

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join()


def _run_raw(raw: Contender, pipe: Connection) -> None:
    with raw:
        while num_steps := pipe.recv():
            pipe.send(raw.run(num_steps))


class StableBaselines(Contender):
    """Stable-Baselines3's ``SubprocVecEnv``, one process per env.

    Its workers are forked: by default each one would import torch anew, for seconds.
    How fast they step afterwards does not depend on it.
    """

    name = "SB3 SubprocVecEnv"

    def open(self) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        maker = env_maker(self.env_id)
        self._envs = SubprocVecEnv([maker] * self.num_envs, start_method="fork")
        self._envs.reset()
        self._prepared = list(self.actions())

    def run(self, num_steps: int) -> float:
        step = self._envs.step
        started_at = perf_counter()
        for actions in islice(cycle(self._prepared), num_steps):
            step(actions)
        return perf_counter() - started_at

    def close(self) -> None:
        self._envs.close()


class EnvPool(Contender):
    """EnvPool in its synchronous mode. Its envs are C++: another CartPole, not the same one."""

    name = "EnvPool (C++ envs)"

    def open(self) -> None:
        import envpool

        self._envs = envpool.make_gymnasium(self.env_id, num_envs=self.num_envs)
        self._envs.reset()
        self._prepared = list(self.actions())

    def run(self, num_steps: int) -> float:
        step = self._envs.step
        started_at = perf_counter()
        for actions in islice(cycle(self._prepared), num_steps):
            step(actions)
        return perf_counter() - started_at

    def close(self) -> None:
        self._envs.close()


class ShoalRollout(ShoalParallel):
    """``shoal.ParallelEnv.rollout`` with its random policy, across episodes' ends."""

    name = "shoal ParallelEnv.rollout"

    def run(self, num_steps: int) -> float:
        started_at = perf_counter()
        self._env.rollout(num_steps, break_when_any_done=False)
        return perf_counter() - started_at


def _with_reward_sum(env: Any) -> Any:
    from torchrl.envs import RewardSum, TransformedEnv

    return TransformedEnv(env, RewardSum())


class ShoalTransformed(ShoalParallel):
    """``shoal.ParallelEnv`` below ``TransformedEnv`` with ``RewardSum``."""

    name = "shoal ParallelEnv + RewardSum"

    def make(self) -> Any:
        return _with_reward_sum(super().make())


class TorchRLSerialTransformed(TorchRLSerial):
    """TorchRL's ``SerialEnv`` below ``TransformedEnv`` with ``RewardSum``."""

    name = "TorchRL SerialEnv + RewardSum"

    def make(self) -> Any:
        return _with_reward_sum(super().make())
