"""`SerialEnv` and `ParallelEnv`: many envs as one TorchRL environment.

Knows EnvBase, TensorDicts and the engine's public verbs. Does not know backends.

What TorchRL calls on these classes, and when, decides their shape: a bare env gets
`step_and_maybe_reset`; below a transform only `_step` and `_reset` are called.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torchrl.envs.batched_envs import BatchedEnvBase as _TorchRLBatched
from torchrl.envs.batched_envs import ParallelEnv as _TorchRLParallel
from torchrl.envs.batched_envs import SerialEnv as _TorchRLSerial
from torchrl.envs.utils import _update_during_reset

from shoal.torchrl.base import BatchedBase
from shoal.torchrl.devices import to_device
from shoal.torchrl.rollout import rollout_into_buffers
from shoal.torchrl.roots import carry_over, complete, repeat_idle, set_entry
from shoal.torchrl.views import indices_of, snapshots_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from torchrl.data import Composite

__all__ = ["BatchedEnv", "ParallelEnv", "SerialEnv"]

_DONE_KEYS = frozenset({"done", "terminated", "truncated"})


class BatchedEnv(BatchedBase):
    """Many environments as one TorchRL environment of batch size ``[N, *batch of one]``.

    Use `SerialEnv` or `ParallelEnv`. Nothing runs until the first `reset`, `step` or
    `set_seed`, and after `close` the next of these starts anew.

    Attributes:
        num_workers: how many envs there are (TorchRL's word for it).
        create_env_fn: one maker per env.
        create_env_kwargs: keyword arguments per env; see `update_kwargs`.
    """

    # --- step ----------------------------------------------------------------------

    def _td(self, made: TensorDictBase) -> TensorDictBase:
        """Returns results where the caller wants them."""
        return made if self.device is None else to_device(made, self.device, self.non_blocking)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = self._started()
        moved = rows.step(tensordict, autoreset=False)
        stepped = self._td(rows.stepped())
        if moved is not None:
            stepped = repeat_idle(stepped, tensordict, moved.to(self.device))
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
        rows = self._started()
        special = (
            not rows.steps_in_one
            or "_compiled_step_and_maybe_reset" in self.__dict__
            or self._post_step_mdp_hooks is not None
            or type(tensordict) is not TensorDict
            or self.device != tensordict.device
            or tensordict._has_names()
        )
        if special or not tensordict._tensordict.keys().isdisjoint(("_step", "next")):
            return super().step_and_maybe_reset(tensordict)  # type: ignore[no-any-return]
        self._assert_tensordict_shape(tensordict)
        unwanted = self._unwanted_keys()
        early: list[TensorDictBase] = []
        rows.step(
            tensordict, autoreset=True, meanwhile=lambda: early.append(rows.stepped(unwanted))
        )
        next_root = self._td(rows.present(none_at_end=True))
        following = early[0] if early else rows.stepped(unwanted)
        set_entry(tensordict, "next", self._td(following))
        carry_over(tensordict, next_root, rows.fresh_rows)
        return tensordict, next_root

    def _unwanted_keys(self) -> tuple[Any, ...]:
        """Returns the keys in ``next`` that the collector of this env drops at once."""
        collector = self._collector and self._collector()
        if collector is None:
            return ()
        keys = getattr(collector, "_compact_next_keys", ())
        return tuple(key[1:] for key in keys if isinstance(key, tuple) and key[:1] == ("next",))

    # --- reset ---------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        rows = self._started()
        rows.reset(tensordict, kwargs)
        return self._td(rows.present())

    def _reset_proc_data(
        self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        # Each child has checked what it returned by rules of its own.
        if tensordict is None:
            return tensordict_reset
        if isinstance(tensordict_reset, LazyStackedTensorDict) and not isinstance(
            tensordict, LazyStackedTensorDict
        ):
            tensordict = LazyStackedTensorDict(*tensordict.unbind(0), stack_dim=0)
        if any(tensordict.get(key, None) is not None for key in self.reset_keys):
            complete(tensordict, tensordict_reset)
        return _update_during_reset(tensordict_reset, tensordict, self.reset_keys)

    # --- state ---------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """Returns the state of every child, as ``worker0``, ``worker1`` and so on.

        Starts the envs if need be. Locks are replaced by ``None``.
        """
        states = self._call("state_dict", *args, **kwargs)
        return OrderedDict((f"worker{i}", state) for i, state in enumerate(states))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Loads the state of every child, and waits until all have it.

        Args:
            state_dict: as `state_dict` returns it, or the state of a single env for all.
            *args: handed to the children's own method.
            **kwargs: handed to the children's own method.

        Raises:
            KeyError: there is none for one of the children.
        """
        if "worker0" not in state_dict:
            states = [state_dict] * self.num_workers
        else:
            states = [state_dict[f"worker{i}"] for i in range(self.num_workers)]
        self._call_each("load_state_dict", states, *args, **kwargs)

    # --- some of the children --------------------------------------------------------

    def __getitem__(self, item: Any) -> Self:
        """Returns a live view: a batched env of some of the children, which share their state.

        Args:
            item: an integer, a slice, or a sequence of integers. The view of one child has a
                batch of one, too.

        Raises:
            NotImplementedError: a boolean mask.
            IndexError: nobody is named, somebody twice, or a number is out of range.
        """
        self._running()
        chosen = indices_of(item, self.num_workers)
        mine = range(self.num_workers) if self._env_ids is None else self._env_ids
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__)
        view.__dict__.update(
            _owner=self.__dict__["_owner"] or self,
            _has_left=False,
            _engine=None,
            _rows=None,
            _cache={},
            _children=self._children.select(chosen),
            _env_ids=[mine[k] for k in chosen],
            num_workers=len(chosen),
            create_env_fn=[self.create_env_fn[k] for k in chosen],
            create_env_kwargs=[self.create_env_kwargs[k] for k in chosen],
            _seeds=None if self._seeds is None else [self._seeds[k] for k in chosen],
            _batch_size=torch.Size((len(chosen), *self.batch_size[1:])),
        )
        for name in ("_input_spec", "_output_spec"):
            view.__dict__[name] = self.__dict__[name].clone()[chosen].unlock_(recurse=True)
        return view

    def __setitem__(self, item: Any, source: Any) -> None:
        """Puts children into the state of other envs, where they support it.

        Args:
            item: as for `__getitem__`.
            source: an env, a sequence of envs, or a `SerialEnv`, for its children.

        Raises:
            NotImplementedError: the children do not support it, or those of ``source`` are in
                other processes.
            ValueError: more or fewer envs than the index names.
            TypeError: something that is no env.
        """
        self._running()
        chosen = indices_of(item, self.num_workers)
        sources = snapshots_of(source, len(chosen), BatchedEnv)
        mine = range(self.num_workers) if self._env_ids is None else self._env_ids
        for k, env in zip(chosen, sources, strict=True):
            self._call("!write", env, env_ids=[mine[k]])

    # --- rollout -------------------------------------------------------------------

    def _can_fill_buffers(self) -> bool:
        """Whether every leaf is a tensor of this process's own, under a plain name."""
        return (
            self.device is None
            and self._post_step_mdp_hooks is None
            and "_compiled_step_and_maybe_reset" not in self.__dict__
            and type(self)._step is BatchedEnv._step
            and self._started().plain is not None
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
    _defers_values = False

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
    _defers_values = True
    _serial_twin = SerialEnv

    @classmethod
    def make_parallel(cls, *args: Any, num_envs: int = 1, **options: Any) -> Self:
        """Returns a parallel env; ``make_parallel(make_env, num_envs=4)`` as in ``EnvBase``.

        Args:
            *args: the constructor's arguments, or without the first of them.
            num_envs: how many, if the first argument does not say it.
            **options: of the constructor.
        """
        if args and isinstance(args[0], int):
            return cls(*args, **options)
        return cls(num_envs, *args, **options)


# Collectors ask by these classes whether an env is a batched one.
_TorchRLBatched.register(BatchedEnv)
_TorchRLSerial.register(SerialEnv)
_TorchRLParallel.register(ParallelEnv)
