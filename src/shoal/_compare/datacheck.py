"""Is the data right? Shoal's batches against the same envs stepped one by one.

The same seeds and the same actions go to plain Gymnasium envs in this process, and
every observation, reward and flag has to be equal to the last bit.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal._compare.contenders import env_maker, make_env, sample_actions, torch_actions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DataCheck", "check_engine", "check_parallel_env"]

_MAX_MISMATCHES = 10
_OUTCOME = ("reward", "terminated", "truncated")


@dataclass(slots=True)
class DataCheck:
    """The outcome of one check.

    Attributes:
        env_id: the env.
        num_envs: how many of them.
        num_steps: vector steps compared.
        num_arrays: arrays compared.
        num_episodes: episodes that ended on the way, each one with a reset compared.
        mismatches: the first few differences, in words; empty if all is equal.
    """

    env_id: str
    num_envs: int
    num_steps: int = 0
    num_arrays: int = 0
    num_episodes: int = 0
    mismatches: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether every array was equal."""
        return not self.mismatches

    def compare(self, what: str, actual: np.ndarray, expected: Sequence[Any]) -> None:
        """Compares one batch, after giving the expected values the actual dtype."""
        self.num_arrays += 1
        # TorchRL keeps rewards as float32: round ours the same way, then ask for equality.
        stacked = np.asarray(expected).astype(actual.dtype, copy=False)
        if stacked.size != actual.size:
            self._differs(f"{what} has shape {actual.shape}, not {stacked.shape}")
            return
        stacked = stacked.reshape(actual.shape)
        if stacked.tobytes() != actual.tobytes():
            rows = (stacked != actual).reshape(len(expected), -1).any(axis=1)
            self._differs(f"{what} differs in rows {np.flatnonzero(rows)[:8].tolist()}")

    def _differs(self, text: str) -> None:
        if len(self.mismatches) < _MAX_MISMATCHES:
            self.mismatches.append(f"step {self.num_steps}: {text}")


class _Twins:
    """Plain Gymnasium envs, stepped one by one."""

    def __init__(self, env_id: str, num_envs: int, undo: ExitStack) -> None:
        self._envs = [make_env(env_id) for _ in range(num_envs)]
        for env in self._envs:
            undo.callback(env.close)
        self.observations: list[Any] = [None] * num_envs

    def reset(self, seeds: Sequence[int | None]) -> list[Any]:
        results = [env.reset(seed=seed) for env, seed in zip(self._envs, seeds, strict=True)]
        self.observations = [observation for observation, _ in results]
        return self.observations

    def step(self, actions: np.ndarray) -> tuple[list[Any], ...]:
        results = [env.step(action) for env, action in zip(self._envs, actions, strict=True)]
        observations, rewards, terminated, truncated, _ = zip(*results, strict=True)
        self.observations = list(observations)
        return list(observations), list(rewards), list(terminated), list(truncated)

    def reset_done(self, terminated: Sequence[bool], truncated: Sequence[bool]) -> list[int]:
        done = [i for i, ends in enumerate(zip(terminated, truncated, strict=True)) if any(ends)]
        for i in done:
            self.observations[i], _ = self._envs[i].reset()
        return done


def check_parallel_env(
    env_id: str,
    *,
    num_envs: int,
    num_steps: int,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> DataCheck:
    """Rolls out ``shoal.ParallelEnv`` and compares it with plain Gymnasium envs.

    Args:
        env_id: a Gymnasium id with one array as its observation.
        num_envs: how many envs.
        num_steps: how many vector steps.
        seed: seed of the whole batch; each env's seed follows as in TorchRL.
        on_step: called after each vector step.

    Returns:
        What was compared and what differed.
    """
    from shoal import ParallelEnv

    check = DataCheck(env_id, num_envs)
    actions = sample_actions(env_id, num_envs=num_envs, num_steps=num_steps, seed=seed)
    with ExitStack() as undo:
        twins = _Twins(env_id, num_envs, undo)
        batched = ParallelEnv(num_envs, env_maker(env_id))
        undo.callback(batched.close)
        batched.set_seed(seed)
        twins.reset(_seed_chain(seed, num_envs))
        data = batched.reset()
        (key,) = batched.observation_spec.keys(include_nested=True, leaves_only=True)
        check.compare("reset observation", data[key].numpy(), twins.reset([None] * num_envs))
        for action, tensor in zip(actions, torch_actions(batched, actions), strict=True):
            data.set("action", tensor)
            result, data = batched.step_and_maybe_reset(data)
            expected = twins.step(action)
            for name, values in zip((key, *_OUTCOME), expected, strict=True):
                check.compare(name, result["next", name].numpy(), values)
            check.num_episodes += len(twins.reset_done(*expected[2:]))
            check.compare("observation to go on from", data[key].numpy(), twins.observations)
            check.num_steps += 1
            on_step()
    return check


def check_engine(
    env_id: str,
    *,
    num_envs: int,
    num_steps: int,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> DataCheck:
    """Does the same with ``shoal.engine.Engine``; arguments as in `check_parallel_env`."""
    from shoal.adapters.gymnasium import GymnasiumFactory
    from shoal.engine import Engine

    check = DataCheck(env_id, num_envs)
    actions = sample_actions(env_id, num_envs=num_envs, num_steps=num_steps, seed=seed)
    seeds = range(seed, seed + num_envs)
    with ExitStack() as undo:
        twins = _Twins(env_id, num_envs, undo)
        engine = Engine([GymnasiumFactory.of(env_id, {})] * num_envs, backend="processes")
        undo.callback(engine.close)
        batch = engine.reset(seed=list(seeds))
        check.compare("reset observation", batch.observation[()], twins.reset(seeds))
        for action in actions:
            batch = engine.step(action)
            observations, *outcome = twins.step(action)
            for name, values in zip(_OUTCOME, outcome, strict=True):
                check.compare(name, getattr(batch, name), values)
            done = twins.reset_done(*outcome[1:])
            check.compare("observation to go on from", batch.observation[()], twins.observations)
            if done:
                final = [observations[i] for i in done]
                check.compare("final observation", batch.final_observation[()], final)
            check.num_episodes += len(done)
            check.num_steps += 1
            on_step()
    return check


def _seed_chain(seed: int, num_envs: int) -> list[int]:
    from torchrl._utils import seed_generator

    seeds = [seed]
    while len(seeds) < num_envs:
        seeds.append(seed_generator(seeds[-1]))
    return seeds
