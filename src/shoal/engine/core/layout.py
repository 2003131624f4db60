"""Where each leaf lies in the slab.

Arithmetic over specs and counts. Knows numpy dtypes and alignment; does not know
shared memory, processes, environments or any framework.

The slab is field-major: each leaf is one contiguous ``[num_envs, ...]`` array, so
the engine reads a whole batch without gathering and a worker writes its own
contiguous rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.spec import ArraySpec, EnvSpec, LeafPath

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Arrays", "Field", "Layout", "Op", "Status", "Word", "plan_layout", "view_arrays"]

_CACHE_LINE = 64  # bytes; also enough for any dtype's alignment


class Op(IntEnum):
    """What a worker does with an env's row next."""

    NONE = 0
    STEP = 1
    STEP_AUTORESET = 2  # and, if the episode ended, reset into the second set of rows
    STEP_PREPARE = 3  # the same, but the reset is a guess that may be taken back
    RESET = 4  # without seed or options, into the second set of rows


class Status(IntEnum):
    """What a worker has made of an env's row. Bits."""

    NONE = 0
    READY = 1
    FAILED = 2  # together with READY: the env raised, its error is on the pipe
    RESET_DONE = 4  # the episode ended and a reset is in the second set of rows


class Word(IntEnum):
    """The control words of one worker; each has a single writer."""

    REQUEST = 0  # engine: counts the times it has asked
    REPLY = 1  # worker: the last request it has carried out
    ASLEEP = 2  # worker: it is blocked, or about to block, and has to be woken
    NOTES = 3  # worker: counts the `Notes` it has put on the pipe
    MAIL = 4  # engine: counts the commands it has put on the pipe


@dataclass(frozen=True, slots=True)
class Field:
    """One array in the slab."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole slab.

    Attributes:
        fields: every array by a name that is unique in the slab.
        observation: field name per array leaf of the observation; the same for
            ``reset_observation``, ``action``, ``info`` and ``reset_info``.
        nbytes: the size of the slab.
    """

    fields: Mapping[str, Field]
    observation: Mapping[LeafPath, str]
    reset_observation: Mapping[LeafPath, str]
    action: Mapping[LeafPath, str]
    info: Mapping[LeafPath, str]
    reset_info: Mapping[LeafPath, str]
    num_envs: int
    num_workers: int
    nbytes: int


@dataclass(slots=True)
class Arrays:
    """Views of one slab, one per field. Made once, at start.

    Attributes:
        words: uint64 ``[num_workers, 8]``: a cache line of `Word` per worker.
        engine_asleep: uint8 ``[1]``: the engine is blocked and has to be woken.
        op: uint8 ``[num_envs]``, written by the engine, cleared by the worker.
        status: uint8 ``[num_envs]``, written by the worker, cleared by the engine.
        timed: uint8 ``[1]``: the engine wants to know when results were ready.
        ready_at: float64 ``[num_envs]``: when, on the clock that all processes share.
        reward: float64 ``[num_envs]``; terminated, truncated: bool ``[num_envs]``.
        observation: per path ``[num_envs, *shape]``, what the last step returned.
        reset_observation: the same for the last reset: the second set of rows.
    """

    words: np.ndarray[Any, Any]
    engine_asleep: np.ndarray[Any, Any]
    op: np.ndarray[Any, Any]
    status: np.ndarray[Any, Any]
    timed: np.ndarray[Any, Any]
    ready_at: np.ndarray[Any, Any]
    reward: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]
    action: dict[LeafPath, np.ndarray[Any, Any]]
    observation: dict[LeafPath, np.ndarray[Any, Any]]
    reset_observation: dict[LeafPath, np.ndarray[Any, Any]]
    info: dict[LeafPath, np.ndarray[Any, Any]]
    reset_info: dict[LeafPath, np.ndarray[Any, Any]]


def plan_layout(spec: EnvSpec, num_envs: int, num_workers: int) -> Layout:
    """Returns the layout of the slab for ``num_envs`` envs of one spec."""
    fields: dict[str, Field] = {}
    end = 0

    def place(name: str, shape: tuple[int, ...], dtype: Any) -> str:
        nonlocal end
        offset = -(-end // _CACHE_LINE) * _CACHE_LINE
        fields[name] = Field(offset, shape, np.dtype(dtype))
        end = offset + prod(shape) * fields[name].dtype.itemsize
        return name

    def place_leaves(root: str, leaves: Mapping[LeafPath, Any]) -> dict[LeafPath, str]:
        return {
            path: place(f"{root}:{number}", (num_envs, *leaf.shape), leaf.dtype)
            for number, (path, leaf) in enumerate(leaves.items())
            if isinstance(leaf, ArraySpec)
        }

    place("words", (num_workers, 8), np.uint64)
    place("engine_asleep", (1,), np.uint8)
    place("op", (num_envs,), np.uint8)
    place("status", (num_envs,), np.uint8)
    place("timed", (1,), np.uint8)
    place("ready_at", (num_envs,), np.float64)
    action = place_leaves("action", spec.action)
    observation = place_leaves("observation", spec.observation)
    place("reward", (num_envs,), np.float64)
    place("terminated", (num_envs,), np.bool_)
    place("truncated", (num_envs,), np.bool_)
    info = place_leaves("info", spec.info)
    return Layout(
        observation=observation,
        reset_observation=place_leaves("reset_observation", spec.observation),
        action=action,
        info=info,
        reset_info=place_leaves("reset_info", spec.info),
        fields=fields,
        num_envs=num_envs,
        num_workers=num_workers,
        nbytes=end,
    )


def view_arrays(layout: Layout, memory: Any) -> Arrays:
    """Returns views of ``memory``, any writable buffer of ``layout.nbytes`` or more."""

    def view(name: str) -> np.ndarray[Any, Any]:
        field = layout.fields[name]
        # A dtype that was pickled is a twin of numpy's own object; by its name we get the
        # object itself, which lets writers compare with `is`.
        dtype = np.dtype(field.dtype.str)
        return np.ndarray(field.shape, dtype, buffer=memory, offset=field.offset)

    def view_all(names: Mapping[LeafPath, str]) -> dict[LeafPath, np.ndarray[Any, Any]]:
        return {path: view(name) for path, name in names.items()}

    return Arrays(
        words=view("words"),
        engine_asleep=view("engine_asleep"),
        op=view("op"),
        status=view("status"),
        timed=view("timed"),
        ready_at=view("ready_at"),
        reward=view("reward"),
        terminated=view("terminated"),
        truncated=view("truncated"),
        action=view_all(layout.action),
        observation=view_all(layout.observation),
        reset_observation=view_all(layout.reset_observation),
        info=view_all(layout.info),
        reset_info=view_all(layout.reset_info),
    )
