"""Which envs go to which worker, and how many workers there are.

Arithmetic over counts and over the text of two cgroup files. Does not know
processes or the file system.
"""

from __future__ import annotations

import math

from shoal.errors import UsageError

__all__ = ["assign_envs", "caller_shares_work", "choose_num_workers", "cores_from_quota"]


def cores_from_quota(cpu_max: str | None, cfs_quota: str | None, cfs_period: str | None) -> float:
    """Returns the cores that a cgroup's CPU quota allows; infinite without one.

    Args:
        cpu_max: the text of ``cpu.max`` (cgroup v2), or ``None`` if there is none.
        cfs_quota: the text of ``cpu.cfs_quota_us`` (cgroup v1).
        cfs_period: the text of ``cpu.cfs_period_us`` (cgroup v1).
    """
    try:
        if cpu_max is not None:
            quota, period = cpu_max.split()
            return math.inf if quota == "max" else int(quota) / int(period)
        if cfs_quota is not None and cfs_period is not None and int(cfs_quota) > 0:
            return int(cfs_quota) / int(cfs_period)
    except (ValueError, ZeroDivisionError):
        # A file we cannot read as expected sets no limit; too many workers are
        # slower, too few would be a puzzle.
        return math.inf
    return math.inf


def choose_num_workers(num_envs: int, requested: int | None, num_cores: int) -> int:
    """Returns the number of workers: as many as cores, never more than envs.

    Raises:
        UsageError: the request is not a positive number.
    """
    if requested is None:
        return max(1, min(num_envs, num_cores))
    given: object = requested
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise UsageError(
            f"num_processes is an integer >= 1, or None for one per core, not {requested!r}"
        )
    return min(requested, num_envs)


def caller_shares_work(
    wish: bool | None, num_envs: int, requested: int | None, *, are_cheap: bool
) -> bool:
    """Returns whether the caller steps a share of the envs itself.

    Args:
        wish: what the caller asked for; ``None`` leaves it to the rule: only for envs
            that are known to be cheap and harmless, and if no number of processes was
            asked for.
        num_envs: how many envs there are.
        requested: the number of processes asked for, if any.
        are_cheap: all envs are known to take microseconds.
    """
    if num_envs < 2:
        return False
    if wish is not None:
        return wish
    return are_cheap and requested is None


def assign_envs(num_envs: int, num_workers: int) -> list[range]:
    """Returns a contiguous range of env ids per worker, sizes differing by one at most.

    Contiguous, so that a worker's rows of every leaf are one block of memory.
    """
    small, extra = divmod(num_envs, num_workers)
    ranges = []
    start = 0
    for worker_id in range(num_workers):
        stop = start + small + (worker_id < extra)
        ranges.append(range(start, stop))
        start = stop
    return ranges
