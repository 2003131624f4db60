"""The seed of each env, from the seed of the first.

Arithmetic over integers. TorchRL seeds env ``i + 1`` with what seeding env ``i``
returned; the rule is the one of ``torchrl._utils.seed_generator`` (0.14): eight
bytes from numpy's default generator under the present seed, read big-endian,
modulo 2**32 - 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shoal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["next_seed", "seed_chain", "spread_seed"]


def next_seed(seed: int) -> int:
    """Returns the seed that follows ``seed`` in the chain."""
    drawn = np.random.default_rng(seed).bytes(8)
    return int.from_bytes(drawn, "big") % (2**32 - 1)


def seed_chain(seed: int, num_envs: int, *, static: bool = False) -> tuple[list[int], int]:
    """Returns one seed per env and the seed to go on with.

    Args:
        seed: the seed of env 0, >= 0.
        num_envs: how many envs to seed.
        static: give every env the same seed, which is also the one to go on with.

    Raises:
        UsageError: the seed is not an integer >= 0.
    """
    given: object = seed
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
        raise UsageError(f"a seed is an integer >= 0, not {seed!r}")
    seed = int(seed)
    if static:
        return [seed] * num_envs, seed
    seeds = []
    for _ in range(num_envs):
        seeds.append(seed)
        seed = next_seed(seed)
    return seeds, seed


def spread_seed(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Returns one seed per env as Gymnasium does: ``seed + i``, or the given list.

    Raises:
        UsageError: a list of the wrong length.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(num_envs)]
    seeds = list(seed)
    if len(seeds) != num_envs:
        raise UsageError(f"expected {num_envs} seeds, one per env, but got {len(seeds)}")
    return seeds
