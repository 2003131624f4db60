"""Opens the backend that a configuration asks for.

Knows every backend. Does not know what an engine does with one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from shoal.engine.backends.common import LocalHost, build_here, close_envs
from shoal.engine.backends.processes import ProcessBackend
from shoal.engine.backends.serial import SerialBackend
from shoal.engine.backends.shared import SharedBackend
from shoal.engine.backends.threads import ThreadBackend
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.plan import assign_envs, caller_shares_work, choose_num_workers
from shoal.engine.system.cores import count_usable_cores, usable_cores
from shoal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shoal.engine.backends.base import Backend
    from shoal.engine.config import EngineConfig
    from shoal.engine.env import EnvFactory, NativePoolFactory
    from shoal.engine.spec import EnvSpec

__all__ = ["open_backend"]


def open_backend(factories: Sequence[EnvFactory], config: EngineConfig) -> Backend:
    """Builds the envs where the configuration wants them.

    Raises:
        StartError: an env could not be built.
        SpecError: the envs do not share their leaves.
        UsageError: a factory cannot be sent to another process.
        StartTimeout: the envs did not stand in time.
    """
    if config.backend == "serial":
        return SerialBackend(
            factories, keep_infos=config.keep_infos, mixed_specs=config.mixed_specs
        )
    if config.backend == "threads":
        return ThreadBackend(
            factories,
            keep_infos=config.keep_infos,
            mixed_specs=config.mixed_specs,
            deadline=Deadline.after(config.start_timeout),
        )
    if config.backend == "coroutines":
        from shoal.engine.backends.coroutines import CoroutineBackend

        return CoroutineBackend(
            factories,
            keep_infos=config.keep_infos,
            mixed_specs=config.mixed_specs,
            deadline=Deadline.after(config.start_timeout),
        )
    if config.backend == "envpool":
        from shoal.engine.backends.envpool import EnvPoolBackend

        return EnvPoolBackend(
            cast("Sequence[NativePoolFactory]", factories), keep_infos=config.keep_infos
        )
    num_envs, requested = len(factories), config.num_processes
    num_workers = choose_num_workers(num_envs, requested, count_usable_cores())
    are_cheap = all(getattr(factory, "is_cheap", False) for factory in factories)
    if not caller_shares_work(config.caller_steps, num_envs, requested, are_cheap=are_cheap):
        return _open_processes(factories, num_workers, config, ())
    # The caller is one of the cores' workers, or one more than was asked for.
    num_shares = choose_num_workers(
        num_envs, None if requested is None else requested + 1, max(2, count_usable_cores())
    )
    first = assign_envs(num_envs, num_shares)[-1].start
    envs = build_here(factories[first:], first)
    try:
        specs = [env.spec for env in envs]
        remote = _open_processes(factories[:first], num_shares - 1, config, specs)
    except BaseException:
        close_envs(envs)
        raise
    local = LocalHost(envs, first, remote.arrays, remote.spec, keep_infos=config.keep_infos)
    return SharedBackend(remote, local)


def _open_processes(
    factories: Sequence[EnvFactory],
    num_workers: int,
    config: EngineConfig,
    more_specs: Sequence[EnvSpec],
) -> ProcessBackend:
    affinity = config.worker_affinity
    if affinity is not None:
        _check_affinity(affinity, num_workers)
    return ProcessBackend(
        factories,
        num_workers=num_workers,
        method=config.start_method,
        keep_infos=config.keep_infos,
        on_disk=config.memmap,
        more_specs=more_specs,
        mixed_specs=config.mixed_specs,
        env_threads=config.env_threads,
        affinity=affinity,
        deadline=Deadline.after(config.start_timeout),
    )


def _check_affinity(masks: Sequence[Collection[int]], num_workers: int) -> None:
    """Checks that each worker has cores, and that this process may give them away.

    Raises:
        UsageError: it is not so. Nothing was started.
    """
    allowed = usable_cores()
    if allowed is None:
        raise UsageError("worker_affinity: this platform cannot bind a process to cores")
    if len(masks) != num_workers:
        raise UsageError(
            f"worker_affinity holds one collection of cores per worker: {num_workers}, not"
            f" {len(masks)}"
        )
    for worker_id, cores in enumerate(masks):
        if wrong := sorted(set(cores) - allowed):
            raise UsageError(
                f"worker_affinity: worker {worker_id} cannot have the cores {wrong}; this"
                f" process may use {sorted(allowed)}"
            )
