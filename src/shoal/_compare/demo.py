"""The demo: roll out, check the data against plain Gymnasium, time the contenders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from shoal._compare.contenders import (
    Contender,
    GymnasiumAsync,
    GymnasiumSync,
    Raw,
    ShoalEngine,
    ShoalParallel,
    TorchRLParallel,
)
from shoal._compare.datacheck import DataCheck, check_engine, check_parallel_env
from shoal._compare.machine import cpu_model, package_versions
from shoal._compare.rounds import Measurement, measure
from shoal.engine.system.cores import count_usable_cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["Demo", "Stage"]

_NUM_ROUNDS = 5
_SEED = 2024
_CHECKS = {ShoalEngine.name: check_engine, ShoalParallel.name: check_parallel_env}


@dataclass(frozen=True, slots=True)
class Stage:
    """One env of the demo: ``num_envs`` of it, checked for ``num_steps`` vector steps."""

    env_id: str
    num_envs: int
    num_steps: int

    @property
    def title(self) -> str:
        """The env and how many, as the tables have it."""
        return f"{self.env_id.rpartition(':')[2]} x {self.num_envs}"

    def contenders(self) -> list[Contender]:
        """Those who are timed: forking peers first, shoal last (see `measure`)."""
        return [
            Raw(self.env_id),
            *(
                make(self.env_id, self.num_envs)
                for make in (
                    TorchRLParallel,
                    GymnasiumAsync,
                    GymnasiumSync,
                    ShoalEngine,
                    ShoalParallel,
                )
            ),
        ]


class _Ticker:
    """Advances one task, whatever it is told."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, text: str) -> None:
        self._progress.advance(self._task)


class Demo:
    """Runs the stages on a console.

    Args:
        console: where to print.
        stages: the envs.
        seconds: seconds of measuring per contender and stage.
    """

    def __init__(self, console: Console, stages: Sequence[Stage], *, seconds: float) -> None:
        self._console = console
        self._stages = stages
        self._seconds = seconds

    def run(self) -> bool:
        """Runs everything and returns whether the data was right."""
        versions = package_versions()
        self._console.print(
            f"{count_usable_cores()} usable cores of {cpu_model()}; Python {versions['python']}, "
            f"torchrl {versions['torchrl']}, gymnasium {versions['gymnasium']}",
            highlight=False,
        )
        checks = self._check()
        for stage, name, check in checks:
            self._print_check(stage, name, check)
        self._console.print(self._table(self._measure()))
        return all(check.is_equal for _, _, check in checks)

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )

    def _check(self) -> list[tuple[Stage, str, DataCheck]]:
        results = []
        with self._progress() as progress:
            for stage in self._stages:
                task = progress.add_task(
                    f"roll out and check {stage.title}", total=stage.num_steps * len(_CHECKS)
                )
                for name, check in _CHECKS.items():
                    outcome = check(
                        stage.env_id,
                        num_envs=stage.num_envs,
                        num_steps=stage.num_steps,
                        seed=_SEED,
                        on_step=partial(progress.advance, task),
                    )
                    results.append((stage, name, outcome))
        return results

    def _print_check(self, stage: Stage, name: str, check: DataCheck) -> None:
        if check.is_equal:
            self._console.print(
                f"[green]equal[/]  {name}, {stage.title}: "
                f"{check.num_steps * check.num_envs:,} transitions and "
                f"{check.num_episodes:,} resets as in plain Gymnasium, bit for bit",
                highlight=False,
            )
            return
        self._console.print(f"[red]wrong[/]  {name}, {stage.title}", highlight=False)
        for mismatch in check.mismatches:
            self._console.print(f"       {mismatch}", highlight=False)

    def _measure(self) -> list[list[Measurement]]:
        results = []
        with self._progress() as progress:
            for stage in self._stages:
                contenders = stage.contenders()
                # One tick per contender started and per turn, and one for closing them.
                total = len(contenders) * (1 + _NUM_ROUNDS) + 1
                task = progress.add_task(f"time {stage.title}", total=total)
                results.append(
                    measure(
                        contenders,
                        num_rounds=_NUM_ROUNDS,
                        round_s=self._seconds / _NUM_ROUNDS,
                        on_progress=_Ticker(progress, task),
                    )
                )
                progress.update(task, completed=total)  # one that is skipped takes no turns
        return results

    def _table(self, results: Sequence[Sequence[Measurement]]) -> Table:
        num_cores = count_usable_cores()
        table = Table(title="env-steps per second, same envs and actions", title_justify="left")
        table.add_column("", no_wrap=True)
        for stage in self._stages:
            table.add_column(stage.title, justify="right")
            table.add_column("x limit", justify="right")
        limits = [raw.rate * num_cores for raw, *_ in results]
        limit_cells = (cell for limit in limits for cell in (f"{limit:,.0f}", "1.00"))
        table.add_row(f"limit: raw env x {num_cores} cores", *limit_cells, style="bold")
        for same_contender in zip(*results, strict=True):
            cells: list[str] = []
            for result, limit in zip(same_contender, limits, strict=True):
                is_missing = bool(result.skipped)
                cells.append("-" if is_missing else f"{result.rate:,.0f}")
                cells.append("" if is_missing else f"{result.rate / limit:.3f}")
            name = same_contender[0].name
            table.add_row(name, *cells, style="green" if name.startswith("shoal") else None)
        return table
