"""Interleaved rounds: every contender runs a little, in turn, several times.

Knows contenders by their three methods only. A machine that is slow for a second
is slow for all of them, and the median forgets the round.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal._compare.contenders import Contender

__all__ = ["Measurement", "measure"]

# One calibration run lasts at least this long, else the clock and cold caches decide.
_CALIBRATION_S = 0.05


@dataclass(slots=True)
class Measurement:
    """What one contender did.

    Attributes:
        name: the contender.
        num_envs: how many envs one vector step steps.
        rates: env-steps per second, one entry a round.
        open_s: seconds from the constructor to the end of the first reset.
        skipped: why it did not run; empty if it did.
    """

    name: str
    num_envs: int
    rates: list[float] = field(default_factory=list)
    open_s: float = 0.0
    skipped: str = ""

    @property
    def rate(self) -> float:
        """Median env-steps per second; 0 if it did not run."""
        return statistics.median(self.rates) if self.rates else 0.0


def measure(
    contenders: Sequence[Contender],
    *,
    num_rounds: int,
    round_s: float,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[Measurement]:
    """Measures all contenders in one interleaved run.

    All stay open throughout. They are opened in the order given, so those that fork
    should come first: a later fork copies what the earlier ones hold open.

    Args:
        contenders: who takes part; one whose library is missing is skipped.
        num_rounds: how many turns each one gets.
        round_s: about how many seconds one turn lasts.
        on_progress: called with a short text before each turn.

    Returns:
        One measurement per contender, in the same order.
    """
    results = [Measurement(contender.name, contender.num_envs) for contender in contenders]
    with ExitStack() as opened:
        running: list[tuple[Contender, Measurement, int]] = []
        for contender, result in zip(contenders, results, strict=True):
            on_progress(f"start {contender.name}")
            started_at = perf_counter()
            try:
                contender.open()
            except ImportError as exc:
                result.skipped = str(exc)
                continue
            result.open_s = perf_counter() - started_at
            opened.callback(contender.close)
            running.append((contender, result, _calibrate(contender, round_s)))
        for round_id in range(num_rounds):
            for contender, result, num_steps in running:
                on_progress(f"round {round_id + 1}/{num_rounds} {contender.name}")
                elapsed_s = contender.run(num_steps)
                result.rates.append(num_steps * contender.num_envs / elapsed_s)
        on_progress("close")
    return results


def _calibrate(contender: Contender, round_s: float) -> int:
    """Returns how many vector steps fill a round, after warming the contender up."""
    num_steps = 4
    while (elapsed_s := contender.run(num_steps)) < min(_CALIBRATION_S, round_s):
        num_steps *= 4
    return max(1, round(num_steps * round_s / elapsed_s))
