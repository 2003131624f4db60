"""One coroutine per agent, each with an env of its own: `shoal.AsyncEnvPool` and asyncio.

Each env is a task for an agent with tools: find a hidden number by asking a slow service
whether it is larger or smaller, then answer. Thinking and tools take their time, so that
an agent does nothing but wait, and a hundred of them fit on one core: the envs are
coroutines on the pool's own event loop, the agents coroutines on this one.

    python examples/agents.py
    python examples/agents.py --num-agents 256 --num-tasks 4

Needs ``pip install 'shoal[torchrl,cli]'``.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import gymnasium
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import shoal

if TYPE_CHECKING:
    from rich.status import Status
    from tensordict import TensorDictBase

HIGHEST = 1000
MOST_CALLS = 20
TOOL_S, THINKING_S = (0.02, 0.2), (0.01, 0.1)


class Tool(IntEnum):
    """What an agent can do with a number."""

    COMPARE = 0
    ANSWER = 1


class HiddenNumber:
    """A number to be found, as an env with Gymnasium's members and coroutines.

    It observes what is known: the number is at least ``low`` and at most ``high``. An
    action is a tool and the number for it. The right answer is worth 1 and ends the episode,
    as a wrong one does.
    """

    observation_space = gymnasium.spaces.Box(0, HIGHEST, (2,), np.int64)
    action_space = gymnasium.spaces.MultiDiscrete([len(Tool), HIGHEST + 1])

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Hides another number."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._low, self._high, self._num_calls = 0, HIGHEST, 0
        self._hidden = int(self._random.integers(HIGHEST + 1))
        return self._known(), {}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Calls a tool, which takes its time."""
        tool, number = map(int, action)
        await asyncio.sleep(self._random.uniform(*TOOL_S))
        self._num_calls += 1
        if tool == Tool.ANSWER:
            return self._known(), float(number == self._hidden), True, False, {}
        if self._hidden > number:
            self._low = max(self._low, number + 1)
        else:
            self._high = min(self._high, number)
        return self._known(), 0.0, False, self._num_calls == MOST_CALLS, {}

    def _known(self) -> Any:
        return np.array([self._low, self._high])


@dataclass(slots=True)
class Tally:
    """What all agents have done so far.

    Attributes:
        num_solved: tasks with the right answer.
        num_done: tasks with any answer, or none in time.
        num_steps: calls of tools.
        waiting_s: seconds that agents have spent thinking and waiting, all added up.
    """

    num_solved: int = 0
    num_done: int = 0
    num_steps: int = 0
    waiting_s: float = 0.0


async def think(known: TensorDictBase) -> list[int]:
    """Returns the next tool and its number. A language model would be asked here."""
    low, high = known["observation"].tolist()
    await asyncio.sleep(np.random.default_rng().uniform(*THINKING_S))
    return [Tool.ANSWER, low] if low == high else [Tool.COMPARE, (low + high) // 2]


async def live(agent: int, pool: shoal.AsyncEnvPool, num_tasks: int, tally: Tally) -> None:
    """One agent: its env is the one with its number, and it knows of no other."""
    began_at = time.perf_counter()
    for _ in range(num_tasks):
        known = await pool.areset(env_index=agent)
        is_done = False
        while not is_done:
            known["action"] = known["observation"].new_tensor(await think(known))
            following = (await pool.astep(known, env_index=agent))["next"]
            is_done = bool(following["done"])
            tally.num_steps += 1
            known = following.select("observation")
        tally.num_done += 1
        tally.num_solved += int(following["reward"].item())
    tally.waiting_s += time.perf_counter() - began_at


async def report(tally: Tally, num_tasks: int, status: Status) -> None:
    """Says from time to time how far they are."""
    while True:
        status.update(f"{tally.num_done} of {num_tasks} tasks, {tally.num_steps} calls of tools")
        await asyncio.sleep(0.1)


async def run(pool: shoal.AsyncEnvPool, num_tasks: int, console: Console) -> Tally:
    """Lets all agents live at once."""
    tally = Tally()
    with console.status("start") as status:
        reporter = asyncio.create_task(report(tally, pool.num_envs * num_tasks, status))
        async with asyncio.TaskGroup() as agents:
            for agent in range(pool.num_envs):
                agents.create_task(live(agent, pool, num_tasks, tally))
        reporter.cancel()
    return tally


def main(
    num_agents: Annotated[int, typer.Option(min=1, help="Agents, each with an env.")] = 100,
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks of each agent.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the hidden numbers.")] = 0,
) -> None:
    """Let many agents work at once, each at its own pace."""
    console = Console()
    makers = [partial(HiddenNumber, seed + agent) for agent in range(num_agents)]
    with shoal.AsyncEnvPool(makers, backend="asyncio") as pool:
        began_at = time.perf_counter()
        tally = asyncio.run(run(pool, num_tasks, console))
        elapsed_s = time.perf_counter() - began_at
        stats = pool.stats()
    table = Table(f"{num_agents} agents, {num_tasks} tasks each", "")
    table.columns[1].justify = "right"
    table.add_row("solved", f"{tally.num_solved} of {tally.num_done}")
    table.add_row("calls of tools", f"{tally.num_steps:,}")
    table.add_row("calls/s", f"{tally.num_steps / elapsed_s:,.0f}")
    table.add_row("a call", f"{stats['avg_env_ms']:.0f} ms")
    table.add_row("wall time", f"{elapsed_s:.1f} s")
    table.add_row("one agent after the other", f"{tally.waiting_s:.0f} s")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
