"""What the envs of an EnvPool pool are: spaces, players, limits of actions.

Knows EnvPool's specs and Gymnasium's spaces. Imports neither EnvPool nor torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from shoal.adapters.spaces import leaves_of
from shoal.engine.spec import ArraySpec, EnvSpec, LeafPath

__all__ = ["PLAYERS_ENV_ID", "PLAYER_REWARD", "EnvPoolDescription", "limits_of"]

Array = np.ndarray[Any, Any]
Space = spaces.Space[Any]

PLAYER_REWARD: LeafPath = ("player_reward",)
"""Where an env of several players has the reward of each; its own reward is their sum."""

PLAYERS_ENV_ID = "players.env_id"
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class EnvPoolDescription:
    """What one env of a pool is.

    Attributes:
        observation_space: of all players together, where there are several.
        action_space: likewise; in games by turns, of the one whose turn it is.
        num_players: how many players share an env.
        acts_by_player: each player has an action of its own.
        num_envs: how many envs the pool has.
        batch_size: how many results one receive waits for.
        num_threads: how many threads step the envs.
        text: the name of the task, or of the pool's class.
    """

    observation_space: Space
    action_space: Space
    num_players: int
    acts_by_player: bool
    num_envs: int
    batch_size: int
    num_threads: int
    text: str

    @classmethod
    def of(cls, spec: Any, text: str) -> EnvPoolDescription:
        """Returns the description of a pool from EnvPool's own spec."""
        config = dict(zip(spec._config_keys, spec._config_values, strict=True))
        num_players = int(config.get("max_num_players", 1))
        acts_by_player = any(
            key.startswith("players.") and key != PLAYERS_ENV_ID for key in spec._action_keys
        )
        # Older releases have the first name only.
        native = "gymnasium_{}" if hasattr(spec, "gymnasium_action_space") else "{}"
        observation = _without_sentinels(getattr(spec, native.format("observation_space")))
        action = _without_sentinels(getattr(spec, native.format("action_space")))
        if num_players > 1:
            observation = batch_space(observation, num_players)
            if acts_by_player:
                action = batch_space(action, num_players)
        num_envs = int(config["num_envs"])
        batch_size = int(config["batch_size"]) or num_envs
        return cls(
            observation_space=observation,
            action_space=action,
            num_players=num_players,
            acts_by_player=acts_by_player,
            num_envs=num_envs,
            batch_size=batch_size,
            # EnvPool's own rule for those who do not say.
            num_threads=int(config["num_threads"]) or min(batch_size, os.cpu_count() or 1),
            text=text,
        )

    @property
    def waits_for_all(self) -> bool:
        """See `NativePool`. With several players EnvPool has only its asynchronous mode."""
        return self.batch_size == self.num_envs and self.num_players == 1

    @property
    def env_spec(self) -> EnvSpec:
        """The leaves of one env."""
        info: dict[LeafPath, ArraySpec] = {}
        if self.num_players > 1:
            info[PLAYER_REWARD] = ArraySpec((self.num_players,), np.dtype(np.float32))
        return EnvSpec(
            observation=leaves_of(self.observation_space, root="observation"),
            action=leaves_of(self.action_space, root="action"),
            info=info,
            undoes_resets=False,  # nobody can put a pool's dice back
        )


def _without_sentinels(space: Space) -> Space:
    """Returns a space with infinite bounds where EnvPool says that it knows none.

    It then has the smallest and the largest positive number of the type, which hardly any
    observation lies between.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _without_sentinels(s) for key, s in space.spaces.items()})
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        return space
    limits = np.finfo(space.dtype)
    unknown = (space.low == limits.tiny) & (space.high == limits.max)
    if not unknown.any():
        return space
    low, high = np.where(unknown, -np.inf, space.low), np.where(unknown, np.inf, space.high)
    dtype: Any = space.dtype
    return spaces.Box(low.astype(dtype), high.astype(dtype), space.shape, dtype)


class Limits:
    """The least and the largest whole numbers of one leaf of an action."""

    def __init__(self, path: LeafPath, low: Any, high: Any) -> None:
        self.path = path
        self.low, self.high = np.asarray(low), np.asarray(high)
        is_count = not self.low.any() and (self.high == self.high.flat[0]).all()
        self._last = int(self.high.flat[0]) if is_count else None

    def admit(self, rows: Array) -> bool:
        """Returns whether all values are within."""
        if self._last is not None and rows.dtype.kind == "i":
            # A negative number is a huge one without its sign: one look for both ends.
            unsigned = rows.view(_UNSIGNED[rows.itemsize])
            return bool(np.maximum.reduce(unsigned, axis=None) <= self._last)
        return bool(((rows >= self.low) & (rows <= self.high)).all())


def limits_of(space: Space, path: LeafPath = ()) -> list[Limits]:
    """Returns what the leaves of whole numbers may be, in an action space."""
    match space:
        case spaces.Dict():
            children = [limits_of(child, (*path, key)) for key, child in space.spaces.items()]
            return [found for child in children for found in child]
        case spaces.Discrete():
            return [Limits(path, space.start, space.start + space.n - 1)]
        case spaces.MultiDiscrete():
            return [Limits(path, space.start, space.start + space.nvec - 1)]
        case spaces.Box() if space.dtype.kind in "iu":
            return [Limits(path, space.low, space.high)]
        case _:
            return []
