"""`SerialEnv` and `ParallelEnv`: many envs as one TorchRL environment.

Knows EnvBase, TensorDicts and the engine's public verbs. Does not know backends.

What TorchRL calls on these classes, and when, decides their shape: a bare env gets
`step_and_maybe_reset`; below a transform only `_step` and `_reset` are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.batched_envs import BatchedEnvBase as _TorchRLBatched
from torchrl.envs.batched_envs import ParallelEnv as _TorchRLParallel
from torchrl.envs.batched_envs import SerialEnv as _TorchRLSerial
from torchrl.envs.common import _EnvPostInit

from shoal.adapters.gymnasium import GymnasiumFactory
from shoal.engine import Engine
from shoal.errors import EnvError
from shoal.torchrl.infos import InfoReaders
from shoal.torchrl.masks import rows_to_reset, rows_to_step
from shoal.torchrl.options import BatchOptions, as_list, kwargs_per_worker
from shoal.torchrl.rollout import rollout_into_buffers
from shoal.torchrl.roots import carry_over, complete, repeat_idle, set_entry
from shoal.torchrl.specs import SpaceCodec
from shoal.torchrl.tables import Tables

if TYPE_CHECKING:
    from torchrl.envs.gym_like import BaseInfoDictReader

__all__ = ["BatchedEnv", "ParallelEnv", "SerialEnv"]

_DONE_KEYS = frozenset({"done", "terminated", "truncated"})


class _BatchedMeta(_EnvPostInit):  # type: ignore[misc]
    """Lets a parallel env of one worker be a serial one, on request."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        serial_for_single = kwargs.pop("serial_for_single", False)
        # Functions travel by value here; there is nothing to wrap.
        kwargs.pop("auto_wrap_envs", None)
        num_workers = kwargs.get("num_workers", args[0] if args else None)
        if serial_for_single and num_workers == 1 and issubclass(cls, ParallelEnv):
            kwargs.pop("mp_start_method", None)
            kwargs.pop("num_processes", None)
            return super(_BatchedMeta, SerialEnv).__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class BatchedEnv(EnvBase, metaclass=_BatchedMeta):  # type: ignore[misc]
    """Many Gymnasium environments as one TorchRL environment of batch size ``[N]``.

    Use `SerialEnv` or `ParallelEnv`. Nothing runs until the first `reset`, `step` or
    `set_seed`, and after `close` the next of these starts anew.

    Attributes:
        num_workers: how many envs there are (TorchRL's word for it).
        create_env_fn: one maker per env.
        create_env_kwargs: keyword arguments per env; see `update_kwargs`.
    """

    _backend: ClassVar[str]

    def __init__(
        self,
        num_workers: int,
        create_env_fn: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
        info_dict_reader: BaseInfoDictReader | Sequence[BaseInfoDictReader] | None = None,
        share_individual_td: bool | None = None,
        policy_proof: Any = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        non_blocking: bool = False,
        use_buffers: bool | None = None,
        metadata_from_workers: bool = False,
        consolidate: bool = True,
        daemon: bool = False,
        **options: Any,
    ) -> None:
        """Reads the spaces from one env, which is closed again; starts nothing.

        Args:
            num_workers: how many envs, and the batch size.
            create_env_fn: a Gymnasium id, a callable that returns a ``gymnasium.Env``, or a
                list with one of those per env. Functions, lambdas and classes of the main
                module travel to the workers by value.
            create_env_kwargs: keyword arguments for the callable or ``gymnasium.make``, one
                dict for all envs or one per env. Copied.
            device: where results go; ``None`` leaves them on the CPU, without a device.
            info_dict_reader: see `set_info_dict_reader`.
            num_processes: (option) worker processes; ``None`` for one per usable core, and
                never more than envs. Affinity and cgroup quota count.
            timeout: (option) seconds that a call may wait for envs, 600 by default; ``None``
                for no limit.
            shutdown_timeout: (option) seconds that envs may take to close, 10 by default.
            mp_start_method: (option) ``"forkserver"`` (default: forked from a fresh, preloaded
                interpreter), ``"spawn"`` or ``"fork"``.
            categorical_action_encoding: (option) choices are numbers (default), or one-hot.
            prefetch_resets: (option) whether resets may be prepared; see ARCHITECTURE.md.
            caller_steps: (option) the calling thread steps a worker's share of the envs itself,
                without isolation; ``None``: only for Gymnasium's own small games.
            share_individual_td: accepted, as are ``policy_proof``, ``num_threads``,
                ``num_sub_threads``, ``non_blocking``, ``use_buffers``, ``consolidate`` and
                ``daemon``: they tune mechanisms of TorchRL that this class does not have.
            metadata_from_workers: start at once, and read the spaces from a worker instead of
                an env of its own.
            **options: the options named above.

        Raises:
            RuntimeError: lists of the wrong length.
            TypeError: something that makes no env, or an unknown option.
            ValueError: an option that TorchRL refuses too.
        """
        self.__dict__["_engine"] = None
        self.__dict__["_tables"] = None
        makers, self._single_task = as_list(create_env_fn, num_workers)
        settings = BatchOptions(**options)
        super().__init__(device=device, batch_size=torch.Size([num_workers]))
        self.num_workers = num_workers
        self.create_env_fn = makers
        self.create_env_kwargs = kwargs_per_worker(create_env_kwargs, num_workers)
        self.policy_proof = policy_proof
        self.share_individual_td = bool(share_individual_td)
        self._options = settings
        self._use_buffers = True if use_buffers is None else use_buffers
        self._metadata_from_workers = metadata_from_workers
        self._mp_start_method = settings.mp_start_method
        self._seeds: list[int | None] | None = None
        self._infos = InfoReaders()
        self._codec = self._read_spaces()
        self._set_specs()
        readers = [] if info_dict_reader is None else info_dict_reader
        for reader in readers if isinstance(readers, Sequence) else [readers]:
            self.set_info_dict_reader(reader)

    # --- specs ---------------------------------------------------------------------

    def _factories(self) -> list[GymnasiumFactory]:
        made: dict[int, GymnasiumFactory] = {}
        factories = []
        for maker, kwargs in zip(self.create_env_fn, self.create_env_kwargs, strict=True):
            # One factory for equal makers, so that they are pickled once.
            factory = made.get(id(maker))
            if factory is None or dict(factory.kwargs) != kwargs:
                factory = GymnasiumFactory.of(
                    maker, kwargs, self._infos.leaves or None, defaults="torchrl"
                )
                made[id(maker)] = factory
            factories.append(factory)
        return factories

    def _read_spaces(self) -> SpaceCodec:
        if self._metadata_from_workers:
            try:
                spaces = [self._ask(name) for name in ("observation_space", "action_space")]
                self._env_text = self._ask("spec.id", "__str__", "__class__.__name__")
            except BaseException:
                self.close(raise_if_closed=False)
                raise
        else:
            env = self._factories()[0]()
            try:
                spaces = [env.observation_space, env.action_space]
                self._env_text = text_of(env.env)
            finally:
                env.close()
        return SpaceCodec(
            *spaces, categorical_action_encoding=self._options.categorical_action_encoding
        )

    def _ask(self, *names: str) -> Any:
        """Returns the first of these attributes that the running env 0 has."""
        for name in names[:-1]:
            with suppress(EnvError):
                return self._running().call(name, env_ids=[0])[0]
        return self._running().call(names[-1], env_ids=[0])[0]

    def _set_specs(self) -> None:
        num_envs, codec = self.num_workers, self._codec
        observation = codec.observation_spec.clone()
        for key, spec in self._infos.specs.items():
            observation[key] = spec
        self.observation_spec = observation.expand(num_envs, *observation.shape)
        self.action_spec = codec.action_spec.expand(num_envs, *codec.action_spec.shape)
        self.reward_spec = Unbounded(shape=(num_envs, 1), device=self.device)
        flag = Categorical(2, dtype=torch.bool, shape=(num_envs, 1), device=self.device)
        self.done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(num_envs,)
        )
        if self.device is not None:
            for spec in (self.output_spec, self.input_spec):
                spec.to(self.device)

    def set_info_dict_reader(self, info_dict_reader: BaseInfoDictReader | None = None) -> Any:
        """Adds entries of the info dicts to the observations, as ``GymEnv`` does.

        Args:
            info_dict_reader: as in ``torchrl.envs``; ``None`` for a
                ``default_info_dict_reader`` of all entries. One that knows its keys and
                specs costs little; any other is called in this process for every env and
                step, on info dicts that were pickled.

        Returns:
            The env itself.

        Raises:
            RuntimeError: the env has started.
        """
        if not self.is_closed:
            raise RuntimeError("set_info_dict_reader comes before the env starts; close it first")
        self._infos.add(info_dict_reader, self._factories()[0])
        self.input_spec.unlock_(recurse=True)
        self.output_spec.unlock_(recurse=True)
        self._set_specs()
        self.empty_cache()
        self.input_spec.lock_(recurse=True)
        self.output_spec.lock_(recurse=True)
        return self

    # --- life ----------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether no envs run. `reset`, `step` and `set_seed` start them."""
        engine: Engine | None = self.__dict__.get("_engine")
        return engine is None

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        # TransformedEnv writes through after it has closed its base.
        if value and not self.is_closed:
            self.close()

    def start(self) -> None:
        """Starts the envs.

        Raises:
            RuntimeError: they run already.
        """
        if not self.is_closed:
            raise RuntimeError("the env has been started already; close it first")
        self._running()

    def _running(self) -> Engine:
        """Returns the engine, started if it was not."""
        engine: Engine | None = self.__dict__["_engine"]
        if engine is not None:
            return engine
        options = self._options
        engine = Engine(
            self._factories(),
            backend=self._backend,
            num_processes=options.num_processes,
            start_method=options.mp_start_method or "forkserver",
            timeout=options.timeout,
            close_timeout=options.shutdown_timeout,
            prefetch_resets=options.prefetch_resets,
            keep_infos=self._infos.needs_dicts,
            memmap=options.memmap,
            caller_steps=options.caller_steps,
        )
        self.__dict__["_engine"] = engine
        return engine

    def _started(self) -> tuple[Engine, Tables]:
        tables: Tables | None = self.__dict__["_tables"]
        engine = self._running()
        if tables is None:
            tables = self.__dict__["_tables"] = Tables(engine, self._codec)
        return engine, tables

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends all envs and workers. The next `reset` or `step` starts new ones.

        Raises:
            RuntimeError: it is closed already, and ``raise_if_closed`` is true.
        """
        engine: Engine | None = self.__dict__["_engine"]
        if engine is None:
            if raise_if_closed:
                raise RuntimeError("the env is closed already; pass raise_if_closed=False")
            return
        self.__dict__["_engine"] = None
        self.__dict__["_tables"] = None
        engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(raise_if_closed=False)

    def __getstate__(self) -> dict[str, Any]:
        # Processes do not travel: a copy is closed, and starts envs of its own.
        return {**self.__dict__, "_engine": None, "_tables": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(\n\tenv={self._env_text},\n\tbatch_size={self.batch_size})"

    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Merges keyword arguments into those of each env; used at the next start.

        Raises:
            RuntimeError: a list of the wrong length.
        """
        for mine, new in zip(
            self.create_env_kwargs, kwargs_per_worker(kwargs, self.num_workers), strict=True
        ):
            mine.update(new)

    def add_truncated_keys(self) -> Any:
        """The envs report truncation already."""
        return self

    # --- seeds ---------------------------------------------------------------------

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seeds all envs by TorchRL's chain, in one round trip.

        Args:
            seed: of env 0; ``None`` changes nothing.
            static_seed: give all envs the same seed.

        Returns:
            The seed that follows the last one.
        """
        if seed is None:
            return None
        self._seeds, following = self._running().seed(seed, static=static_seed)
        return following

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

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
        engine.step_rows({path: rows[ids] for path, rows in actions.items()}, ids, autoreset=False)
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
        per_env = reset_kwargs(kwargs, engine.num_envs)
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


def text_of(env: Any) -> str:
    """Returns what messages call an env: its id, or what it says of itself."""
    spec = getattr(env, "spec", None)
    if spec is not None:
        return str(getattr(spec, "id", spec))
    try:
        return str(env)
    except Exception:  # noqa: BLE001  border: the env is foreign code, and this only a name
        return type(env).__name__


def reset_kwargs(kwargs: dict[str, Any], num_envs: int) -> list[dict[str, Any]] | None:
    """Returns the keyword arguments of each env's reset, or ``None`` if there are none.

    ``list_of_kwargs`` holds one dict per env; shared arguments win over them.

    Raises:
        RuntimeError: the list has another length.
    """
    shared = {key: value for key, value in kwargs.items() if key != "list_of_kwargs"}
    listed = kwargs.get("list_of_kwargs")
    if listed is None:
        return [shared] * num_envs if shared else None
    if len(listed) != num_envs:
        raise RuntimeError(
            f"list_of_kwargs holds {len(listed)} dicts, but there are {num_envs} envs;"
            " give one per env"
        )
    return [{**own, **shared} for own in listed]


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


# Collectors ask by these classes whether an env is a batched one.
_TorchRLBatched.register(BatchedEnv)
_TorchRLSerial.register(SerialEnv)
_TorchRLParallel.register(ParallelEnv)
