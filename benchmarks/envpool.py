"""Contenders on EnvPool's own envs: EnvPool bare, and as a TorchRL environment."""

from __future__ import annotations

from itertools import cycle, islice
from time import perf_counter
from typing import Any

from shoal._compare.contenders import Contender, TorchRLContender

__all__ = ["BareEnvPool", "ShoalMultiThreaded", "ShoalMultiThreadedRollout"]


def task_of(env_id: str) -> str:
    """Returns EnvPool's name of a Gymnasium env."""
    return env_id.rpartition(":")[2].replace("ALE/", "")


class BareEnvPool(Contender):
    """EnvPool's own ``step``: numpy arrays, and fake steps where episodes end."""

    name = "EnvPool, bare step"

    def open(self) -> None:
        import envpool

        self._envs = envpool.make_gymnasium(task_of(self.env_id), num_envs=self.num_envs)
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


class ShoalMultiThreaded(TorchRLContender):
    """``shoal.MultiThreadedEnv``: TensorDicts, and each ended env reset at once."""

    name = "shoal MultiThreadedEnv"

    def make(self) -> Any:
        from shoal import MultiThreadedEnv

        return MultiThreadedEnv(self.num_envs, task_of(self.env_id))


class ShoalMultiThreadedRollout(ShoalMultiThreaded):
    """Its ``rollout`` with a random policy, across episodes' ends."""

    name = "shoal MultiThreadedEnv.rollout"

    def run(self, num_steps: int) -> float:
        started_at = perf_counter()
        self._env.rollout(num_steps, break_when_any_done=False)
        return perf_counter() - started_at
