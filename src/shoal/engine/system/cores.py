"""How many cores this process may use. Reads affinity and cgroup files."""

from __future__ import annotations

import math
import os
from pathlib import Path

from shoal.engine.core.plan import cores_from_quota

__all__ = ["count_usable_cores"]

_CGROUP = Path("/sys/fs/cgroup")


def count_usable_cores() -> int:
    """Returns the cores this process may use: affinity and cgroup quota count."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = cores_from_quota(
        _read(_CGROUP / "cpu.max"),
        _read(_CGROUP / "cpu/cpu.cfs_quota_us"),
        _read(_CGROUP / "cpu/cpu.cfs_period_us"),
    )
    # Half a core is still one worker's worth.
    return max(1, min(allowed, math.ceil(quota) if quota != math.inf else allowed))


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
