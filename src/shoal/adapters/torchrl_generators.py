"""The random generators that a TorchRL env draws from, as far as they can be known.

Knows torch's, numpy's and Python's global generators, and TorchRL's wrappers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torchrl.envs import DMControlWrapper, GymWrapper, TransformedEnv

__all__ = ["has_known_generator", "load_generators", "save_generators", "seed_generators"]


def seed_generators(seed: int) -> None:
    """Seeds the global generators of this process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def has_known_generator(env: Any) -> bool:
    """Returns whether `save_generators` saves all that a reset of the env draws from."""
    return own_generator(env) is not None


def save_generators(env: Any) -> object:
    """Returns the states of the global generators and, if found, the env's own."""
    own = own_generator(env)
    own_state = None if own is None else state_of(own)
    return torch.get_rng_state(), np.random.get_state(), random.getstate(), own_state


def load_generators(env: Any, state: object) -> None:
    """Puts back what `save_generators` returned."""
    if not isinstance(state, tuple):
        return
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    own = own_generator(env)
    if isinstance(own, np.random.RandomState):
        own.set_state(state[3])
    elif own is not None:
        own.bit_generator.state = state[3]


def own_generator(env: Any) -> np.random.Generator | np.random.RandomState | None:
    """Returns the generator of the simulator at the bottom, if it is of a kind that is known.

    Those are Gymnasium's envs and dm_control's. Any other may have one that nobody finds.
    """
    inner = env
    while isinstance(inner, TransformedEnv):
        inner = inner.base_env
    wrapped = (
        inner.__dict__.get("_env") if isinstance(inner, GymWrapper | DMControlWrapper) else None
    )
    if wrapped is None or inner.batch_size:
        return None
    if isinstance(inner, DMControlWrapper):
        found = getattr(getattr(wrapped, "_task", None), "_random", None)
        return found if isinstance(found, np.random.RandomState) else None
    # Asked for it, a Gymnasium env makes one if it has none yet, as its reset would.
    found = getattr(getattr(wrapped, "unwrapped", wrapped), "np_random", None)
    return found if isinstance(found, np.random.Generator) else None


def state_of(generator: np.random.Generator | np.random.RandomState) -> Any:
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.bit_generator.state
