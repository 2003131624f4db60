"""What a batched env is made of: makers, options, spaces, specs, info readers.

Knows EnvBase's construction and the adapters. Does not know how a step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.common import _EnvPostInit

from shoal.adapters.gymnasium import GymnasiumFactory
from shoal.torchrl.infos import InfoReaders
from shoal.torchrl.life import Life
from shoal.torchrl.options import BatchOptions, as_list, kwargs_per_worker
from shoal.torchrl.specs import SpaceCodec

if TYPE_CHECKING:
    from torchrl.envs.gym_like import BaseInfoDictReader

__all__ = ["BatchedBase", "BatchedMeta"]


class BatchedMeta(_EnvPostInit):
    """Lets a parallel env of one worker be a serial one, on request."""

    _serial_twin: Any = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        serial_for_single = kwargs.pop("serial_for_single", False)
        # Functions travel by value here; there is nothing to wrap.
        kwargs.pop("auto_wrap_envs", None)
        num_workers = kwargs.get("num_workers", args[0] if args else None)
        if serial_for_single and num_workers == 1 and cls._serial_twin is not None:
            kwargs.pop("mp_start_method", None)
            kwargs.pop("num_processes", None)
            return cls._serial_twin(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class BatchedBase(Life, EnvBase, metaclass=BatchedMeta):
    """The parts of `BatchedEnv` that steps take no part in."""

    def __init__(
        self,
        num_workers: int,
        create_env_fn: str | Callable[..., Any] | Sequence[str | Callable[..., Any]],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
        info_dict_reader: BaseInfoDictReader | Sequence[BaseInfoDictReader] | None = None,
        metadata_from_workers: bool = False,
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
            metadata_from_workers: start at once, and read the spaces from a worker instead of
                an env of its own.
            **options: the fields of `BatchOptions`.

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
        self.policy_proof = settings.policy_proof
        self.share_individual_td = bool(settings.share_individual_td)
        self._options = settings
        self._use_buffers = settings.use_buffers is not False
        self._metadata_from_workers = metadata_from_workers
        self._mp_start_method = settings.mp_start_method
        self._seeds = None
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
            if factory is None or not are_equal(factory.kwargs, kwargs):
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

    def _set_specs(self) -> None:
        num_envs, codec = self.num_workers, self._codec
        observation = codec.observation_spec.clone()
        for key, spec in self._infos.specs.items():
            observation[key] = spec
        flag = Categorical(2, dtype=torch.bool, shape=(num_envs, 1))
        done = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        specs = {
            "observation_spec": observation.expand(num_envs, *observation.shape),
            "action_spec": codec.action_spec.expand(num_envs, *codec.action_spec.shape),
            "reward_spec": Unbounded(shape=(num_envs, 1)),
            "done_spec": Composite(done, shape=(num_envs,)),
        }
        for name, spec in specs.items():
            setattr(self, name, spec if self.device is None else spec.to(self.device))

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


def text_of(env: Any) -> str:
    """Returns what messages call an env: its id, or what it says of itself."""
    spec = getattr(env, "spec", None)
    if spec is not None:
        return str(getattr(spec, "id", spec))
    try:
        return str(env)
    except Exception:  # noqa: BLE001  border: the env is foreign code, and this only a name
        return type(env).__name__


def are_equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Returns whether keyword arguments are surely equal."""
    try:
        return dict(left) == dict(right)
    except ValueError:  # arrays among them, which have no single answer
        return False
