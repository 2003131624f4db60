"""Gymnasium spaces as flat leaves; values of them taken apart and put together.

Knows Gymnasium spaces and the engine's specs. Does not know envs, the engine, or
any framework above it.

`leaves_of` describes a space; `flattener` and `builder` turn a space into functions
once, so that a step walks no space. All three agree on the order of the leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from shoal.engine.spec import ArraySpec, LeafPath, LeafSpec, ObjectSpec, describe_path
from shoal.errors import SpecError

__all__ = ["Entry", "builder", "entries_of", "flattener", "leaves_of"]

Space = spaces.Space[Any]
Flatten = Callable[[Any], tuple[Any, ...]]
Build = Callable[[Sequence[Any]], Any]


class Entry(NamedTuple):
    """One child of a Dict or Tuple space.

    Attributes:
        name: the key as text, or the position as text: its part of a `LeafPath`.
        key: the key as the env uses it.
        space: the child.
    """

    name: str
    key: Any
    space: Space


def entries_of(space: Space, *, where: str = "observation") -> tuple[Entry, ...] | None:
    """Returns the children of a Dict or Tuple space, ``None`` for any other space.

    Args:
        space: any space.
        where: what messages call it, as ``"observation/arm"``.

    Raises:
        SpecError: the space has no entries, or two of its keys are the same as text.
    """
    match space:
        case spaces.Dict():
            entries = tuple(Entry(str(key), key, child) for key, child in space.spaces.items())
        case spaces.Tuple():
            entries = tuple(Entry(str(i), i, child) for i, child in enumerate(space.spaces))
        case _:
            return None
    if not entries:
        raise SpecError(
            key=where,
            expected=f"a {type(space).__name__} space with at least one entry",
            actual="empty",
            hint="An env without observations or actions can have Box(0, 0, (0,)).",
        )
    seen: dict[str, Any] = {}
    for entry in entries:
        if entry.name in seen:
            raise SpecError(
                key=where,
                expected="a Dict space whose keys differ as text",
                actual=f"one with the keys {seen[entry.name]!r} and {entry.key!r}",
            )
        seen[entry.name] = entry.key
    return entries


def leaves_of(space: Space, *, root: str = "observation") -> dict[LeafPath, LeafSpec]:
    """Returns the leaves of a space, in the order in which values are taken apart.

    Numbers of a fixed shape (Box, Discrete, MultiDiscrete, MultiBinary and their
    subclasses) become arrays; Dict and Tuple are gone into; everything else, known or
    not, becomes an object.

    Args:
        space: any Gymnasium space.
        root: what messages call it.

    Raises:
        SpecError: an empty Dict or Tuple, or keys that are the same as text.
    """
    return dict(_walk(space, (), root))


def _walk(space: Space, path: LeafPath, root: str) -> Iterator[tuple[LeafPath, LeafSpec]]:
    entries = entries_of(space, where=describe_path(root, path))
    if entries is None:
        yield path, _leaf_of(space)
        return
    for name, _, child in entries:
        yield from _walk(child, (*path, name), root)


def _leaf_of(space: Space) -> LeafSpec:
    match space:
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return ArraySpec(space.shape, np.dtype(space.dtype))
        case spaces.Discrete():
            return ArraySpec((), np.dtype(space.dtype))
        case spaces.Text():
            return ObjectSpec("text")
        case _:
            return ObjectSpec(f"a value of a {type(space).__name__} space")


def flattener(space: Space, *, root: str = "observation") -> Flatten | None:
    """Returns a function that takes a value of the space apart into its leaves.

    The function returns the leaf values unchanged, in the order of `leaves_of`. It
    raises `SpecError` for a missing or an extra key, for something else than a
    mapping in place of a Dict, and for a tuple of another length.

    Args:
        space: any Gymnasium space.
        root: what messages call it.

    Returns:
        The function, or ``None`` if the space is itself a leaf.
    """
    entries = entries_of(space, where=root)
    if entries is None:
        return None
    children = tuple(flattener(e.space, root=f"{root}/{e.name}") for e in entries)
    if isinstance(space, spaces.Dict):
        split = _dict_splitter(tuple(entry.key for entry in entries), root)
    else:
        split = _tuple_splitter(len(entries), root)
    if not any(children):
        return split

    def flatten(value: Any) -> tuple[Any, ...]:
        leaves: list[Any] = []
        for part, flatten_part in zip(split(value), children, strict=True):
            if flatten_part is None:
                leaves.append(part)
            else:
                leaves += flatten_part(part)
        return tuple(leaves)

    return flatten


def _dict_splitter(keys: tuple[Any, ...], where: str) -> Flatten:
    take = itemgetter(*keys)
    num_keys = len(keys)

    def split(value: Any) -> tuple[Any, ...]:
        # Only a plain dict is sure to raise for a missing key and to do nothing else.
        if type(value) is not dict:
            _check_mapping(value, keys, where)
        if len(value) != num_keys:
            raise _wrong_keys(value, keys, where)
        try:
            parts = take(value)
        except KeyError:
            raise _wrong_keys(value, keys, where) from None
        return parts if num_keys > 1 else (parts,)

    return split


def _check_mapping(value: Any, keys: tuple[Any, ...], where: str) -> None:
    if not isinstance(value, Mapping):
        raise SpecError(
            key=where,
            expected=f"a mapping with the keys {_listed(keys)}",
            actual=f"a value of type {type(value).__name__}",
        )
    if value.keys() != set(keys):
        raise _wrong_keys(value, keys, where)


def _wrong_keys(value: Mapping[Any, Any], keys: tuple[Any, ...], where: str) -> SpecError:
    for key in keys:
        if key not in value:
            return SpecError(
                key=f"{where}/{key}",
                expected=f"there, beside the keys {_listed(value)}",
                actual="missing",
            )
    extra = next(key for key in value if key not in keys)
    return SpecError(
        key=f"{where}/{extra}",
        expected=f"left out, since the space has only the keys {_listed(keys)}",
        actual="there",
    )


def _listed(keys: Mapping[Any, Any] | tuple[Any, ...]) -> str:
    return ", ".join(map(repr, keys)) or "(none)"


def _tuple_splitter(num_parts: int, where: str) -> Flatten:
    def split(value: Any) -> tuple[Any, ...]:
        # Envs also return lists and arrays for a Tuple of numbers.
        if not isinstance(value, tuple | list) and np.ndim(value) == 0:
            raise SpecError(
                key=where,
                expected=f"a tuple of length {num_parts}",
                actual=f"a value of type {type(value).__name__}",
            )
        parts: tuple[Any, ...] = tuple(value)  # costs nothing for a tuple
        if len(parts) != num_parts:
            raise SpecError(
                key=where,
                expected=f"a tuple of length {num_parts}",
                actual=f"one of length {len(parts)}",
            )
        return parts

    return split


def builder(space: Space, *, root: str = "action") -> Build | None:
    """Returns a function that puts leaf values together into a value of the space.

    Args:
        space: any Gymnasium space.
        root: what messages call it.

    Returns:
        A function from leaf values, in the order of `leaves_of`, to a dict or a tuple,
        nested as the space is; ``None`` if the space is itself a leaf.

    Raises:
        SpecError: as `leaves_of`.
    """
    entries = entries_of(space, where=root)
    if entries is None:
        return None
    take_next = _assembler(space, root)
    if all(entries_of(e.space, where=f"{root}/{e.name}") is None for e in entries):
        if isinstance(space, spaces.Tuple):
            return tuple
        keys = tuple(entry.key for entry in entries)
        return lambda leaves: dict(zip(keys, leaves, strict=True))
    return lambda leaves: take_next(iter(leaves))


def _assembler(space: Space, where: str) -> Callable[[Iterator[Any]], Any]:
    entries = entries_of(space, where=where)
    if entries is None:
        return next
    parts = tuple((e.key, _assembler(e.space, f"{where}/{e.name}")) for e in entries)
    if isinstance(space, spaces.Tuple):
        return lambda leaves: tuple([take(leaves) for _, take in parts])
    return lambda leaves: {key: take(leaves) for key, take in parts}
