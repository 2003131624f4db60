"""Rows of Gymnasium envs as fresh tensors, under the keys that TorchRL knows.

Knows torch, the codec of the spaces and the engine's rows. Does not know EnvBase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from shoal.torchrl.fresh import fresh_tensordict
from shoal.torchrl.masks import rows_to_reset, rows_to_step
from shoal.torchrl.options import kwargs_per_reset
from shoal.torchrl.selection import Selection

from_numpy = torch.from_numpy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.engine import Engine
    from shoal.torchrl.infos import InfoReaders
    from shoal.torchrl.rows import ResetRequest
    from shoal.torchrl.specs import SpaceCodec

__all__ = ["Tables"]

Tensors = dict[str, Any]
Array = np.ndarray[Any, Any]


class Tables:
    """Tensor views of the rows of Gymnasium envs, made once, and the copies taken from them.

    See `Rows` for what its members do.

    Attributes:
        tail: the shape of one env's reward and flags: the trailing dimension that TorchRL
            mostly gives them.
    """

    def __init__(
        self,
        engine: Engine,
        codec: SpaceCodec,
        infos: InfoReaders,
        env_ids: Sequence[int] | None = None,
        *,
        tail: tuple[int, ...] = (1,),
    ) -> None:
        rows = engine.rows
        self.engine = engine
        self.tail = tail
        self.steps_in_one = env_ids is None and not infos.needs_dicts
        self._readers = infos
        self._gather = engine.gatherer
        self._codec = codec
        self._choose(Selection(engine.num_envs, env_ids))
        # Small copies are made by numpy, which takes a third of the time that torch takes.
        self._reward = rows.reward.reshape(-1, *tail)
        self._terminated = rows.terminated.reshape(-1, *tail)
        self._truncated = rows.truncated.reshape(-1, *tail)
        self._leaves = {
            path: (array, rows.reset_observation[path]) for path, array in rows.observation.items()
        }
        self._infos = {path: (array, rows.reset_info[path]) for path, array in rows.info.items()}
        # The common case: a few tensors, each under a name of its own.
        self._flat: list[tuple[str, Array, Array]] | None = None
        if (
            codec.observation_is_identity
            and not codec.object_observations
            and not infos.needs_dicts
            and all(isinstance(key, str) for key, _ in codec.identity_observations)
            and all(len(path) == 1 for path in self._infos)
        ):
            self._flat = [
                (str(key), *self._leaves[path]) for key, path in codec.identity_observations
            ]
            self._flat += [(path[0], *pair) for path, pair in self._infos.items()]
        self.plain = self._flat if env_ids is None else None

    def _choose(self, chosen: Selection) -> None:
        self._chosen = chosen
        self._num_envs = chosen.count
        self._size = torch.Size([chosen.count])

    @property
    def fresh_rows(self) -> Array | None:
        """Bool ``[N]``: whose present observation is that of a reset; ``None`` for nobody."""
        return self._gather.is_fresh if self._gather.any_fresh else None

    def select(self, env_ids: Sequence[int], reset_keys: Sequence[Any]) -> Tables:
        """Returns the rows of some envs, in this order."""
        return type(self)(self.engine, self._codec, self._readers, env_ids, tail=self.tail)

    def some(self, env_ids: Array) -> Tables:
        """Returns the rows of some envs, for one call."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._choose(Selection(self.engine.num_envs, env_ids))
        return twin

    # --- calls ---------------------------------------------------------------------

    def encode(self, tensordict: TensorDictBase) -> Any:
        """Returns the actions of all envs."""
        codec, actions = self._codec, {}
        is_plain = type(tensordict) is TensorDict
        for key in codec.action_keys:
            if is_plain and type(key) is str:
                value = tensordict._tensordict.get(key)  # `get` takes as long as a cheap env
            else:
                value = tensordict.get(key, None)
            if value is not None:
                actions[key] = value.tolist() if key in codec.object_actions else value
        return codec.encode_action(actions, self._num_envs)

    def step(
        self,
        tensordict: TensorDictBase,
        *,
        autoreset: bool,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor | None:
        """Steps the envs, or those in the mask."""
        actions = self.encode(tensordict)
        ids = rows_to_step(tensordict, self._num_envs)
        self.engine.step_rows(
            self._chosen.ordered(actions, ids),
            self._chosen.env_ids(ids),
            autoreset=autoreset,
            meanwhile=meanwhile,
        )
        if ids is None:
            return None
        moved = torch.zeros(self._num_envs, dtype=torch.bool)
        moved[from_numpy(ids)] = True
        return moved

    def reset(self, tensordict: TensorDictBase | None, kwargs: dict[str, Any]) -> None:
        """Resets the envs, or those in the mask."""
        request = self.reset_request(tensordict, kwargs)
        if request is not None:
            self.engine.reset_rows(request[0], kwargs=request[1])

    def reset_request(
        self, tensordict: TensorDictBase | None, kwargs: dict[str, Any]
    ) -> ResetRequest | None:
        """Returns what a reset asks of the engine; ``None`` for nothing."""
        ids = rows_to_reset(tensordict, self._num_envs)
        per_env = kwargs_per_reset(kwargs, self._num_envs)
        if ids is not None and not len(ids):
            return None
        if per_env is not None:
            per_env = self._chosen.ordered_list(per_env, ids)
        return self._chosen.env_ids(ids), per_env

    # --- what a step returned ------------------------------------------------------

    def stepped(self, unwanted: tuple[Any, ...] = ()) -> TensorDictBase:
        """Returns ``next`` of the last step, terminal observations included."""
        made = fresh_tensordict(self._stepped(unwanted), self._size)
        if self._readers.needs_dicts:
            made = self._readers.read(made, self, 0)
        return made.exclude(*unwanted) if unwanted else made

    def _stepped(self, unwanted: tuple[Any, ...]) -> Tensors:
        pick = self._chosen.pick
        if self._flat is not None:
            found = self._stepped_flat(self._flat, unwanted)
        else:
            leaves = {path: from_numpy(pick(pair[0])) for path, pair in self._leaves.items()}
            found = self._decode(leaves, 0)
            for path, pair in self._infos.items():
                put(found, path, from_numpy(pick(pair[0])), self._size)
        terminated, truncated = self._flags()
        found["reward"] = from_numpy(pick(self._reward).astype(np.float32))
        found["done"] = from_numpy(terminated | truncated)
        found["terminated"] = from_numpy(terminated)
        found["truncated"] = from_numpy(truncated)
        return found

    def _stepped_flat(
        self, flat: list[tuple[str, Array, Array]], unwanted: tuple[Any, ...]
    ) -> Tensors:
        pick = self._chosen.pick
        return {key: from_numpy(pick(rows)) for key, rows, _ in flat if (key,) not in unwanted}

    def _flags(self) -> tuple[Array, Array]:
        return self._chosen.pick(self._terminated), self._chosen.pick(self._truncated)

    def present(self, *, none_at_end: bool = False) -> TensorDictBase:
        """Returns the root: what to act on now, with its done flags."""
        found = self._present(none_at_end=none_at_end)
        made = fresh_tensordict(found, self._size)
        return self._readers.read(made, self, 1) if self._readers.needs_dicts else made

    def _present(self, *, none_at_end: bool) -> Tensors:
        fresh = self._gather.is_fresh
        newer = self._chosen.newer(fresh) if self._gather.any_fresh else None
        pick = self._chosen.pick_mixed
        if self._flat is not None:
            found: Tensors = {key: pick(pair, newer) for key, *pair in self._flat}
        else:
            leaves = {path: pick(pair, newer) for path, pair in self._leaves.items()}
            found = self._decode(leaves, None)
            for path, pair in self._infos.items():
                put(found, path, pick(pair, newer), self._size)
        if not none_at_end:
            terminated, truncated = self._flags()
            old = ~self._chosen.pick(fresh).reshape(-1, *self.tail)
            if ((terminated | truncated) & old).any():
                found["done"] = from_numpy((terminated | truncated) & old)
                found["terminated"] = from_numpy(terminated & old)
                found["truncated"] = from_numpy(truncated & old)
                return found
        for name in ("done", "terminated", "truncated"):
            found[name] = from_numpy(np.zeros((self._num_envs, *self.tail), np.bool_))
        return found

    # --- other than tensors --------------------------------------------------------

    def _decode(self, leaves: dict[Any, Any], which: int | None) -> Tensors:
        """Returns an observation from its leaves; ``which`` set of rows, or the mixture."""
        for path in self._gather.observation_objects:
            rows = self._gather.rows_of(path)
            if which is None:
                values = np.where(self._gather.is_fresh, rows[1], rows[0])
            else:
                values = rows[which]
            leaves[path] = list(self._chosen.pick(values))
        found: Tensors = {}
        objects = set(self._codec.object_observations)
        for key, value in self._codec.decode_observation(leaves).items():
            stored = as_non_tensor(value) if key in objects else value
            put(found, (key,) if isinstance(key, str) else key, stored, self._size)
        return found

    def infos(self, which: int) -> list[dict[str, Any]]:
        """Returns whole info dicts: of the last steps (0) or resets (1), one per env."""
        return self._chosen.pick_list(
            self._gather.infos if which == 0 else self._gather.reset_infos
        )


def as_non_tensor(values: list[Any]) -> NonTensorStack:
    """Returns one Python object per env as TorchRL carries them."""
    return NonTensorStack(*[NonTensorData(value) for value in values])


def put(found: Tensors, path: tuple[str, ...], value: Any, size: torch.Size) -> None:
    """Puts a value at a nested place, making TensorDicts on the way."""
    *parents, last = path
    inner: Any = found
    for name in parents:
        if name not in inner:
            child = TensorDict({}, batch_size=size)
            inner[name] = child
        inner = inner[name]
    inner[last] = value
