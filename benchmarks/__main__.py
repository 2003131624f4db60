"""``python -m benchmarks [--quick] [--json FILE] [--only NAME...] [--strict]``."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.items import ITEMS, SCALING_SIZES
from benchmarks.measure import Effort, Progress, Row, run_item, run_memory, run_scaling, run_start
from shoal._compare.machine import cpu_model, package_versions
from shoal.engine.system.cores import count_usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.status import Status

QUICK = Effort(num_rounds=3, round_s=0.2)
FULL = Effort(num_rounds=7, round_s=0.5)


def main() -> int:
    """Runs the chosen items and returns the exit code."""
    options = _options()
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # in a file or a pipe nothing is gained by narrow columns
    warnings.filterwarnings("ignore")  # peers warn about each other; the numbers are the point
    effort = QUICK if options.quick else FULL
    rows: list[Row] = []
    for name, run in _runs(effort, quick=options.quick).items():
        if options.only and not any(name.startswith(only) for only in options.only):
            continue
        with console.status(name) as status:
            new_rows = run(partial(_show, status, name))
        console.print(_table(name, new_rows))
        rows += new_rows
    verdicts = [verdict for row in rows for verdict in row.verdicts]
    num_missed = sum(not verdict.is_met for verdict in verdicts)
    console.print(f"{len(verdicts) - num_missed} of {len(verdicts)} bars met")
    if options.json:
        options.json.write_text(json.dumps(_report(rows, quick=options.quick), indent=2) + "\n")
    return 1 if options.strict and num_missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar is missed")
    names = ", ".join(_runs(QUICK, quick=True))
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help=f"items whose name starts so: {names}"
    )
    return parser.parse_args()


def _runs(effort: Effort, *, quick: bool) -> dict[str, Callable[[Progress], list[Row]]]:
    runs: dict[str, Callable[[Progress], list[Row]]] = {
        item.name: partial(run_item, item, effort) for item in ITEMS
    }
    sizes = SCALING_SIZES[::3] if quick else SCALING_SIZES
    runs["scaling"] = lambda on_progress: run_scaling(effort, on_progress, sizes=sizes)
    runs["start"] = lambda on_progress: run_start(effort, on_progress)
    runs["memory"] = run_memory
    return runs


def _show(status: Status, name: str, text: str) -> None:
    status.update(f"{name}: {text}")


def _table(name: str, rows: list[Row]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in (rows[0].unit, "lowest", "highest", "x limit", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("bar")
    table.add_column("")
    for row in rows:
        label = row.contender if name != "scaling" else f"{row.item}: {row.contender}"
        if row.note:
            note = row.note.partition(" (/")[0]  # an import error ends with a path
            table.add_row(label, "-", "", "", "", "", f"skipped: {note}", "", style="dim")
            continue
        low, high = map(_number, row.spread) if row.spread else ("", "")
        share = "" if row.of_limit is None else f"{row.of_limit:.2f}"
        table.add_row(
            label,
            _number(row.value),
            low,
            high,
            share,
            "\n".join(f"{verdict.value:.2f}" for verdict in row.verdicts),
            "\n".join(verdict.bar for verdict in row.verdicts),
            "\n".join("[green]ok" if v.is_met else "[red]miss" for v in row.verdicts),
        )
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _report(rows: list[Row], *, quick: bool) -> dict[str, object]:
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "cpu": cpu_model(),
        "usable_cores": count_usable_cores(),
        "versions": package_versions(),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    sys.exit(main())
