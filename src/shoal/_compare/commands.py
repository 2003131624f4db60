"""The commands `demo` and `doctor`: options in, exit code out."""

from __future__ import annotations

import os
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal._compare.demo import Demo, Stage
from shoal._compare.machine import cpu_model, package_versions
from shoal.engine.system.cores import count_usable_cores

__all__ = ["app"]

app = typer.Typer(
    help="Run many reinforcement-learning environments at once.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

_NUM_HEAVY_ENVS = 8


@app.command()
def demo(
    envs: Annotated[int, typer.Option(min=1, help="Number of CartPole envs.")] = 64,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds of measuring per contender and env.")
    ] = 3.0,
) -> None:
    """Roll out envs in parallel, check the data, and time shoal beside its peers."""
    console = _console()
    missing = [name for name in ("gymnasium", "torchrl") if find_spec(name) is None]
    if missing:
        console.print(
            f"The demo compares with {' and '.join(missing)}, not installed here. "
            "Install them: pip install 'shoal[cli,torchrl,mujoco]'",
            markup=False,
        )
        raise typer.Exit(code=2)
    warnings.filterwarnings("ignore")  # peers warn about each other's versions
    is_right = Demo(console, _stages(envs), seconds=seconds).run()
    raise typer.Exit(code=0 if is_right else 1)


def _console() -> Console:
    console = Console()
    # In a file or a pipe nothing is gained by narrow columns.
    return console if console.is_terminal else Console(width=120)


def _stages(num_envs: int) -> list[Stage]:
    stages = [Stage("CartPole-v1", num_envs, num_steps=1000)]
    if find_spec("mujoco") is not None:
        stages.append(Stage("Ant-v5", _NUM_HEAVY_ENVS, num_steps=500))
    elif find_spec("ale_py") is not None:
        stages.append(Stage("ale_py:ALE/Pong-v5", _NUM_HEAVY_ENVS, num_steps=300))
    return stages


@app.command()
def doctor() -> None:
    """Tell what this machine offers and which packages are installed."""
    table = Table(show_header=False, title="shoal doctor", title_justify="left")
    for package, version in package_versions().items():
        table.add_row(package, version or "[dim]not installed")
    table.add_section()
    table.add_row("processor", cpu_model())
    table.add_row("usable cores", f"{count_usable_cores()} of {os.cpu_count()}")
    table.add_section()
    for facility, purpose in _FACILITIES.items():
        answer = "yes" if hasattr(os, facility) else "[yellow]no"
        table.add_row(f"os.{facility}", f"{answer} [dim]({purpose})")
    table.add_row("/dev/shm", _shared_memory())
    _console().print(table)


_FACILITIES = {
    "memfd_create": "shared memory without a name to leave behind",
    "eventfd": "wake-ups that can be waited for together with a process's end",
    "pidfd_open": "waiting for a process's end",
    "fork": "workers that start in milliseconds",
}


def _shared_memory() -> str:
    path = Path("/dev/shm")
    if not path.is_dir():
        return "[yellow]missing"
    usage = shutil.disk_usage(path)
    return f"{usage.free / 2**20:,.0f} MB free of {usage.total / 2**20:,.0f} MB"
