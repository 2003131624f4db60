"""PPO on CartPole, from TorchRL's own parts, over `shoal.ParallelEnv`.

Knows TorchRL, and of shoal only that class: nothing of the training does. One option puts
TorchRL's `ParallelEnv` in its place, and ``--compare`` shows what that changes.

    python examples/ppo_cartpole.py --plot returns.png
    python examples/ppo_cartpole.py --compare

Needs ``pip install 'shoal[torchrl,cli]'``, and matplotlib for ``--plot``.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003  (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, TransformedEnv
from torchrl.envs import ParallelEnv as TorchRLParallelEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import shoal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

ENV_ID = "CartPole-v1"
FRAMES_PER_BATCH = 2048
MINIBATCH_SIZE = 256
NUM_EPOCHS = 10
NUM_LAST_EPISODES = 100
COMPARED_FRAMES = 8 * FRAMES_PER_BATCH


class Envs(StrEnum):
    """Whose `ParallelEnv` runs the envs."""

    SHOAL = "shoal"
    TORCHRL = "torchrl"

    def open(self, num_envs: int, seed: int) -> TransformedEnv:
        """Starts the envs and returns them with the return so far in each step's data."""
        if self is Envs.SHOAL:
            env = shoal.ParallelEnv(num_envs, ENV_ID)
        else:
            make = partial(GymEnv, ENV_ID, categorical_action_encoding=True)
            env = TorchRLParallelEnv(num_envs, make)
        env = TransformedEnv(env, RewardSum())
        env.set_seed(seed)
        return env


@dataclass(slots=True, kw_only=True)
class History:
    """What became of one training.

    Attributes:
        envs: whose envs.
        num_steps: env-steps so far.
        start_s: seconds until all envs were ready.
        collect_s: seconds in the collector: envs, policy, putting the data together.
        learn_s: seconds in the optimiser: advantages, losses, gradient steps.
        last_returns: returns of the last finished episodes, in the order of their ends.
        curve: env-steps and mean return after each batch, once enough episodes ended.
    """

    envs: Envs
    num_steps: int = 0
    start_s: float = 0.0
    collect_s: float = 0.0
    learn_s: float = 0.0
    last_returns: deque[float] = field(default_factory=partial(deque, maxlen=NUM_LAST_EPISODES))
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """All seconds."""
        return self.start_s + self.collect_s + self.learn_s

    @property
    def mean_return(self) -> float:
        """Mean over the last episodes; NaN before enough of them ended."""
        return self.curve[-1][1] if self.curve else math.nan

    def add(self, data: TensorDictBase) -> None:
        """Takes note of a batch of shape ``[envs, time]``."""
        self.num_steps += data.numel()
        # Time first: episodes end side by side, and only those that ended last count.
        following = data["next"].transpose(0, 1)
        self.last_returns += following["episode_reward"][following["done"]].tolist()
        if len(self.last_returns) == NUM_LAST_EPISODES:
            self.curve.append((self.num_steps, sum(self.last_returns) / NUM_LAST_EPISODES))


class Learner:
    """The networks for an env, and how PPO improves them."""

    def __init__(self, env: TransformedEnv) -> None:
        num_inputs, num_choices = env.observation_spec["observation"].shape[-1], env.action_spec.n
        net = partial(MLP, num_inputs, depth=2, num_cells=64, activation_class=torch.nn.Tanh)
        self.actor = ProbabilisticActor(
            TensorDictModule(net(num_choices), in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        critic = ValueOperator(net(1), in_keys=["observation"])
        self._advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        self._loss = ClipPPOLoss(
            self.actor,
            critic,
            clip_epsilon=0.2,
            entropy_coeff=0.01,
            critic_coeff=0.5,
            normalize_advantage=True,
        )
        self._optimiser = torch.optim.Adam(self._loss.parameters(), lr=1e-3)

    def learn(self, data: TensorDictBase) -> None:
        """Goes over a batch of shape ``[envs, time]`` several times, in minibatches."""
        self._advantages(data)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(data.numel()),
            # A last minibatch of one sample would have no standard deviation to divide by.
            sampler=SamplerWithoutReplacement(drop_last=True),
            batch_size=MINIBATCH_SIZE,
        )
        buffer.extend(data.reshape(-1))
        for _ in range(NUM_EPOCHS):
            for minibatch in buffer:
                losses = self._loss(minibatch)
                loss = losses["loss_objective"] + losses["loss_entropy"] + losses["loss_critic"]
                self._optimiser.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._loss.parameters(), 0.5)
                self._optimiser.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train: until the mean return is ``target_return``, or for ``max_steps``."""

    num_envs: int
    seed: int
    max_steps: int
    target_return: float


def progress_bar(console: Console) -> Progress:
    """Returns a bar of env-steps that shows the mean return."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("env-steps, mean return {task.fields[mean_return]:.1f}"),
        TimeElapsedColumn(),
        console=console,
    )


def train(envs: Envs, plan: Plan, console: Console) -> History:
    """Trains with a progress bar, and closes the envs."""
    history = History(envs=envs)
    torch.manual_seed(plan.seed)
    lap_at = time.perf_counter()

    def lap_s() -> float:  # laps without gaps: together they are the wall time
        nonlocal lap_at
        before, lap_at = lap_at, time.perf_counter()
        return lap_at - before

    env = envs.open(plan.num_envs, plan.seed)
    learner = Learner(env)
    collector = Collector(
        env,
        learner.actor,
        frames_per_batch=plan.num_envs * max(1, FRAMES_PER_BATCH // plan.num_envs),
        auto_register_policy_transforms=False,  # they would be for recurrent policies
    )
    history.start_s = lap_s()
    try:
        with progress_bar(console) as progress:
            task = progress.add_task(f"{envs} envs", total=plan.max_steps, mean_return=math.nan)
            for data in collector:
                history.collect_s += lap_s()
                history.add(data)
                learner.learn(data)
                mean_return = history.mean_return
                progress.update(task, completed=history.num_steps, mean_return=mean_return)
                history.learn_s += lap_s()
                if history.num_steps >= plan.max_steps or mean_return >= plan.target_return:
                    break
    finally:
        collector.shutdown()
    return history


def table_of(histories: list[History]) -> Table:
    """Returns what is worth comparing, a column for each training."""
    table = Table("", *(f"{history.envs} envs" for history in histories))
    for column in table.columns[1:]:
        column.justify = "right"
    rows: dict[str, Callable[[History], str]] = {
        "env-steps": lambda of: f"{of.num_steps:,}",
        f"mean return of the last {NUM_LAST_EPISODES} episodes": lambda of: f"{of.mean_return:.2f}",
        "wall time": lambda of: f"{of.wall_s:.1f} s",
        "  until the envs were ready": lambda of: f"{of.start_s:.1f} s",
        "  in the collector: envs and policy": lambda of: f"{of.collect_s:.1f} s",
        "  in the optimiser": lambda of: f"{of.learn_s:.1f} s",
        "env-steps/s, all in all": lambda of: f"{of.num_steps / of.wall_s:,.0f}",
        "env-steps/s in the collector": lambda of: f"{of.num_steps / of.collect_s:,.0f}",
    }
    for name, text_of in rows.items():
        table.add_row(name, *map(text_of, histories))
    return table


def plot(history: History, path: Path) -> None:
    """Draws the mean return over the env-steps."""
    from matplotlib.figure import Figure  # optional; a Figure alone needs no display

    axes = (figure := Figure(layout="constrained")).subplots()
    axes.plot(*zip(*history.curve, strict=True) if history.curve else ((), ()))
    axes.set(xlabel="env-steps", ylabel=f"mean return of the last {NUM_LAST_EPISODES} episodes")
    axes.set(title=f"PPO on {ENV_ID}, {history.envs} envs", xlim=(0, None), ylim=(0, None))
    figure.savefig(path)


def main(
    envs: Annotated[Envs, typer.Option(help="Whose ParallelEnv.")] = Envs.SHOAL,
    num_envs: Annotated[int, typer.Option(min=1, help="Envs side by side.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of networks, actions and envs.")] = 0,
    target_return: Annotated[float, typer.Option(help="Mean return at which to stop.")] = 475.0,
    max_steps: Annotated[int, typer.Option(min=1, help="Env-steps at which to stop.")] = 300_000,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the mean return there.")
    ] = None,
    compare: Annotated[
        bool, typer.Option(help=f"Train {COMPARED_FRAMES:,} env-steps with either, no plot.")
    ] = False,
) -> None:
    """Train PPO on CartPole until the mean return is 475."""
    console = Console()
    if plot_file is not None and find_spec("matplotlib") is None:
        console.print("--plot needs matplotlib. Install it: pip install 'shoal[examples]'")
        raise typer.Exit(code=2)
    # The networks are small: more threads only take the cores away from the envs.
    torch.set_num_threads(1)
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    plan = Plan(num_envs=num_envs, seed=seed, max_steps=max_steps, target_return=target_return)
    if compare:
        plan = replace(plan, max_steps=COMPARED_FRAMES, target_return=math.inf)
        console.print(table_of([train(each, plan, console) for each in Envs]))
        return
    history = train(envs, plan, console)
    is_reached = history.mean_return >= target_return
    console.print(f"mean return {target_return:g}", "reached" if is_reached else "not reached")
    console.print(table_of([history]))
    if plot_file is not None:
        plot(history, plot_file)
        console.print(f"plot: {plot_file}", soft_wrap=True)


# Without the guard, TorchRL's workers would each train when they import this file.
if __name__ == "__main__":
    typer.run(main)
