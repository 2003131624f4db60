"""The options of an engine, checked once.

Knows ranges of options and how they combine. Does not know how one is carried out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from shoal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

__all__ = ["BackendName", "EngineConfig", "StartMethodName"]

BackendName = Literal["processes", "threads", "coroutines", "serial", "envpool"]
StartMethodName = Literal["forkserver", "spawn", "fork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs its envs.

    Attributes:
        backend: ``"processes"``: worker processes; ``"threads"``: each env on a thread of
            its own; ``"coroutines"``: envs whose ``reset`` and ``step`` are coroutines, on
            one event loop in a thread of its own; ``"serial"``: the calling thread;
            ``"envpool"``: one pool of EnvPool's, in C++ threads.
        num_processes: worker processes; ``None`` for one per usable core. Never more
            than envs.
        start_method: how worker processes come to life.
        keep_infos: carry whole info dicts; they are pickled at every step.
        timeout: seconds that a call may wait for envs; ``None`` for no limit.
        start_timeout: seconds that all envs may take to be built.
        close_timeout: seconds that envs may take to end before they are killed.
        prefetch_resets: prepare resets where they have been seen to follow.
        memmap: keep the shared block in a file on disk (deleted, but open), for
            observations that outgrow the memory.
        caller_steps: the calling thread steps as many envs as a worker does, which saves
            a wake-up per step but does not isolate these envs from it. ``None`` does so
            only for envs that are known to be cheap and harmless (Gymnasium's classic
            control and toy text games), and only if ``num_processes`` is ``None``.
        mixed_specs: envs may differ in their leaves. A leaf that is not the same in all
            of them travels as an object, `ABSENT` for an env that does not have it.
        env_threads: each env of a worker process is built, stepped and closed on a thread
            of its own, so that waits of envs in one worker overlap.
        worker_affinity: the cores of each worker process, one collection of core numbers per
            worker; ``None`` leaves them to the system. Linux only.
    """

    backend: BackendName = "processes"
    num_processes: int | None = None
    start_method: StartMethodName = "forkserver"
    keep_infos: bool = False
    timeout: float | None = 600.0
    start_timeout: float = 300.0
    close_timeout: float = 10.0
    prefetch_resets: bool = True
    memmap: bool = False
    caller_steps: bool | None = None
    mixed_specs: bool = False
    env_threads: bool = False
    worker_affinity: Sequence[Collection[int]] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Returns the configuration with these options.

        Raises:
            UsageError: an option that does not exist, or a wrong value.
        """
        names = [field.name for field in fields(cls)]
        if unknown := [name for name in options if name not in names]:
            raise UsageError(f"there is no option {unknown[0]!r}; there are {', '.join(names)}")
        return cls(**options)

    def __post_init__(self) -> None:
        if self.backend not in get_args(BackendName):
            raise UsageError(
                f"backend is one of {', '.join(get_args(BackendName))}; not {self.backend!r}"
            )
        if self.start_method not in get_args(StartMethodName):
            raise UsageError(
                f"start_method is one of {', '.join(get_args(StartMethodName))};"
                f" not {self.start_method!r}"
            )
        if self.backend != "processes" and (self.env_threads or self.worker_affinity is not None):
            name = "env_threads" if self.env_threads else "worker_affinity"
            raise UsageError(f"{name} is for worker processes; backend is {self.backend!r}")
        if self.worker_affinity is not None:
            _check_masks(self.worker_affinity)
        for name in ("timeout", "start_timeout", "close_timeout"):
            value = getattr(self, name)
            if value is None and name == "timeout":
                continue
            if not isinstance(value, int | float) or not value >= 0:
                raise UsageError(f"{name} is a number of seconds >= 0, not {value!r}")


def _check_masks(masks: object) -> None:
    if not isinstance(masks, Sequence) or not all(
        isinstance(cores, Collection)
        and len(cores)
        and all(isinstance(core, int) and not isinstance(core, bool) for core in cores)
        for cores in masks
    ):
        raise UsageError(
            "worker_affinity holds one collection of core numbers per worker, none of them"
            f" empty; not {masks!r}"
        )
