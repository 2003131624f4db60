"""Which cores this process may use, and how many. Reads affinity and cgroup files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.engine.core.plan import cores_from_quota

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["bind_to_cores", "count_usable_cores", "usable_cores"]

_CGROUP = Path("/sys/fs/cgroup")


def count_usable_cores() -> int:
    """Returns the cores this process may use: affinity and cgroup quota count."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = min(_quotas(), default=math.inf)
    # Half a core is still one worker's worth.
    return max(1, min(allowed, math.ceil(quota) if quota != math.inf else allowed))


def usable_cores() -> frozenset[int] | None:
    """Returns the numbers of the cores this process may use; ``None``: no way to tell."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    return frozenset(os.sched_getaffinity(0))


def bind_to_cores(cores: Collection[int]) -> None:
    """Lets this thread, and those that it starts later, run on these cores only.

    Raises:
        OSError: the system does not allow it.
    """
    os.sched_setaffinity(0, cores)


def _quotas() -> Iterator[float]:
    """Yields the quota of this process's cgroup and of each group around it."""
    own = _own_cgroup()
    for group in (own, *own.parents):
        if not group.is_relative_to(_CGROUP):
            break
        yield cores_from_quota(_read(group / "cpu.max"), None, None)
    yield cores_from_quota(
        None, _read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")
    )


def _own_cgroup() -> Path:
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":  # version 2
            return _CGROUP / path.lstrip("/")
    return _CGROUP


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
