"""The constructor options of the batched envs, checked once.

Knows which options TorchRL's classes have, and what became of each. Does not know
how one is carried out.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import UsageError

__all__ = [
    "BatchOptions",
    "are_equal",
    "as_list",
    "kwargs_per_reset",
    "kwargs_per_worker",
    "resolve_buffers",
    "resolve_sharing",
]

# What `configure_parallel` may change.
_CHANGEABLE = frozenset(
    {
        "use_buffers",
        "shared_memory",
        "memmap",
        "mp_start_method",
        "num_threads",
        "num_sub_threads",
        "non_blocking",
        "daemon",
        "shutdown_timeout",
        "num_processes",
        "timeout",
        "prefetch_resets",
        "caller_steps",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """What the constructors take besides the envs themselves.

    Attributes:
        num_processes: worker processes; ``None`` for one per usable core, and never more
            than envs. Affinity and cgroup quota count.
        timeout: seconds that a call may wait for envs; ``None`` for no limit.
        shutdown_timeout: seconds that envs may take to close before they are killed.
        mp_start_method: ``"forkserver"`` (the default: forked from a fresh, preloaded
            interpreter), ``"spawn"`` or ``"fork"``.
        categorical_action_encoding: choices are numbers rather than one-hot.
        prefetch_resets: resets may be prepared where they have been seen to follow.
        caller_steps: the calling thread steps a worker's share of the envs itself, without
            isolation; ``None``: only for Gymnasium's own small games.
        memmap: the shared block is a file on disk; with ``shared_memory=False``.
        shared_memory: the shared block is in memory.
        pin_memory: must be false, as in TorchRL.
        allow_step_when_done: must be false, as in TorchRL.
        share_individual_td: true for results that are lazy stacks of one TensorDict per env.
            ``None``: only if the envs' entries cannot be stacked densely. In a `SerialEnv`
            of TorchRL envs, true also lets gradients through.
        num_threads: torch threads of this process while the envs run; ``None`` leaves them.
        num_sub_threads: torch threads of each worker with TorchRL envs.
        non_blocking: copies to a device are asynchronous where that is safe; ``None`` is true.
        use_buffers: false, in a `SerialEnv` of TorchRL envs, hands on what the envs return,
            gradients included. In a `ParallelEnv` entries of fixed shape travel through shared
            memory in any case, and others do not.
        policy_proof: kept as an attribute.
        batched: what messages call the batched env.
        consolidate: without effect: nothing that is large goes through a pipe.
        daemon: without effect: workers end with the process that owns them in any case, and
            may have children of their own.
    """

    num_processes: int | None = None
    timeout: float | None = 600.0
    shutdown_timeout: float = 10.0
    mp_start_method: str | None = None
    categorical_action_encoding: bool = True
    prefetch_resets: bool = True
    caller_steps: bool | None = None
    memmap: bool = False
    shared_memory: bool = True
    pin_memory: bool = False
    allow_step_when_done: bool = False
    share_individual_td: bool | None = None
    policy_proof: Any = None
    batched: str = "a batched env"
    num_threads: int | None = None
    num_sub_threads: int = 1
    non_blocking: bool | None = None
    use_buffers: bool | None = None
    consolidate: bool = True
    daemon: bool = False

    @property
    def keeps_graph(self) -> bool:
        """Whether results in this process stay attached to their gradients."""
        return self.share_individual_td is True or self.use_buffers is False

    def changed(self, **options: Any) -> BatchOptions:
        """Returns the options with some of them changed; ``None`` leaves one as it is.

        Raises:
            TypeError: one that cannot be changed.
        """
        if unknown := sorted(options.keys() - _CHANGEABLE):
            raise TypeError(
                f"configure_parallel has no option {unknown[0]!r}; it has"
                f" {', '.join(sorted(_CHANGEABLE))}"
            )
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("memmap") and "shared_memory" not in given:
            given["shared_memory"] = False
        return replace(self, **given)

    def __post_init__(self) -> None:
        if self.shared_memory and self.memmap:
            raise RuntimeError("memmap and shared_memory are mutually exclusive: set one to False")
        if self.pin_memory:
            raise ValueError("pin_memory=True is not supported, as in TorchRL; leave it out")
        if self.allow_step_when_done:
            raise ValueError(
                "allow_step_when_done=True is not supported, as in TorchRL; leave it out"
            )


def as_list(create_env_fn: Any, num_workers: Any) -> tuple[list[Any], bool]:
    """Returns one way to make an env per worker, and whether they are all the same.

    Args:
        create_env_fn: an id, a callable, or a sequence of those.
        num_workers: how many envs there are.

    Raises:
        UsageError: ``num_workers`` is no positive integer.
        RuntimeError: the sequence has another length.
        TypeError: it is something else.
    """
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise UsageError(f"num_workers is an integer >= 1, not {num_workers!r}")
    if isinstance(create_env_fn, str) or callable(create_env_fn):
        return [create_env_fn] * num_workers, True
    if not isinstance(create_env_fn, Sequence):
        # A Gymnasium EnvSpec is neither, and names an env as well as its id does.
        if hasattr(create_env_fn, "entry_point"):
            return [create_env_fn] * num_workers, True
        raise TypeError(
            "create_env_fn is an env id, a callable that returns an env, or a list of those;"
            f" not {type(create_env_fn).__name__}"
            + (" (pass a function that makes the env)" if hasattr(create_env_fn, "step") else "")
        )
    makers = list(create_env_fn)
    if len(makers) != num_workers:
        raise RuntimeError(
            f"len(create_env_fn) and num_workers mismatch: {len(makers)} functions for"
            f" {num_workers} workers; give one per worker"
        )
    return makers, all(maker is makers[0] for maker in makers)


def kwargs_per_worker(
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    num_workers: int,
    name: str = "create_env_kwargs",
) -> list[dict[str, Any]]:
    """Returns one dict of keyword arguments per worker, independent of each other.

    Raises:
        RuntimeError: a list of the wrong length.
    """
    if create_env_kwargs is None:
        return [{} for _ in range(num_workers)]
    if isinstance(create_env_kwargs, Mapping):
        return [copy.deepcopy(dict(create_env_kwargs)) for _ in range(num_workers)]
    given = list(create_env_kwargs)
    if len(given) != num_workers:
        raise RuntimeError(
            f"len({name}) and num_workers mismatch: {len(given)} dicts for {num_workers} workers;"
            " give one per worker, or one for all"
        )
    return [dict(kwargs) for kwargs in given]


def kwargs_per_reset(kwargs: dict[str, Any], num_envs: int) -> list[dict[str, Any]] | None:
    """Returns the keyword arguments of each env's reset, or ``None`` if there are none.

    ``list_of_kwargs`` holds one dict per env; shared arguments win over them.

    Raises:
        RuntimeError: the list has another length.
    """
    shared = {key: value for key, value in kwargs.items() if key != "list_of_kwargs"}
    listed = kwargs.get("list_of_kwargs")
    if listed is None:
        return [shared] * num_envs if shared else None
    if len(listed) != num_envs:
        raise RuntimeError(
            f"list_of_kwargs holds {len(listed)} dicts, but there are {num_envs} envs;"
            " give one per env"
        )
    return [{**own, **shared} for own in listed]


def resolve_buffers(use_buffers: bool | None, *, is_dynamic: bool) -> bool:
    """Returns whether all entries have a fixed shape and travel as arrays.

    Args:
        use_buffers: what was asked for.
        is_dynamic: some entries have no fixed shape.
    """
    if use_buffers and is_dynamic:
        warnings.warn(
            "use_buffers=True was asked for, but some entries of the envs have no fixed shape;"
            " these travel one by one",
            stacklevel=4,
        )
    return use_buffers is not False and not is_dynamic


def resolve_sharing(share_individual_td: bool | None, *, are_stackable: bool) -> bool:
    """Returns whether results are lazy stacks of one TensorDict per env.

    Args:
        share_individual_td: what was asked for.
        are_stackable: the envs' entries make one dense batch.

    Raises:
        ValueError: a dense batch was asked for, and cannot be.
    """
    if share_individual_td is False and not are_stackable:
        raise ValueError(
            "share_individual_td=False asks for dense results, but the entries of the envs have"
            " different keys or shapes; leave it out"
        )
    return bool(share_individual_td) or not are_stackable


def are_equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Returns whether keyword arguments are surely equal."""
    try:
        return dict(left) == dict(right)
    except Exception:  # noqa: BLE001 - border: arrays and tensors have no single answer
        return False
