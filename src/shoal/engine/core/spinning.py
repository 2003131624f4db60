"""Who may spin before blocking, and for how long.

Waking a process on an idle core takes 15-25 us, switching to one on the same core 3 us
(measured round trips: 35-50 us and 6-8 us), and noticing a byte that changes 0.4 us. A
step of eight cheap envs is 25 us of work on two cores. So for cheap envs the wait decides
the speed, and the cheapest arrangement is one process per core that never sleeps:
workers spin on all cores but one, and the engine and the last worker, of which only one
has something to do at any time, hand the last core to each other by blocking.

A spin is bounded, and given up where waits have been too long for it to pay.

Pure: counts and durations in, decisions out.
"""

from __future__ import annotations

__all__ = [
    "SpinAhead",
    "SpinBudget",
    "count_spinning_workers",
    "engine_may_spin",
    "spinning_is_safe",
]

# Longer than what a spinning worker waits for the one that does not, and for a caller who
# makes tensors and asks a small policy. Idle pools pay it once.
SPIN_S = 400e-6
_DECAY = 0.125
# Before a wait that nobody can look into: how far ahead of its end a spin should end, so
# that the wait is short and still is one (measured: less, and the spins run away with
# every jitter; more, and the waiter is asleep half of the time).
_AHEAD_S = 8e-6
_LONGEST_AHEAD_S = 300e-6
_LATE_S = 40e-6  # what a wake-up takes; more says nothing
_FORGET = 1.002  # the quickest wait there was counts for some hundred waits
_OUTLIER = 4  # a single one moves the mean by half a budget, so it does not end the spinning

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


def count_spinning_workers(num_workers: int, num_cores: int) -> int:
    """Returns how many workers may spin; one core is left to the engine."""
    if num_workers > num_cores:
        return 0  # they take turns, and a spinner would sit on another's turn
    return min(num_workers, num_cores - 1)


def engine_may_spin(num_workers: int, num_cores: int) -> bool:
    """Returns whether the engine has a core of its own while workers work."""
    return num_workers < num_cores


class SpinBudget:
    """A bounded spin that switches itself off when waits outlast it.

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
        # One pause of the caller says nothing about the steps after it.
        waited_s = min(waited_s, _OUTLIER * self._spin_s)
        self._mean_s += _DECAY * (waited_s - self._mean_s)
        self.budget_s = self._spin_s if self._mean_s < self._spin_s else 0.0


class SpinAhead:
    """How long to spin before a wait that tells nothing until it is over.

    Whoever sleeps in such a wait is woken late. One who comes shortly before its end is
    still awake by then, so this learns how long the waits take, from what is left of them
    after the spin.

    Attributes:
        spin_s: how long to spin before the next wait, in seconds; 0 for not at all.
    """

    __slots__ = ("_enabled", "_quickest_s", "spin_s")

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._quickest_s = _AHEAD_S  # what a wait takes that is over when it begins
        self.spin_s = 0.0

    def note_wait(self, waited_s: float) -> None:
        """Notes how long a wait took, without the spin before it."""
        if not self._enabled:
            return
        if waited_s > _LONGEST_AHEAD_S:
            self.spin_s = self.spin_s / 2 if self.spin_s > _AHEAD_S else 0.0
            return
        self._quickest_s = min(waited_s, _FORGET * self._quickest_s)
        left_s = min(waited_s - self._quickest_s, _LATE_S)
        spin_s = self.spin_s + _DECAY * (left_s - _AHEAD_S)
        self.spin_s = min(max(spin_s, 0.0), _LONGEST_AHEAD_S)
