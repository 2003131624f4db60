"""How long to spin before blocking.

A block and a wake-up cost tens of microseconds, about as much as a step of eight
cheap envs; a spin costs a core. So a waiter spins for a bounded time, and only
where recent waits were short enough for the spin to pay.

Pure: durations in, a budget out.
"""

from __future__ import annotations

__all__ = ["SpinBudget", "spinning_is_safe"]

SPIN_S = 100e-6  # longer than a wake-up takes (40-70 us measured), so one spin replaces it
_WORTH_S = 1e-3  # waits longer than this gain less than 10 % from a saved wake-up
_DECAY = 0.125

# Machines whose cores see each other's stores in program order. Elsewhere a flag in
# shared memory may overtake the data it announces, and Python has no barrier to
# stop it, so there every hand-over goes through the operating system.
_STORE_ORDERED = frozenset({"x86_64", "amd64", "i386", "i686"})


def spinning_is_safe(machine: str) -> bool:
    """Returns whether flags in shared memory may be trusted on this machine.

    Args:
        machine: the name as in ``platform.machine()``.
    """
    return machine.lower() in _STORE_ORDERED


class SpinBudget:
    """A bounded spin that switches itself off when waits are long.

    Attributes:
        budget_s: how long the next wait should spin, in seconds; 0 for not at all.
    """

    __slots__ = ("_mean_s", "_spin_s", "budget_s")

    def __init__(self, *, enabled: bool, spin_s: float = SPIN_S) -> None:
        self._spin_s = spin_s if enabled else 0.0
        self._mean_s = 0.0
        self.budget_s = self._spin_s

    def note_wait(self, waited_s: float) -> None:
        """Notes how long a wait took, the spin included."""
        self._mean_s += _DECAY * (waited_s - self._mean_s)
        self.budget_s = self._spin_s if self._mean_s < _WORTH_S else 0.0
