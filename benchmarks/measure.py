"""Runs the items and judges them. Knows contenders and bars; prints nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from benchmarks.contenders import RawEverywhere
from benchmarks.items import (
    LIMIT,
    MAX_START_S,
    MAX_WORKER_PSS_MB,
    SCALING_CONTENDERS,
    SCALING_ENV,
    SCALING_SIZES,
    START_CONTENDERS,
    START_ENV,
    START_SIZE,
    Bar,
    ContenderType,
    Item,
)
from shoal._compare.contenders import Contender, ShoalEngine
from shoal._compare.machine import memory_mb
from shoal._compare.rounds import Measurement, measure
from shoal.engine.system.cores import count_usable_cores

__all__ = ["Effort", "Row", "Verdict", "run_item", "run_memory", "run_scaling", "run_start"]

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: ``num_rounds`` turns of about ``round_s`` seconds each."""

    num_rounds: int
    round_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar and how it went.

    Attributes:
        bar: the bar in words.
        value: what was measured, in the unit of the bar.
        is_met: whether the bar was passed.
    """

    bar: str
    value: float
    is_met: bool


@dataclass(slots=True)
class Row:
    """One line of the result.

    Attributes:
        item: the name of the item.
        contender: who.
        value: the number measured.
        unit: its unit.
        of_limit: the same as a share of the machine's limit, where that makes sense.
        verdicts: the bars that apply.
        spread: lowest and highest round.
        note: why there is no number, or anything else worth a word.
    """

    item: str
    contender: str
    value: float
    unit: str
    of_limit: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    spread: tuple[float, float] | None = None
    note: str = ""


def run_item(item: Item, effort: Effort, on_progress: Progress) -> list[Row]:
    """Measures one item and judges its bars."""
    bare = _bare_envs(item)
    results = measure(
        [*bare, *(make(item.env_id, item.num_envs) for make in item.contenders)],
        num_rounds=effort.num_rounds,
        round_s=effort.round_s,
        on_progress=on_progress,
    )
    rates = {result.name: result.rate for result in results}
    limit = None
    if bare:
        # One bare env is the last of them, and goes to the top of the table.
        results.insert(0, results.pop(len(bare) - 1))
        num_at_once = item.num_envs if item.waits else count_usable_cores()
        limit = rates[LIMIT] = results[0].rate * num_at_once
    rows = [_rate_row(item.name, result, limit) for result in results]
    for row in rows:
        row.verdicts = [
            _judge(bar, rates)
            for bar in item.bars
            if bar.contender == row.contender and row.value and rates[bar.reference]
        ]
    return rows


def _bare_envs(item: Item) -> list[Contender]:
    if item.raw is None:
        return []
    one = item.raw(item.env_id)
    # Envs that wait are no measure of how busy the machine is.
    return [one] if item.waits else [RawEverywhere(item.env_id, item.raw), one]


def _rate_row(item: str, result: Measurement, limit: float | None) -> Row:
    return Row(
        item,
        result.name,
        result.rate,
        "env-steps/s",
        of_limit=result.rate / limit if limit and result.rate else None,
        spread=(min(result.rates), max(result.rates)) if result.rates else None,
        note=result.skipped,
    )


def _judge(bar: Bar, rates: Mapping[str, float]) -> Verdict:
    ratio = rates[bar.contender] / rates[bar.reference]
    return Verdict(f">= {bar.at_least:g} x {bar.reference}", ratio, ratio >= bar.at_least)


def run_scaling(
    effort: Effort, on_progress: Progress, *, sizes: Sequence[int] = SCALING_SIZES
) -> list[Row]:
    """Measures the cost of one env-step from few envs to many."""
    rows = []
    for num_envs in sizes:
        results = measure(
            [make(SCALING_ENV, num_envs) for make in SCALING_CONTENDERS],
            num_rounds=effort.num_rounds,
            round_s=effort.round_s,
            on_progress=on_progress,
        )
        rows += [
            Row(
                f"scaling-{num_envs}",
                result.name,
                1e6 / result.rate if result.rate else 0.0,
                "us per env-step",
                spread=(1e6 / max(result.rates), 1e6 / min(result.rates)) if result.rates else None,
                note=result.skipped,
            )
            for result in results
        ]
    return rows


def run_start(effort: Effort, on_progress: Progress) -> list[Row]:
    """Measures the time from the constructor to the end of the first reset."""
    # Once for nothing: the first of a kind imports its library, and that is not its start.
    seconds: dict[str, list[float]] = {}
    notes: dict[str, str] = {}
    for round_id in range(effort.num_rounds + 1):
        for make in START_CONTENDERS:
            name, elapsed_s, note = _time_open(make, on_progress)
            notes[name] = note
            if not note and round_id:
                seconds.setdefault(name, []).append(elapsed_s)
    return [_start_row(name, seconds.get(name, []), note) for name, note in notes.items()]


def _time_open(make: ContenderType, on_progress: Progress) -> tuple[str, float, str]:
    contender = make(START_ENV, START_SIZE)
    on_progress(f"start {contender.name}")
    started_at = perf_counter()
    try:
        contender.open()
    except ImportError as exc:
        return contender.name, 0.0, str(exc)
    elapsed_s = perf_counter() - started_at
    contender.close()
    return contender.name, elapsed_s, ""


def _start_row(name: str, seconds: Sequence[float], note: str) -> Row:
    row = Row(f"start-{START_SIZE}", name, 0.0, "s", note=note)
    if seconds:
        row.value = statistics.median(seconds)
        row.spread = (min(seconds), max(seconds))
        if name.startswith("shoal"):
            bar = f"<= {MAX_START_S:g} s"
            row.verdicts.append(Verdict(bar, row.value, row.value <= MAX_START_S))
    return row


def run_memory(on_progress: Progress) -> list[Row]:
    """Measures the memory of the worker processes while they hold their envs."""
    contender = ShoalEngine(START_ENV, START_SIZE)
    on_progress(f"start {contender.name}")
    try:
        contender.open()
    except ImportError as exc:
        return [Row("worker-memory", contender.name, 0.0, "MB", note=str(exc))]
    try:
        contender.run(100)
        memory = [memory_mb(pid) for pid in contender.engine.worker_pids]
    finally:
        contender.close()
    rows = []
    for kind in ("Pss", "Private", "Rss"):
        value = statistics.mean(worker[kind] for worker in memory)
        row = Row("worker-memory", f"{contender.name} worker, {kind}", value, "MB")
        if kind == "Pss":
            bar = f"<= {MAX_WORKER_PSS_MB:g} MB"
            row.verdicts.append(Verdict(bar, value, value <= MAX_WORKER_PSS_MB))
        rows.append(row)
    return rows
