"""What the arrays of one env look like: leaves with a path, a shape and a dtype.

Knows numpy dtypes and shapes. Does not know Gymnasium spaces, torch, or memory.

A nested observation or action is a flat, ordered mapping from *path* to leaf. The
path of a bare array is ``()``; below a mapping it holds the keys, below a tuple
the positions as text: ``("robot", "arm")``, ``("0",)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ABSENT",
    "MIXED",
    "Absent",
    "ArraySpec",
    "EnvSpec",
    "LeafPath",
    "LeafSpec",
    "ObjectSpec",
    "describe_path",
]

LeafPath = tuple[str, ...]


MIXED = "mixed"
"""Describes a leaf that became an object because it is not the same in all envs."""


class Absent(Enum):
    """The type of `ABSENT`."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
"""Stands, among objects, for a leaf that other envs of the engine have and this one has not."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A leaf of fixed shape and dtype. It travels through shared memory.

    Attributes:
        shape: the shape of one env's array, without a batch dimension.
        dtype: a numeric or boolean numpy dtype.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if self.dtype.kind not in "biufc":
            raise TypeError(
                f"an ArraySpec holds numbers or booleans, not dtype {self.dtype};"
                " use ObjectSpec for anything else"
            )

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """A leaf without a fixed shape: text, a graph, a sequence, a user's space.

    It travels as a pickled Python object, beside the shared memory.

    Attributes:
        description: what it is, for messages.
        is_optional: as a leaf of an action, it need not be given; the env then gets
            ``None``.
    """

    description: str = "object"
    is_optional: bool = False

    def __str__(self) -> str:
        return self.description


LeafSpec = ArraySpec | ObjectSpec


def _frozen(leaves: Mapping[LeafPath, LeafSpec]) -> Mapping[LeafPath, LeafSpec]:
    return MappingProxyType(dict(leaves))


@dataclass(frozen=True)
class EnvSpec:
    """Everything the engine has to know about one env.

    Attributes:
        observation: the leaves of an observation, in the order in which the env
            hands them over.
        action: the leaves of an action, in the order in which the env takes them.
        info: numeric entries of the info dict that travel with every result; an entry
            the env leaves out arrives as zero.
        undoes_resets: the env's `save_rng` knows every generator that a reset draws from, so
            that a reset may be prepared and taken back.
    """

    observation: Mapping[LeafPath, LeafSpec]
    action: Mapping[LeafPath, LeafSpec]
    info: Mapping[LeafPath, ArraySpec] = field(default_factory=dict)
    undoes_resets: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation", _frozen(self.observation))
        object.__setattr__(self, "action", _frozen(self.action))
        object.__setattr__(self, "info", MappingProxyType(dict(self.info)))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy cannot be pickled.
        leaves = (dict(self.observation), dict(self.action), dict(self.info))
        return (EnvSpec, (*leaves, self.undoes_resets))


def describe_path(root: str, path: LeafPath) -> str:
    """Returns ``root/a/b`` for messages."""
    return "/".join((root, *path))
