"""One spec for envs that differ, and the way from each env's own leaves to it.

Pure. A leaf that all envs have, with one shape and dtype, stays an array; any other
becomes an object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.engine.spec import (
    ABSENT,
    MIXED,
    ArraySpec,
    EnvSpec,
    LeafPath,
    LeafSpec,
    ObjectSpec,
    describe_path,
)
from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["agree_on_spec", "builder_from", "flattener_to", "merge_specs"]


def agree_on_spec(specs: Sequence[EnvSpec], *, mixed: bool = False) -> EnvSpec:
    """Returns the spec that all envs share, or, if they may differ, one for all of them.

    Raises:
        SpecError: an env's leaves differ from those of env 0, and may not.
    """
    first = specs[0]
    for env_id, spec in enumerate(specs):
        if spec is first:
            continue
        if mixed:
            if spec != first:
                return merge_specs(specs)
            continue
        for root in ("observation", "action", "info"):
            _compare(root, getattr(first, root), getattr(spec, root), env_id)
    return first


def _compare(root: str, first: Mapping[Any, Any], other: Mapping[Any, Any], env_id: int) -> None:
    hint = "All envs of one engine share their leaves, shapes and dtypes."
    for path in {**first, **other}:
        if first.get(path) != other.get(path):
            raise SpecError(
                env_id=env_id,
                key=describe_path(root, path),
                expected=f"{first.get(path, 'absent')} as in env 0",
                actual=str(other.get(path, "absent")),
                hint=hint,
            )
    if list(first) != list(other):
        raise SpecError(
            env_id=env_id,
            key=root,
            expected=f"leaves in the order of env 0, {list(first)}",
            actual=str(list(other)),
            hint=hint,
        )


def merge_specs(specs: Sequence[EnvSpec]) -> EnvSpec:
    """Returns a spec with the leaves of all envs; see the module.

    Info entries that only some envs ask for are zeros for the others.
    """
    infos: dict[LeafPath, ArraySpec] = {}
    for spec in specs:
        for path, leaf in spec.info.items():
            if infos.setdefault(path, leaf) != leaf:
                raise SpecError(
                    key=describe_path("info", path), expected=str(infos[path]), actual=str(leaf)
                )
    return EnvSpec(
        observation=_merged([spec.observation for spec in specs]),
        action=_merged([spec.action for spec in specs]),
        info=infos,
        undoes_resets=all(spec.undoes_resets for spec in specs),
    )


def _merged(leaves: Sequence[Mapping[LeafPath, LeafSpec]]) -> dict[LeafPath, LeafSpec]:
    paths: dict[LeafPath, None] = {}
    for mine in leaves:
        paths.update(dict.fromkeys(mine))
    merged: dict[LeafPath, LeafSpec] = {}
    for path in paths:
        found = [mine[path] for mine in leaves if path in mine]
        if len(found) == len(leaves) and all(leaf == found[0] for leaf in found):
            merged[path] = found[0]
            continue
        optional = all(isinstance(leaf, ObjectSpec) and leaf.is_optional for leaf in found)
        merged[path] = ObjectSpec(MIXED, is_optional=optional)
    return merged


def flattener_to(
    spec: EnvSpec, own: EnvSpec, flatten: Callable[[Any], Sequence[Any]] | None
) -> Callable[[Any], Sequence[Any]] | None:
    """Returns a flattener in the order of ``spec``, for an env with leaves of its own."""
    if list(own.observation) == list(spec.observation):
        return flatten
    where = {path: k for k, path in enumerate(own.observation)}
    order = [where.get(path) for path in spec.observation]

    def flatten_all(observation: Any) -> list[Any]:
        values = (observation,) if flatten is None else flatten(observation)
        return [ABSENT if k is None else values[k] for k in order]

    return flatten_all


def builder_from(
    spec: EnvSpec, own: EnvSpec, build: Callable[[Sequence[Any]], Any] | None
) -> Callable[[Sequence[Any]], Any] | None:
    """Returns a builder that takes the leaves of ``spec``, of which the env has some."""
    if list(own.action) == list(spec.action):
        return build
    where = {path: k for k, path in enumerate(spec.action)}
    order = [where[path] for path in own.action]

    def build_own(leaves: Sequence[Any]) -> Any:
        mine = [leaves[k] for k in order]
        return mine[0] if build is None else build(mine)

    return build_own
