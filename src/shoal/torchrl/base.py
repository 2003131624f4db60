"""What a batched env is made of: makers, options, specs, info readers.

Knows EnvBase's construction and the adapters. Does not know how a step is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torchrl._utils import _make_ordinal_device
from torchrl.data.utils import contains_lazy_spec
from torchrl.envs import EnvBase
from torchrl.envs.common import _EnvPostInit

from shoal.adapters.torchrl_trees import is_non_tensor
from shoal.torchrl.children import children_in, children_of, unknown_factories
from shoal.torchrl.dispatch import Dispatch
from shoal.torchrl.life import Life
from shoal.torchrl.options import (
    BatchOptions,
    as_list,
    kwargs_per_worker,
    resolve_buffers,
    resolve_sharing,
)

if TYPE_CHECKING:
    from typing import Self

    from torchrl.envs.gym_like import BaseInfoDictReader

    from shoal.torchrl.children import Children

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


class BatchedBase(Life, Dispatch, EnvBase, metaclass=BatchedMeta):
    """The parts of `BatchedEnv` that steps take no part in."""

    auto_complete_done_specs = False

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
        """Reads the specs from one env, which is closed again; starts nothing.

        Args:
            num_workers: how many envs, and the first dimension of the batch.
            create_env_fn: a Gymnasium id, a callable that returns a ``gymnasium.Env`` or an
                ``EnvBase``, an ``EnvCreator``, or a list with one of those per env. Functions,
                lambdas and classes of the main module travel to the workers by value.
            create_env_kwargs: keyword arguments for the callable or ``gymnasium.make``, one
                dict for all envs or one per env. Copied.
            device: where results go; ``None`` leaves them where the envs return them.
            info_dict_reader: see `set_info_dict_reader`.
            metadata_from_workers: start at once, and read the specs from the workers instead of
                an env of its own.
            **options: the fields of `BatchOptions`.

        Raises:
            RuntimeError: lists of the wrong length, or an env that cannot live in a worker.
            TypeError: something that makes no env, or an unknown option.
            ValueError: an option that TorchRL refuses too; envs on different devices, and no
                ``device``; ``share_individual_td=False`` for envs that cannot be stacked.
        """
        self.__dict__["_engine"] = None
        self.__dict__["_rows"] = None
        self.__dict__["_owner"] = None
        makers, self._single_task = as_list(create_env_fn, num_workers)
        settings = BatchOptions(batched=type(self).__name__, **options)
        self.num_workers = num_workers
        self.create_env_fn = makers
        self.create_env_kwargs = kwargs_per_worker(create_env_kwargs, num_workers)
        self.policy_proof = settings.policy_proof
        self._options = settings
        self._metadata_from_workers = metadata_from_workers
        self._seeds = None
        try:
            children = self._describe()
            # EnvBase's own part comes here: only the children know batch size and device.
            super().__init__(
                device=children.common_device() if device is None else device,
                batch_size=torch.Size((num_workers, *children.batch_size)),
            )
            # Whatever the children are: EnvBase would cut a partial step's rows out itself.
            self.__dict__["_batch_locked"] = True
            self._set_specs()
            readers = [] if info_dict_reader is None else info_dict_reader
            for reader in readers if isinstance(readers, Sequence) else [readers]:
                self.set_info_dict_reader(reader)
        except BaseException:
            self.close(raise_if_closed=False)
            raise

    # --- specs ---------------------------------------------------------------------

    def _describe(self) -> Children:
        """Learns what the children are, and settles what depends on it."""
        options = self._options
        children = self._find_children()
        self.__dict__["_children"] = children
        self.__dict__["_infos"] = children.infos
        self._use_buffers = not self._metadata_from_workers and resolve_buffers(
            options.use_buffers, is_dynamic=children.is_dynamic
        )
        self.share_individual_td = resolve_sharing(
            options.share_individual_td, are_stackable=children.are_stackable
        )
        self.__dict__["_env_text"] = self.__dict__["_dummy_env_str"] = children.env_text
        return children

    def _find_children(self) -> Children:
        options, single_task = self._options, self._single_task
        if not self._metadata_from_workers:
            return children_of(
                self.create_env_fn, self.create_env_kwargs, options, single_task=single_task
            )
        if options.use_buffers:
            raise RuntimeError(
                "metadata_from_workers=True requires use_buffers=False, as in TorchRL: what the"
                " envs return is not known before they run"
            )
        return children_in(self._ask_workers(), options, single_task=single_task)

    def _ask_workers(self) -> list[Any]:
        """Starts the envs without knowing what they are, and asks them."""
        factories = unknown_factories(
            self.create_env_fn,
            self.create_env_kwargs,
            self._options,
            single_task=self._single_task,
            is_apart=self._backend == "processes",
        )
        return self._open(factories, {"mixed_specs": True}).call("?describe")

    def _set_specs(self) -> None:
        for name, spec in self._children.specs(self.num_workers).items():
            setattr(self, name, spec if self.device is None else spec.to(self.device))
        self.has_lazy_inputs = contains_lazy_spec(self.input_spec)

    @property
    def _supports_set_state(self) -> bool:
        found: bool = self._children.supports_set_state
        return found

    @property
    def _mp_start_method(self) -> str | None:
        return self._options.mp_start_method

    @property
    def _has_dynamic_specs(self) -> bool:
        return not self._use_buffers

    @property
    def _non_tensor_keys(self) -> list[Any]:
        """The keys of the entries that hold no tensors."""
        composites = (
            self.full_action_spec,
            self.full_state_spec,
            self.full_observation_spec,
            self.full_reward_spec,
            self.full_done_spec,
        )
        return [key for c in composites for key, s in c.items(True, True) if is_non_tensor(s)]

    @property
    def non_blocking(self) -> bool:
        """Whether copies to a device are asynchronous where that is safe; true by default."""
        return self._options.non_blocking is not False

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
            RuntimeError: the env has started, or its children are TorchRL's own, which
                take their readers themselves.
        """
        if not self.is_closed:
            raise RuntimeError("set_info_dict_reader comes before the env starts; close it first")
        if self._children.seed_themselves:
            raise RuntimeError("envs of TorchRL read info dicts themselves: give them the reader")
        factories = self._children.factories(
            self.create_env_fn, self.create_env_kwargs, self._backend
        )
        self._infos.add(info_dict_reader, factories[0])
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
            self.create_env_kwargs,
            kwargs_per_worker(kwargs, self.num_workers, "kwargs"),
            strict=True,
        ):
            mine.update(new)

    def add_truncated_keys(self) -> Any:
        """Raises: the children have to do it.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a batched env reports what its envs report: call add_truncated_keys on them, in the"
            " function that makes them"
        )

    def configure_parallel(self, **options: Any) -> Self:
        """Changes options before the envs start.

        Args:
            **options: fields of `BatchOptions` that concern how envs run: ``use_buffers``,
                ``shared_memory``, ``memmap``, ``mp_start_method``, ``num_threads``,
                ``num_sub_threads``, ``non_blocking``, ``daemon``, ``shutdown_timeout``, and
                those of shoal's own: ``num_processes``, ``timeout``, ``prefetch_resets``,
                ``caller_steps``. ``None`` leaves one as it is.

        Returns:
            The env itself.

        Raises:
            RuntimeError: the envs have started.
            TypeError: an option that cannot be changed.
        """
        if not self.is_closed:
            raise RuntimeError(
                "configure_parallel cannot be used after the environment has started; close it"
            )
        self._options = self._children.options = self._options.changed(**options)
        self._use_buffers = resolve_buffers(
            self._options.use_buffers, is_dynamic=self._children.is_dynamic
        )
        return self

    def to(self, device: Any) -> Self:
        """Moves results and specs to a device. The envs stay where they are, and run on.

        Args:
            device: where results go.

        Returns:
            The env itself.
        """
        device = _make_ordinal_device(torch.device(device))
        if device == self.device:
            return self
        for name in ("_input_spec", "_output_spec"):
            moved = self.__dict__[name].to(device)
            if self._is_spec_locked:
                moved.lock_(recurse=True)
            self.__dict__[name] = moved
        self._device = device
        self.empty_cache()
        return self
