"""Calls of a TorchRL env's own methods, and what may come back from one.

Knows EnvBase. Does not know the engine.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torchrl.envs.common import EnvMetaData

from shoal.adapters.calls import SPECIAL, answer, call_or_read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["call_env", "close_env", "snapshot"]


def close_env(env: Any) -> None:
    """Closes an env of TorchRL, whatever it says of itself.

    Most envs never note that they are open, so that cannot be asked; and a batched one
    refuses to be closed twice.
    """
    parameters = inspect.signature(env.close).parameters
    if "raise_if_closed" in parameters:
        env.close(raise_if_closed=False)
    else:
        env.close()


def call_env(env: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a method of an env, or returns an attribute; dots lead on. See also `calls`.

    What cannot leave the process is left out: the env itself, which ``to`` returns, and
    the locks in a state dict, which is a copy.

    Raises:
        AttributeError: it has no such attribute.
        TypeError: it is not callable, but there are arguments.
    """
    if name == "?describe":
        return EnvMetaData.metadata_from_env(env)

    def find(path: str) -> Any:
        found: Any = env
        for part in path.split("."):
            found = getattr(found, part)
        return found

    if name in SPECIAL:
        return answer(env, find, name, args, kwargs)
    found = call_or_read(find(name), f"{name} of {type(env).__name__}", args, kwargs)
    last = name.rpartition(".")[2]
    if last == "state_dict":
        return snapshot(found)
    return None if last == "to" else found


def snapshot(state: Any) -> Any:
    """Returns a copy of a state dict, with ``None`` for locks, which belong to one process."""
    if isinstance(state, dict):
        return type(state)((key, snapshot(value)) for key, value in state.items())
    if isinstance(state, torch.Tensor | TensorDictBase):
        return state.detach().clone()
    is_lock = hasattr(state, "acquire") and hasattr(state, "release")
    return None if is_lock else state
