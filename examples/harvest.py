"""Learning from whichever envs are ready: the harvest loop of `shoal.AsyncEnvPool`.

Each env is a CartPole whose steps take 1 ms to 50 ms. Stepped all together, every step
takes as long as the longest. The loop here receives the half that is ready first, learns
from it, asks the policy once for all of them, and sends them on, while the others step.

    python examples/harvest.py
    python examples/harvest.py --num-envs 64 --backend multiprocessing

Needs ``pip install 'shoal[torchrl,cli]'``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import gymnasium
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

import shoal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

SHORTEST_STEP_S, LONGEST_STEP_S = 1e-3, 50e-3
DISCOUNT = 0.99
NUM_LAST_EPISODES = 50


class UnevenCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole at the pace of a slow simulator: any order of magnitude is as likely."""

    def __init__(self, seed: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._lengths = np.random.default_rng(seed)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Waits, then steps."""
        low, high = math.log(SHORTEST_STEP_S), math.log(LONGEST_STEP_S)
        time.sleep(math.exp(self._lengths.uniform(low, high)))
        return self.env.step(action)


class Backend(StrEnum):
    """Where the envs run."""

    THREADING = "threading"
    MULTIPROCESSING = "multiprocessing"


class Learner:
    """A small actor-critic that learns from single steps, of whichever envs."""

    def __init__(self, num_inputs: int, num_choices: int) -> None:
        self._body = nn.Sequential(nn.Linear(num_inputs, 64), nn.Tanh())
        self._logits, self._value = nn.Linear(64, num_choices), nn.Linear(64, 1)
        modules = nn.ModuleList([self._body, self._logits, self._value])
        self._optimiser = torch.optim.Adam(modules.parameters(), lr=3e-3)

    @torch.no_grad()
    def act(self, observation: torch.Tensor) -> torch.Tensor:
        """Returns an action for each row: one call, however many envs are ready."""
        logits = self._logits(self._body(observation))
        return torch.distributions.Categorical(logits=logits).sample()

    def learn(self, data: TensorDictBase) -> None:
        """Takes one gradient step on a batch of transitions."""
        features, following = self._body(data["observation"]), data["next"]
        with torch.no_grad():
            beyond = self._value(self._body(following["observation"]))
            target = following["reward"] + DISCOUNT * beyond * ~following["terminated"]
        value = self._value(features)
        chosen = torch.distributions.Categorical(logits=self._logits(features))
        advantage = (target - value).detach().squeeze(-1)
        loss = nn.functional.mse_loss(value, target)
        loss = loss - (chosen.log_prob(data["action"]) * advantage + 0.01 * chosen.entropy()).mean()
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()


@dataclass(slots=True, kw_only=True)
class History:
    """What became of one run.

    Attributes:
        name: how the envs were stepped.
        num_steps: env-steps.
        num_batches: how often the policy was asked.
        elapsed_s: seconds.
        running: return of the present episode of each env, by its index.
        last_returns: returns of the last finished episodes.
    """

    name: str
    num_steps: int = 0
    num_batches: int = 0
    elapsed_s: float = 0.0
    running: dict[int, float] = field(default_factory=dict)
    last_returns: deque[float] = field(default_factory=partial(deque, maxlen=NUM_LAST_EPISODES))

    @property
    def rate(self) -> float:
        """Env-steps per second."""
        return self.num_steps / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def mean_return(self) -> float:
        """Mean over the last episodes; NaN before one has ended."""
        return sum(self.last_returns) / len(self.last_returns) if self.last_returns else math.nan

    def add(self, data: TensorDictBase) -> None:
        """Takes note of a batch of transitions."""
        following = data["next"]
        rewards = following["reward"].flatten().tolist()
        dones = following["done"].flatten().tolist()
        for env_id, reward, done in zip(data["env_index"], rewards, dones, strict=True):
            self.running[env_id] = self.running.get(env_id, 0.0) + reward
            if done:
                self.last_returns.append(self.running.pop(env_id))
        self.num_steps += len(rewards)
        self.num_batches += 1


def harvest(
    pool: shoal.AsyncEnvPool, learner: Learner, history: History, on_batch: Callable[[], bool]
) -> None:
    """Learns from whichever envs are ready, until ``on_batch`` says that it is enough."""
    num_wanted = max(1, pool.num_envs // 2)
    root = pool.reset()
    root["action"] = learner.act(root["observation"])
    pool.async_step_and_maybe_reset_send(root)
    while on_batch():
        stepped, root = pool.async_step_and_maybe_reset_recv(min_get=num_wanted)
        # The policy first: these envs wait for it, and not for what is learnt from them.
        root["action"] = learner.act(root["observation"])
        pool.async_step_and_maybe_reset_send(root)
        history.add(stepped)
        learner.learn(stepped)
    pool.async_step_and_maybe_reset_recv(min_get=pool.num_envs)  # what is still in flight


def step_together(
    pool: shoal.AsyncEnvPool, learner: Learner, history: History, on_batch: Callable[[], bool]
) -> None:
    """Does the same with all envs at every step: the rate that there would be otherwise."""
    root = pool.reset()
    while on_batch():
        root["action"] = learner.act(root["observation"])
        stepped, root = pool.step_and_maybe_reset(root)
        history.add(stepped)
        learner.learn(stepped)


def measured(
    run: Callable[..., None],
    history: History,
    pool: shoal.AsyncEnvPool,
    learner: Learner,
    *,
    seconds: float,
    console: Console,
) -> History:
    """Runs one of the two loops for some seconds, with a line that says how it goes."""
    started_at = time.perf_counter()
    with console.status(history.name) as status:

        def on_batch() -> bool:
            history.elapsed_s = time.perf_counter() - started_at
            status.update(
                f"{history.name}: {history.num_steps:,} env-steps, {history.rate:,.0f}/s,"
                f" mean return {history.mean_return:.1f}"
            )
            return history.elapsed_s < seconds

        run(pool, learner, history, on_batch)
    return history


def table_of(histories: list[History]) -> Table:
    """Returns what is worth comparing, a column for each run."""
    table = Table("", *(history.name for history in histories))
    for column in table.columns[1:]:
        column.justify = "right"
    rows: dict[str, Callable[[History], str]] = {
        "env-steps": lambda of: f"{of.num_steps:,}",
        "env-steps/s": lambda of: f"{of.rate:,.0f}",
        "envs in a batch": lambda of: f"{of.num_steps / of.num_batches:.1f}",
    }
    for name, text_of in rows.items():
        table.add_row(name, *map(text_of, histories))
    return table


def main(
    num_envs: Annotated[int, typer.Option(min=1, help="Envs side by side.")] = 32,
    backend: Annotated[Backend, typer.Option(help="Where they run.")] = Backend.THREADING,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of harvesting.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Of networks, actions and envs.")] = 0,
) -> None:
    """Harvest uneven envs, then step them together for a quarter of the time."""
    console = Console()
    # The network is small: more threads only take the cores away from the envs.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    makers = [partial(UnevenCartPole, seed + index) for index in range(num_envs)]
    with shoal.AsyncEnvPool(makers, backend=str(backend)) as pool:
        pool.set_seed(seed)
        learner = Learner(pool.observation_spec["observation"].shape[-1], pool.action_spec.n)
        run = partial(measured, pool=pool, learner=learner, console=console)
        harvested = run(harvest, History(name="first half that is ready"), seconds=seconds)
        stats = pool.stats()
        together = run(step_together, History(name="all together"), seconds=seconds / 4)
    console.print(table_of([harvested, together]))
    console.print(f"harvesting is {harvested.rate / together.rate:.1f} x as fast")
    console.print(
        f"mean return of the last {len(harvested.last_returns)} episodes harvested:"
        f" {harvested.mean_return:.1f}"
    )
    env_id, slowest_ms = stats["slowest_envs"][0]
    console.print(
        f"batches held {stats['batch_fill_ratio']:.0%} of the envs in flight, results waited"
        f" {stats['avg_observation_to_batch_ms']:.1f} ms,\n"
        f"the slowest env, {env_id}, took {slowest_ms:.1f} ms a step"
    )


if __name__ == "__main__":
    typer.run(main)
