"""A native pool whose every step waits for the test, and helpers around real ones."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np

from shoal.adapters.envpool import EnvPoolFactory
from shoal.engine import Engine
from shoal.engine.env import PoolResults
from shoal.engine.spec import ArraySpec, EnvSpec

CARTPOLE = "CartPole-v1"


def cartpoles(num_envs: int, **kwargs: Any) -> EnvPoolFactory:
    seeds = tuple(kwargs.pop("seeds", range(100, 100 + num_envs)))
    return EnvPoolFactory(CARTPOLE, num_envs, {"num_threads": 1, **kwargs}, seeds)


def engine_of(factory: Any, **options: Any) -> Engine:
    return Engine(list(factory), backend="envpool", **options)


def count_calls(engine: Engine) -> dict[str, list[Any]]:
    """Notes what the engine's pool is asked from now on."""
    pool: Any = engine._backend._pool  # type: ignore[attr-defined]
    calls: dict[str, list[Any]] = {"send": [], "reset": [], "recv": []}
    for name, noted in calls.items():
        setattr(pool, name, _noting(getattr(pool, name), noted))
    return calls


def _noting(call: Any, noted: list[Any]) -> Any:
    def run(*args: Any) -> Any:
        noted.append(args)
        return call(*args)

    return run


class ScriptedPool:
    """Counts the steps of each env; an episode has three. `finish` lets envs be done.

    Results come in the order in which envs finish, ``batch_size`` at a time, or all that
    are busy at once.
    """

    def __init__(self, num_envs: int, batch_size: int) -> None:
        self.num_envs, self.batch_size = num_envs, batch_size
        self.waits_for_all = batch_size == num_envs
        self.spec = EnvSpec(
            observation={(): ArraySpec((), np.dtype(np.int64))},
            action={(): ArraySpec((), np.dtype(np.int64))},
            undoes_resets=False,
        )
        self.num_threads = 0
        self.steps = np.full(num_envs, -1)
        self.interrupts: list[str] = []
        self.is_closed = False
        self._busy: deque[int] = deque()
        self._done: deque[tuple[int, int, bool]] = deque()
        self._changed = threading.Condition()
        self.is_free = False

    def __call__(self) -> ScriptedPool:
        return self

    def __iter__(self) -> Any:
        return iter([self] * self.num_envs)

    def finish(self, *env_ids: int) -> None:
        with self._changed:
            for env_id in env_ids:
                self._busy.remove(env_id)
                self._done.append((env_id, int(self.steps[env_id]), self.steps[env_id] >= 3))
            self._changed.notify_all()

    def free(self) -> None:
        """Lets whatever is busy, now or later, be done at once."""
        with self._changed:
            self.is_free = True
        self.finish(*self._busy)

    def pack(self, actions: Any, env_ids: Any) -> Any:
        ids = np.arange(self.num_envs) if env_ids is None else env_ids
        return ids, actions[()][ids].copy()

    def unfit(self, actions: Any, env_ids: Any) -> Any:
        return None

    def send(self, packed: Any) -> None:
        self._interrupt("before send")
        assert not any(i in self._busy for i in packed[0]), "an env was sent to twice"
        self.steps[packed[0]] += 1
        self._begin(packed[0])

    def reset(self, ids: Any) -> None:
        self._interrupt("before reset")
        self.steps[ids] = 0
        self._begin(ids)

    def _begin(self, ids: Any) -> None:
        if self.waits_for_all:
            assert not self._busy, "two requests at once"
            assert not self._done, "two requests at once"
        self._busy.extend(ids.tolist())
        if self.is_free:
            self.finish(*ids.tolist())

    def recv(self) -> Any:
        self._interrupt("before recv")
        with self._changed:
            while len(self._done) < self._wanted():
                self._changed.wait()
            return [self._done.popleft() for _ in range(self._wanted())]

    def _wanted(self) -> int:
        return len(self._busy) + len(self._done) if self.waits_for_all else self.batch_size

    def _interrupt(self, where: str) -> None:
        if where in self.interrupts:
            self.interrupts.remove(where)
            raise KeyboardInterrupt

    def unpack(self, received: Any) -> PoolResults:
        self._interrupt("in between")
        ids = np.array([r[0] for r in received], np.int32)
        steps = np.array([r[1] for r in received])
        over = np.array([r[2] for r in received], np.bool_)
        return PoolResults(ids, [steps], steps.astype(float), over, np.zeros_like(over))

    def seed(self, seeds: Any) -> None:
        self.steps.fill(-1)

    def call(self, name: str, args: Any, kwargs: Any) -> Any:
        return getattr(self, name)

    def close(self) -> None:
        self.is_closed = True
