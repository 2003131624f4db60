"""The closed set of commands and replies that cross the pipe of a worker.

Knows `spec` and plain values. Does not know pipes or pickling. Steps and plain
resets are not here: they travel as bytes in the slab (`layout.Op`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.engine.core.layout import Layout
    from shoal.engine.spec import EnvSpec, LeafPath

__all__ = [
    "AttachSlab",
    "Attached",
    "BuildEnvs",
    "BuildFailed",
    "Built",
    "CallEnvs",
    "Command",
    "EnvFailure",
    "EnvNotes",
    "LeaveLoop",
    "Left",
    "PackedNotes",
    "PackedReturned",
    "Reply",
    "ResetEnvs",
    "Returned",
    "SeedEnvs",
    "SetActions",
]


# --- engine to worker -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BuildEnvs:
    """Build these envs. First message of all."""

    worker_id: int
    env_ids: tuple[int, ...]
    factories: bytes  # one factory per env, pickled; descriptors come along
    keep_infos: bool
    may_spin: bool
    env_threads: bool = False  # each env on a thread of its own
    cores: tuple[int, ...] | None = None  # where the worker may run; None: anywhere


@dataclass(frozen=True, slots=True)
class AttachSlab:
    """Map the slab (its descriptor comes along) and begin to serve."""

    layout: Layout
    spec: EnvSpec


@dataclass(frozen=True, slots=True)
class ResetEnvs:
    """Reset with seeds or options; results go into the rows like those of a step."""

    env_ids: tuple[int, ...]
    seeds: tuple[int | None, ...]
    kwargs: tuple[Mapping[str, Any], ...]  # keyword arguments of each env's reset
    undo_prepared: tuple[bool, ...]  # a reset was prepared in vain: put the dice back


@dataclass(frozen=True, slots=True)
class SetActions:
    """Action leaves that have no fixed shape, for the step that follows."""

    actions: Mapping[int, Mapping[LeafPath, Any]]


@dataclass(frozen=True, slots=True)
class SeedEnvs:
    """Seed these envs; answered by `Returned`."""

    call_id: int
    env_ids: tuple[int, ...]
    seeds: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class CallEnvs:
    """Call a method, or read an attribute, of these envs; answered by `Returned`."""

    call_id: int
    env_ids: tuple[int, ...]
    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaveLoop:
    """Close the envs and end; answered by `Left`."""


Command = BuildEnvs | AttachSlab | ResetEnvs | SetActions | SeedEnvs | CallEnvs | LeaveLoop


# --- worker to engine -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnvFailure:
    """An env raised.

    Attributes:
        exception: the pickled exception, or ``None`` if it cannot be pickled.
        text: type and message of the exception.
    """

    env_id: int
    during: str
    text: str
    traceback: str
    exception: bytes | None


@dataclass(frozen=True, slots=True)
class Built:
    """All envs of this worker stand; one spec per env."""

    specs: tuple[EnvSpec, ...]


@dataclass(frozen=True, slots=True)
class BuildFailed:
    """An env could not be built. The worker ends."""

    failure: EnvFailure


@dataclass(frozen=True, slots=True)
class Attached:
    """The worker serves from here on."""


@dataclass(slots=True)
class EnvNotes:
    """What one env's result holds beside its rows.

    ``observation`` and ``reset_observation`` hold the leaves without a fixed shape;
    the info dicts are there if the engine keeps infos.
    """

    observation: dict[LeafPath, Any] | None = None
    reset_observation: dict[LeafPath, Any] | None = None
    info: dict[str, Any] | None = None
    reset_info: dict[str, Any] | None = None
    failure: EnvFailure | None = None


@dataclass(frozen=True, slots=True)
class PackedNotes:
    """Goes out before the rows it belongs to are published.

    Attributes:
        number: counts them, from 1.
        notes: a pickled mapping from env id to `EnvNotes`. Pickled apart, because it
            may hold what cannot be rebuilt on the other side.
    """

    number: int
    env_ids: tuple[int, ...]
    notes: bytes


@dataclass(frozen=True, slots=True)
class Returned:
    """The answer to a call: a value or a failure per env."""

    call_id: int
    values: Mapping[int, Any]
    failures: tuple[EnvFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedReturned:
    """The same on its way; ``values`` are pickled apart, as those of `PackedNotes`."""

    call_id: int
    env_ids: tuple[int, ...]
    values: bytes
    failures: tuple[EnvFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """The worker has closed its envs and ends now."""

    failures: tuple[EnvFailure, ...] = ()


Reply = Built | BuildFailed | Attached | PackedNotes | PackedReturned | Left
