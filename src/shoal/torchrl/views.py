"""Some of a batched env's children as a batched env of their own.

Knows how indices name children, and what may be written into one. Does not know rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrl.envs import EnvBase

__all__ = ["indices_of", "snapshots_of"]


def indices_of(item: Any, num_workers: int) -> list[int]:
    """Returns the children that an index names.

    Args:
        item: an integer, a slice, or a sequence or tensor of integers.
        num_workers: how many children there are.

    Raises:
        NotImplementedError: a boolean mask.
        IndexError: nobody is named, somebody twice, or a number is out of range.
    """
    every = range(num_workers)
    if isinstance(item, slice):
        chosen = list(every[item])
    else:
        index = torch.as_tensor(item)
        if index.dtype == torch.bool:
            raise NotImplementedError("Boolean masks do not index a batched env; name the indices")
        if index.is_floating_point() or index.ndim > 1:
            raise IndexError(
                "a batched env is indexed by an integer, a slice or one row of integers,"
                f" not by {index.dtype} of shape {tuple(index.shape)}"
            )
        chosen = [_wrapped(int(number), num_workers) for number in index.reshape(-1)]
    if not chosen:
        raise IndexError("an empty index names no env")
    if len(set(chosen)) < len(chosen):
        raise IndexError(f"the index {chosen} names an env twice")
    return chosen


def _wrapped(number: int, num_workers: int) -> int:
    if not -num_workers <= number < num_workers:
        raise IndexError(f"index {number} is out of range for {num_workers} envs")
    return number % num_workers


def snapshots_of(source: Any, expected: int, is_batched: type) -> list[Any]:
    """Returns one env per child that shall be put into the state of it.

    Args:
        source: an env, a sequence of envs, or a serial env for its children.
        expected: how many there have to be.
        is_batched: the class of batched envs.

    Raises:
        NotImplementedError: children of a parallel env, which live elsewhere.
        TypeError: it is something else.
        ValueError: there are more or fewer.
    """
    if isinstance(source, is_batched):
        if source._backend != "serial":  # type: ignore[attr-defined]
            raise NotImplementedError(
                "the envs of a ParallelEnv cannot be copied from their workers; write an"
                " EnvBase or a SerialEnv into the batch"
            )
        sources: list[Any] = source.map(_itself)  # type: ignore[attr-defined]
    elif isinstance(source, EnvBase):
        sources = [source]
    elif isinstance(source, Sequence):
        sources = list(source)
    else:
        raise TypeError(
            f"an env or a sequence of envs can be written into a batch, not {type(source).__name__}"
        )
    if not all(isinstance(env, EnvBase) for env in sources):
        raise TypeError("all that is written into a batch of envs has to be an EnvBase")
    if len(sources) != expected:
        raise ValueError(f"the index names {expected} envs, but {len(sources)} were given")
    return sources


def _itself(env: Any) -> Any:
    return env
