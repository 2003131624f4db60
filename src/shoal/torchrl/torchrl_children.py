"""Envs of TorchRL in a batch: their metadata, their specs together, their factories.

Knows TorchRL's metadata of envs and creators. Does not know how a step is done.
"""

from __future__ import annotations

import os
import weakref
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import torch
import torchrl
from tensordict import LazyStackedTensorDict
from torchrl.data import Composite
from torchrl.envs import EnvBase, EnvCreator, GymWrapper, TransformedEnv, get_env_metadata
from torchrl.envs.common import EnvMetaData

from shoal.adapters.gymnasium import GymnasiumFactory, is_cheap
from shoal.adapters.torchrl_calls import close_env
from shoal.adapters.torchrl_factory import TorchRLFactory
from shoal.adapters.torchrl_gym import gymnasium_inside
from shoal.engine.spec import MIXED, ArraySpec, ObjectSpec, describe_path
from shoal.errors import SpecError
from shoal.torchrl.infos import InfoReaders
from shoal.torchrl.options import are_equal
from shoal.torchrl.specs import SpaceCodec
from shoal.torchrl.tables import Tables
from shoal.torchrl.torchrl_columns import Schema
from shoal.torchrl.torchrl_rows import TorchRLRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrl.data import TensorSpec

    from shoal.engine import Engine
    from shoal.torchrl.options import BatchOptions
    from shoal.torchrl.rows import Rows

__all__ = ["GymnasiumMaker", "TorchRLChildren", "alike", "check_not_empty", "check_worker_env"]

_SPECS = {
    "action_spec": ("input_spec", "full_action_spec"),
    "state_spec": ("input_spec", "full_state_spec"),
    "observation_spec": ("output_spec", "full_observation_spec"),
    "reward_spec": ("output_spec", "full_reward_spec"),
    "done_spec": ("output_spec", "full_done_spec"),
}


class TorchRLChildren:
    """Envs of TorchRL; see `Children` for what its members are.

    Attributes:
        metadata: of each env; one and the same object where there is a single task.
    """

    seed_themselves = True

    def __init__(
        self,
        metadata: list[EnvMetaData],
        options: BatchOptions,
        *,
        single_task: bool,
        are_cheap: bool = False,
    ) -> None:
        first = metadata[0]
        self.options = options
        self._single_task = single_task
        self._are_cheap = are_cheap
        self.metadata = metadata
        self.infos = InfoReaders()
        self.env_text = first.env_str
        self.batch_size = torch.Size(first.batch_size)
        self.supports_set_state = all(m.supports_set_state for m in metadata)
        self.is_dynamic = any(m.has_dynamic_specs for m in metadata)
        self.are_stackable = single_task or _stackable(metadata)
        distinct: list[EnvMetaData] = metadata[:1] if single_task else metadata
        self._specs = [_specs_of(m) for m in distinct]
        for specs in self._specs:
            check_not_empty(specs, options.batched)
        alone = single_task or (self.are_stackable and alike(metadata))
        if alone:
            self._schemas = [Schema(self._specs[0], first.batch_size)] * len(metadata)
        else:
            self._schemas = [
                Schema(specs, m.batch_size) for specs, m in zip(self._specs, metadata, strict=True)
            ]
        # Only envs that look the same may turn out to be plain ones of Gymnasium.
        self._may_unwrap = alone

    @classmethod
    def of(
        cls,
        makers: list[Any],
        kwargs: list[dict[str, Any]],
        options: BatchOptions,
        *,
        single_task: bool,
        first: EnvBase | None = None,
    ) -> TorchRLChildren:
        """Returns what is known of the envs, which are built, read and closed again.

        Args:
            makers: one per env. An ``EnvCreator`` knows its env, and builds none.
            kwargs: their keyword arguments.
            options: of the batched env.
            single_task: all makers are the same.
            first: an env of the first maker; it stays open.
        """
        metadata: list[EnvMetaData] = []
        for maker, own in zip(makers, kwargs, strict=True):
            if single_task and metadata:
                metadata.append(metadata[0])
            elif first is not None and not metadata:
                check_worker_env(first)
                metadata.append(EnvMetaData.metadata_from_env(first))
            else:
                metadata.append(_metadata_of(maker, own, options))
        return cls(
            metadata,
            options,
            single_task=single_task,
            are_cheap=single_task and first is not None and _is_cheap(first),
        )

    def select(self, env_ids: list[int]) -> TorchRLChildren:
        """Returns those of some envs."""
        metadata = [self.metadata[i] for i in env_ids]
        return TorchRLChildren(metadata, self.options, single_task=self._single_task)

    def common_device(self) -> torch.device | None:
        """Returns the device of all envs.

        Raises:
            ValueError: they are on different ones.
        """
        devices = {m.device for m in self.metadata}
        if len(devices) > 1:
            raise ValueError(
                f"the envs are on more than one device ({', '.join(map(str, devices))});"
                " say with device= where their results shall go"
            )
        device: torch.device | None = self.metadata[0].device
        return device

    # --- what EnvBase has to know ----------------------------------------------------

    def specs(self, num_envs: int) -> dict[str, TensorSpec]:
        """Returns the specs of the batch; stacked, lazily if need be, where envs differ."""
        found: dict[str, TensorSpec] = {}
        for name, (group, key) in _SPECS.items():
            parts = [specs[group][key] for specs in self._specs]
            if len({m.device for m in self.metadata}) > 1:
                parts = [part.to("cpu") for part in parts]  # until they meet on one device
            if self._single_task:
                found[name] = parts[0].expand(num_envs, *parts[0].shape)
            else:
                found[name] = torch.stack(parts, 0)
        return found

    # --- what the engine has to know -------------------------------------------------

    def factories(self, makers: list[Any], kwargs: list[dict[str, Any]], backend: str) -> list[Any]:
        """Returns one factory per env; the same for equal makers, so that it is pickled once."""
        apart = backend == "processes"
        built: Any = None if apart else weakref.WeakSet()
        made: dict[int, TorchRLFactory] = {}
        factories = []
        for maker, own in zip(makers, kwargs, strict=True):
            factory = made.get(id(maker))
            if factory is None or not are_equal(factory.kwargs, own):
                factory = TorchRLFactory(
                    maker if callable(maker) else GymnasiumMaker(maker),
                    own,
                    is_cheap=self._are_cheap,
                    num_threads=self.options.num_sub_threads,
                    may_unwrap=self._may_unwrap,
                    keep_graph=not apart and self.options.keeps_graph,
                    caller_pid=os.getpid() if apart else None,
                    built=built,
                    quiet=torchrl.filter_warnings_subprocess,
                )
                made[id(maker)] = factory
            factories.append(factory)
        return factories

    def engine_options(self, backend: str) -> dict[str, Any]:
        """Returns options of the engine that this kind of env needs."""
        options: dict[str, Any] = {"mixed_specs": True}
        if backend in ("serial", "threads"):
            # In one process a reset ahead of time saves nothing, and draws from the same
            # global generators as the caller.
            options["prefetch_resets"] = False
        return options

    def open(self, engine: Engine, reset_keys: Sequence[Any]) -> Rows | None:
        """Returns the rows of a running engine.

        ``None`` if plain envs of Gymnasium turned out to have other specs without their
        wrapper than with it; the engine then has to be opened again.
        """
        known = engine.spec.observation.keys()
        schemas = {id(schema): schema for schema in self._schemas}.values()
        if not all(leaf.path in known for s in schemas for leaf in s.following_leaves):
            if not self._may_unwrap:
                return None
            *spaces, is_categorical = engine.call("?spaces", env_ids=[0])[0]
            codec = SpaceCodec(*spaces, categorical_action_encoding=is_categorical)
            if self._is_described_by(codec):
                return Tables(engine, codec, self.infos)
            self._may_unwrap = False
            return None
        self._check_agrees(engine)
        return TorchRLRows(
            engine,
            self._schemas,
            reset_keys,
            is_lazy=bool(self.options.share_individual_td) or not self.are_stackable,
            leaf_devices=self.metadata[0].device is None,
        )

    def _check_agrees(self, engine: Engine) -> None:
        """Checks that envs which share one schema are what their metadata says.

        Raises:
            SpecError: they are not; an ``EnvCreator`` made by ``make_variant`` keeps the
                metadata of the one it was made from.
        """
        schema = self._schemas[0]
        if any(other is not schema for other in self._schemas):
            return
        found = engine.spec.observation
        for leaf in schema.following_leaves:
            spec = found.get(leaf.path)
            if isinstance(spec, ArraySpec) and spec != leaf.spec:
                hint = "An EnvCreator made by make_variant keeps old metadata; make a new one."
                actual = f"{spec} in the envs that run"
            elif isinstance(spec, ObjectSpec) and spec.description == MIXED:
                hint = "Where envs shall differ, give a list of functions, one per env."
                actual = "different in the envs that run, though one function makes them all"
            else:
                continue
            raise SpecError(
                key=describe_path("observation", leaf.path),
                expected=f"{leaf.spec}, which is what the env's metadata says",
                actual=actual,
                hint=hint,
            )

    def _is_described_by(self, codec: SpaceCodec) -> bool:
        specs = self._specs[0].to("cpu")
        actions = codec.action_spec
        if not isinstance(actions, Composite):
            actions = Composite(action=actions)
        return bool(
            specs["output_spec"]["full_observation_spec"] == codec.observation_spec.to("cpu")
            and specs["input_spec"]["full_action_spec"] == actions.to("cpu")
        )


class GymnasiumMaker:
    """A Gymnasium id among the makers of a batch whose envs differ."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __call__(self, **kwargs: Any) -> EnvBase:
        """Returns the env in TorchRL's wrapper."""
        env = GymnasiumFactory.of(self.target, kwargs, defaults="torchrl")().env
        return GymWrapper(env, categorical_action_encoding=True)


def _is_cheap(env: EnvBase) -> bool:
    """Returns whether an env is one of Gymnasium's small games, with nothing around it."""
    inner = gymnasium_inside(env)
    return inner is not None and is_cheap(inner.spec)


def check_worker_env(env: Any) -> None:
    """Checks that an env's transforms may live in a worker.

    Raises:
        RuntimeError: one refuses to, and says why.
    """
    # A plain look-up: on a batched env any other would start its workers.
    if getattr_static(env, "transform", None) is not None and env.transform is not None:
        env.transform._check_batched_worker_compat()


def _metadata_of(maker: Any, kwargs: dict[str, Any], options: BatchOptions) -> EnvMetaData:
    if isinstance(maker, EnvCreator):
        # To look at transforms, another env is built; one without any needs no look.
        has_transforms = issubclass(maker.env_type, TransformedEnv)
        validator = check_worker_env if has_transforms else None
        return get_env_metadata(maker, kwargs, env_validator=validator)
    make = maker if callable(maker) else GymnasiumMaker(maker)
    env: Any = TorchRLFactory(make, kwargs).build()
    try:
        check_worker_env(env)
        return EnvMetaData.metadata_from_env(env)
    finally:
        close_env(env)


def _specs_of(metadata: EnvMetaData) -> Composite:
    """Returns specs on the device of the env; if it has none, each leaf on its own."""
    specs: Composite = metadata.specs.clone()
    if metadata.device is None:
        specs.clear_device_()
        for group, name in _SPECS.values():
            for key, leaf in list(specs[group][name].items(True, True)):
                path = (key,) if isinstance(key, str) else key
                path = ("next", *path) if group == "output_spec" else path
                device = metadata.device_map.get(path if len(path) > 1 else path[0])
                if device is not None and device.type != "cpu":
                    specs[group][name][key] = leaf.to(device)
    return specs


def check_not_empty(specs: Composite, batched: str) -> None:
    """Checks that no part of some specs is empty.

    Args:
        specs: of one env.
        batched: the class that takes it.

    Raises:
        RuntimeError: a composite holds nothing.
    """
    for group, name in _SPECS.values():
        for key, spec in specs[group][name].items(True):
            if isinstance(spec, Composite) and spec.is_empty():
                raise RuntimeError(
                    f"The environment passed to {batched} has empty specs in {key} of {name};"
                    " remove them, for example with torchrl.envs.transforms.RemoveEmptySpecs"
                )


def _stackable(metadata: list[EnvMetaData]) -> bool:
    examples = [m._tensordict.copy().clear_device_() for m in metadata]
    stack = LazyStackedTensorDict(*examples, stack_dim=0)
    try:
        stack.contiguous()
    except RuntimeError:
        return False
    return not stack._has_exclusive_keys


def alike(metadata: Sequence[EnvMetaData]) -> bool:
    """Returns whether envs have the same entries, shapes and dtypes."""

    def entries(m: EnvMetaData) -> dict[Any, Any]:
        return {
            (group, key, leaf): (spec.shape, spec.dtype, type(spec))
            for group, key in _SPECS.values()
            for leaf, spec in m.specs[group][key].items(True, True)
        }

    first = entries(metadata[0])
    return all(m.batch_size == metadata[0].batch_size and entries(m) == first for m in metadata[1:])
