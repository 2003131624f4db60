"""What every backend does at start: agree on one spec, word a failed build."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle

from shoal.engine.core.messages import EnvFailure
from shoal.engine.spec import EnvSpec, describe_path
from shoal.errors import EnvError, SpecError, StartError

__all__ = ["agree_on_spec", "env_error", "start_error"]


def agree_on_spec(specs: Sequence[EnvSpec]) -> EnvSpec:
    """Returns the spec that all envs share.

    Raises:
        SpecError: an env's leaves differ from those of env 0.
    """
    first = specs[0]
    for env_id, spec in enumerate(specs):
        if spec is first or spec == first:
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


def env_error(failure: EnvFailure) -> EnvError:
    """Returns the error for one failed env, with the env's own exception as cause."""
    error = EnvError(
        env_id=failure.env_id,
        during=failure.during,
        cause_text=failure.text,
        worker_traceback=failure.traceback,
    )
    error.__cause__ = _load_exception(failure)
    return error


def start_error(failure: EnvFailure) -> StartError:
    """Returns the error for an env that could not be built, with its own cause."""
    error = StartError(
        f"Env {failure.env_id} could not be built: {failure.text}",
        env_id=failure.env_id,
        worker_traceback=failure.traceback,
    )
    error.__cause__ = _load_exception(failure)
    return error


def _load_exception(failure: EnvFailure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        exception = cloudpickle.loads(failure.exception)
    except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, IndexError, TypeError):
        return None  # its text and traceback are there
    return exception if isinstance(exception, BaseException) else None
