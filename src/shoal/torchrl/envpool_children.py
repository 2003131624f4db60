"""The envs of an EnvPool pool before they run, and their rows as TensorDicts.

Knows how a pool describes its envs, specs and tables. Does not know EnvBase or how a step
is done.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded

from shoal.adapters.envpool import PLAYER_REWARD
from shoal.torchrl.infos import InfoReaders
from shoal.torchrl.specs import SpaceCodec
from shoal.torchrl.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDictBase

    from shoal.adapters.envpool import EnvPoolDescription, EnvPoolFactory
    from shoal.engine import Engine
    from shoal.torchrl.children import Children
    from shoal.torchrl.options import BatchOptions
    from shoal.torchrl.rows import Rows

__all__ = ["EnvPoolChildren"]

# TorchRL gives rewards and flags of EnvPool's envs no trailing dimension.
_TAIL: tuple[int, ...] = ()
_UINT64 = np.dtype(np.uint64)


class EnvPoolChildren:
    """Envs of one pool; see `Children`."""

    batch_size = torch.Size([])
    supports_set_state = False
    is_dynamic = False
    are_stackable = True
    seed_themselves = False

    def __init__(self, description: EnvPoolDescription, options: BatchOptions) -> None:
        self.options = options
        self.env_text = description.text
        self.infos = InfoReaders()
        self._num_players = description.num_players
        self._codec = SpaceCodec(
            description.observation_space,
            description.action_space,
            categorical_action_encoding=options.categorical_action_encoding,
            bare_name="observation",
        )

    def factories(
        self, makers: list[Any], kwargs: list[dict[str, Any]], backend: str = ""
    ) -> list[EnvPoolFactory]:
        """Returns the pool's factory, once per env: the makers are that already."""
        return makers

    def engine_options(self, backend: str) -> dict[str, Any]:
        """Returns options of the engine that this kind of env needs."""
        return {}

    def select(self, env_ids: list[int]) -> Children:
        """Returns those of some envs, which are all alike."""
        return self

    def common_device(self) -> torch.device | None:
        """Returns ``None``: EnvPool knows no devices."""
        return None

    def specs(self, num_envs: int) -> dict[str, TensorSpec]:
        """Returns the specs of the batch."""
        players = () if self._num_players == 1 else (self._num_players,)
        flag = Categorical(2, dtype=torch.bool, shape=(num_envs, *_TAIL))
        done = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        observation, action = self._codec.observation_spec, self._codec.action_spec
        return {
            "observation_spec": observation.expand(num_envs, *observation.shape),
            "action_spec": action.expand(num_envs, *action.shape),
            "reward_spec": Unbounded(shape=(num_envs, *(players or _TAIL))),
            "done_spec": Composite(done, shape=(num_envs,)),
        }

    def open(self, engine: Engine, reset_keys: Sequence[Any]) -> Rows:
        """Returns the rows of a running engine."""
        tables = EnvPoolTables if self._num_players == 1 else PlayerTables
        return tables(engine, self._codec, self.infos, tail=_TAIL)


class EnvPoolTables(Tables):
    """Rows of EnvPool's envs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        spec = self._codec.action_spec
        self._choices = spec if isinstance(spec, Categorical) else None
        self._num_choices = 0 if self._choices is None else int(self._choices.space.n)
        # As it is, that is: neither one-hot nor counted from another number.
        self._one_choice = (
            self._choices is not None
            and spec.shape == ()
            and self._codec.action_fields[0].codec.is_identity
        )

    def encode(self, tensordict: TensorDictBase) -> Any:
        """Returns the actions of all envs, which may have one dimension too many."""
        if self._choices is None:
            return super().encode(tensordict)
        is_plain = type(tensordict) is TensorDict
        action = (
            tensordict._tensordict.get("action") if is_plain else tensordict.get("action", None)
        )
        if not isinstance(action, torch.Tensor):
            return super().encode(tensordict)
        if self._one_choice and action.dtype is torch.int64 and action.shape == self._size:
            # Nearly always: no more than a look at the bounds.
            numbers = action.numpy(force=True)
            # A negative number is a huge one without its sign: one look for both ends.
            if np.maximum.reduce(numbers.view(_UINT64)) < self._num_choices:
                return {(): numbers}
        if action.shape[:-1] == (self._num_envs, *self._choices.shape) and action.shape[-1]:
            action = _first_choice(action, self._choices)
            tensordict = tensordict.copy().set("action", action)
        return super().encode(tensordict)

    def _stepped_flat(
        self, flat: list[tuple[str, Any, Any]], unwanted: tuple[Any, ...]
    ) -> dict[str, Any]:
        own = self.engine.take_observation() if self._chosen.is_whole else None
        if own is None:
            return super()._stepped_flat(flat, unwanted)
        return {
            str(key): torch.from_numpy(own[path])
            for key, path in self._codec.identity_observations
            if (key,) not in unwanted
        }


class PlayerTables(EnvPoolTables):
    """Rows of envs that several players share: each has a reward of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._player_reward = self._infos.pop(PLAYER_REWARD)[0]
        if self._flat is not None:
            self._flat = self._flat[: len(self._leaves)]
        # The buffers of a rollout have room for one reward per env.
        self.plain = None

    def _stepped(self, unwanted: tuple[Any, ...]) -> dict[str, Any]:
        found = super()._stepped(unwanted)
        found["reward"] = torch.from_numpy(self._chosen.pick(self._player_reward))
        return found


def _first_choice(action: torch.Tensor, spec: Categorical) -> torch.Tensor:
    """Returns one choice per env from rows of numbers, as TorchRL's wrapper does.

    EnvPool gets these rows there, and takes the first number of each without its fraction.
    """
    first = action[..., 0]
    if action.shape[-1] > 1 or action.is_floating_point():
        warnings.warn(
            f"the actions of an env with {spec.space.n} choices are {action.dtype} of shape"
            f" {tuple(action.shape)}; the first number of each row is taken, cut to a choice. Give"
            f" {spec.dtype} of shape {tuple(action.shape[:-1])}",
            stacklevel=2,
        )
        first = first.to(spec.dtype).clamp(0, spec.space.n - 1)
    return first
