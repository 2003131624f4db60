"""`SerialEnv` and `ParallelEnv`: many envs as one TorchRL environment.

Knows EnvBase, TensorDicts and the engine's public verbs. Does not know backends.

What TorchRL calls on these classes, and when, decides their shape: a bare env gets
`step_and_maybe_reset`; below a transform only `_step` and `_reset` are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs.batched_envs import BatchedEnvBase as _TorchRLBatched
from torchrl.envs.batched_envs import ParallelEnv as _TorchRLParallel
from torchrl.envs.batched_envs import SerialEnv as _TorchRLSerial

from shoal.torchrl.base import BatchedBase
from shoal.torchrl.masks import rows_to_reset, rows_to_step
from shoal.torchrl.options import kwargs_per_reset
from shoal.torchrl.rollout import rollout_into_buffers
from shoal.torchrl.roots import carry_over, complete, repeat_idle, set_entry

if TYPE_CHECKING:
    from torchrl.data import Composite

    from shoal.engine import Engine

__all__ = ["BatchedEnv", "ParallelEnv", "SerialEnv"]

_DONE_KEYS = frozenset({"done", "terminated", "truncated"})


class BatchedEnv(BatchedBase):
    """Many Gymnasium environments as one TorchRL environment of batch size ``[N]``.

    Use `SerialEnv` or `ParallelEnv`. Nothing runs until the first `reset`, `step` or
    `set_seed`, and after `close` the next of these starts anew.

    Attributes:
        num_workers: how many envs there are (TorchRL's word for it).
        create_env_fn: one maker per env.
        create_env_kwargs: keyword arguments per env; see `update_kwargs`.
    """

    # --- step ----------------------------------------------------------------------

    def _encode(self, tensordict: TensorDictBase, engine: Engine) -> Any:
        codec, actions = self._codec, {}
        for key in codec.action_keys:
            value = tensordict.get(key, None)
            if value is not None:
                actions[key] = value.tolist() if key in codec.object_actions else value
        return codec.encode_action(actions, engine.num_envs)

    def _td(self, found: dict[str, Any]) -> TensorDict:
        made = TensorDict._new_unsafe(found, batch_size=self.batch_size)
        if self.device is not None:
            made = made.to(self.device)
        return made

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        engine, tables = self._started()
        actions = self._encode(tensordict, engine)
        ids = rows_to_step(tensordict, engine.num_envs)
        if ids is None:
            engine.step_rows(actions, autoreset=False)
            return self._infos.read(self._td(tables.stepped()), tables, 0)
        # Leaves without a fixed shape are lists, which take no array of ids.
        mine = {
            path: [rows[i] for i in ids] if isinstance(rows, list) else rows[ids]
            for path, rows in actions.items()
        }
        engine.step_rows(mine, ids, autoreset=False)
        stepped = self._infos.read(self._td(tables.stepped()), tables, 0)
        moved = torch.zeros(engine.num_envs, dtype=torch.bool, device=self.device)
        moved[torch.from_numpy(ids)] = True
        repeat_idle(stepped, tensordict, moved)
        return stepped

    @classmethod
    def _complete_done(cls, done_spec: Composite, data: TensorDictBase) -> TensorDictBase:
        # Called after every step below a transform. Ours are complete from the start.
        if _DONE_KEYS.issubset(data.keys()):
            return data
        return super()._complete_done(done_spec, data)

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Steps all envs and resets those whose episode ended, in one round trip.

        Args:
            tensordict: batch size ``[N]``, holding the action.

        Returns:
            The same tensordict with ``next`` in it, terminal observations included, and a
            new root to act on. All tensors are new memory.
        """
        special = (
            "_compiled_step_and_maybe_reset" in self.__dict__
            or self._post_step_mdp_hooks is not None
            or self._infos.needs_dicts
            or type(tensordict) is not TensorDict
            or self.device != tensordict.device
            or tensordict._has_names()
        )
        if special or not tensordict._tensordict.keys().isdisjoint(("_step", "next")):
            return super().step_and_maybe_reset(tensordict)  # type: ignore[no-any-return]
        self._assert_tensordict_shape(tensordict)
        engine, tables = self._started()
        engine.step_rows(self._encode(tensordict, engine), autoreset=True)
        next_root = self._td(tables.present(none_at_end=True))
        set_entry(tensordict, "next", self._td(tables.stepped()))
        carry_over(tensordict, next_root, tables.fresh_rows)
        return tensordict, next_root

    # --- reset ---------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        engine, tables = self._started()
        ids = rows_to_reset(tensordict, engine.num_envs)
        per_env = kwargs_per_reset(kwargs, engine.num_envs)
        if ids is None or len(ids):
            if per_env is not None and ids is not None:
                per_env = [per_env[i] for i in ids]
            engine.reset_rows(ids, kwargs=per_env)
        return self._infos.read(self._td(tables.present()), tables, 1)

    def _reset_proc_data(
        self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        if tensordict is not None and tensordict.get("_reset", None) is not None:
            complete(tensordict, tensordict_reset)
        return super()._reset_proc_data(tensordict, tensordict_reset)

    # --- rollout -------------------------------------------------------------------

    def _can_fill_buffers(self) -> bool:
        """Whether every leaf is a tensor of this process's own, under a plain name."""
        return (
            self.device is None
            and self._post_step_mdp_hooks is None
            and "_compiled_step_and_maybe_reset" not in self.__dict__
            and not self._infos.needs_dicts
            and type(self)._step is BatchedEnv._step
            and self._started()[1].plain is not None
        )

    def rollout(self, max_steps: int, policy: Any = None, callback: Any = None, **kw: Any) -> Any:
        """Rolls out ``max_steps`` steps; arguments and results as in ``EnvBase.rollout``.

        Without breaks, callbacks and the like, each step is written straight into
        buffers of ``[N, T]``.
        """
        result = rollout_into_buffers(self, max_steps, policy, callback, kw)
        if result is not None:
            return result
        return super().rollout(max_steps, policy, callback, **kw)


class SerialEnv(BatchedEnv):
    """Many envs in this process, one after the other; the reference of `ParallelEnv`.

    Example:
        >>> env = SerialEnv(3, "CartPole-v1")
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([3, 5])
        >>> env.close()
    """

    _backend = "serial"

    def __init__(self, num_workers: int, create_env_fn: Any, **options: Any) -> None:
        """Takes what `BatchedEnv` takes, except what concerns processes.

        Raises:
            TypeError: ``mp_start_method`` was given.
        """
        if options.get("mp_start_method") is not None:
            raise TypeError("SerialEnv has no processes: mp_start_method does not apply")
        super().__init__(num_workers, create_env_fn, **options)


class ParallelEnv(BatchedEnv):
    """Many envs in worker processes, several in each, over shared memory.

    Example:
        >>> env = ParallelEnv(64, "CartPole-v1")
        >>> data = env.rollout(100, break_when_any_done=False)
        >>> env.close()
    """

    _backend = "processes"
    _serial_twin = SerialEnv


# Collectors ask by these classes whether an env is a batched one.
_TorchRLBatched.register(BatchedEnv)
_TorchRLSerial.register(SerialEnv)
_TorchRLParallel.register(ParallelEnv)
