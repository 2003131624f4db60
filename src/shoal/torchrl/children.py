"""What a batched env holds: Gymnasium envs, or envs of TorchRL.

Knows how each kind is built and described. Does not know EnvBase's own construction or
how a step is done.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torchrl
from torchrl.data import Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase, EnvCreator

from shoal.adapters.gymnasium import GymnasiumDescription, GymnasiumFactory, check_is_env
from shoal.adapters.torchrl_calls import close_env
from shoal.adapters.torchrl_factory import EitherFactory
from shoal.torchrl.infos import InfoReaders
from shoal.torchrl.options import are_equal
from shoal.torchrl.specs import SpaceCodec
from shoal.torchrl.tables import Tables
from shoal.torchrl.torchrl_children import TorchRLChildren, alike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.engine import Engine
    from shoal.torchrl.options import BatchOptions
    from shoal.torchrl.rows import Rows

__all__ = ["Children", "GymnasiumChildren", "children_in", "children_of", "unknown_factories"]

Makers = list[Any]
Kwargs = list[dict[str, Any]]


class Children(Protocol):
    """The envs of one batched env, before they run.

    Attributes:
        options: of the batched env; those that concern how envs run may be replaced.
        env_text: what messages call the first of them.
        batch_size: of one env.
        supports_set_state: a reset may put all of them into a given state.
        is_dynamic: some of their entries have no fixed shape.
        are_stackable: results of all of them make one dense batch.
        seed_themselves: they have a ``set_seed`` with rules of its own.
        infos: entries of info dicts that are observations.
    """

    options: BatchOptions
    env_text: str
    batch_size: torch.Size
    supports_set_state: bool
    is_dynamic: bool
    are_stackable: bool
    seed_themselves: bool
    infos: InfoReaders

    def factories(self, makers: Makers, kwargs: Kwargs, backend: str) -> list[Any]:
        """Returns one factory per env."""

    def engine_options(self, backend: str) -> dict[str, Any]:
        """Returns options of the engine that this kind of env needs."""

    def specs(self, num_envs: int) -> dict[str, TensorSpec]:
        """Returns the specs of the batch by the names of EnvBase's properties."""

    def select(self, env_ids: list[int]) -> Children:
        """Returns those of some envs."""

    def common_device(self) -> torch.device | None:
        """Returns the device of all of them.

        Raises:
            ValueError: they are on different ones.
        """

    def open(self, engine: Engine, reset_keys: Sequence[Any]) -> Rows | None:
        """Returns the rows of a running engine; ``None`` if it has to be opened again."""


def children_of(
    makers: Makers, kwargs: Kwargs, options: BatchOptions, *, single_task: bool
) -> Children:
    """Returns what is known of the envs: one is built here, read, and closed again.

    Of several tasks one of each is built. An ``EnvCreator`` knows its env, and builds none.

    Args:
        makers: one per env.
        kwargs: their keyword arguments.
        options: of the batched env.
        single_task: all makers are the same object.

    Raises:
        TypeError: something that makes no env.
        RuntimeError: an env cannot live in a worker.
    """
    if isinstance(makers[0], EnvCreator):
        return TorchRLChildren.of(makers, kwargs, options, single_task=single_task)
    env = _built(makers[0], kwargs[0])
    try:
        if isinstance(env, EnvBase):
            return TorchRLChildren.of(makers, kwargs, options, single_task=single_task, first=env)
        children = GymnasiumChildren(GymnasiumDescription.of(env), options)
    finally:
        _close(env)
    others = {} if single_task else {id(maker): k for k, maker in enumerate(makers)}
    if all(children.are_like(makers[k], kwargs[k]) for k in others.values() if k):
        return children
    return TorchRLChildren.of(makers, kwargs, options, single_task=False)


def children_in(answers: Sequence[Any], options: BatchOptions, *, single_task: bool) -> Children:
    """Returns what envs that run have said of themselves.

    Args:
        answers: one per env: a `GymnasiumDescription`, or the metadata of TorchRL.
        options: of the batched env.
        single_task: all makers are the same object.

    Raises:
        RuntimeError: envs of a single task differ.
    """
    if all(isinstance(answer, GymnasiumDescription) for answer in answers):
        return GymnasiumChildren(answers[0], options)
    if single_task and not alike(answers):
        raise RuntimeError(
            "the workers' metadata are incompatible: their envs do not share keys, shapes and"
            " dtypes, although one function makes them all; give a list of functions"
        )
    metadata = [answers[0]] * len(answers) if single_task else list(answers)
    return TorchRLChildren(metadata, options, single_task=single_task)


def unknown_factories(
    makers: Makers, kwargs: Kwargs, options: BatchOptions, *, single_task: bool, is_apart: bool
) -> list[Any]:
    """Returns one factory per env, for makers whose envs nobody has seen."""
    made: dict[int, Any] = {}
    factories = []
    for maker, own in zip(makers, kwargs, strict=True):
        factory = made.get(id(maker))
        if factory is None or not are_equal(factory.kwargs, own):
            if callable(maker):
                factory = EitherFactory(
                    maker,
                    own,
                    num_threads=options.num_sub_threads,
                    may_unwrap=single_task,
                    caller_pid=os.getpid() if is_apart else None,
                )
            else:
                factory = GymnasiumFactory.of(maker, own, defaults="torchrl")
            made[id(maker)] = factory
        factories.append(factory)
    return factories


def _built(maker: Any, kwargs: dict[str, Any]) -> Any:
    """Returns an env; of TorchRL's kinds, or with the members of Gymnasium's."""
    if isinstance(maker, EnvCreator) or not callable(maker):
        return GymnasiumFactory.of(maker, kwargs, defaults="torchrl")().env
    env = maker(**kwargs)
    if not isinstance(env, EnvBase):
        check_is_env(env)
    return env


class GymnasiumChildren:
    """Gymnasium envs that share their spaces; see `Children`.

    Attributes:
        infos: entries of the info dicts that are observations.
    """

    batch_size = torch.Size([])
    supports_set_state = False
    is_dynamic = False
    are_stackable = True
    seed_themselves = False

    def __init__(self, description: GymnasiumDescription, options: BatchOptions) -> None:
        self.options = options
        self.env_text = description.text
        self.infos = InfoReaders()
        self._codec = self._codec_of(description)

    def _codec_of(self, spaces: Any) -> SpaceCodec:
        return SpaceCodec(
            spaces.observation_space,
            spaces.action_space,
            categorical_action_encoding=self.options.categorical_action_encoding,
        )

    def are_like(self, maker: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether another maker's env has the same specs."""
        env = _built(maker, kwargs)
        try:
            if isinstance(env, EnvBase):
                return False
            codec = self._codec_of(env)
        finally:
            _close(env)
        return bool(
            codec.observation_spec == self._codec.observation_spec
            and codec.action_spec == self._codec.action_spec
        )

    def factories(self, makers: Makers, kwargs: Kwargs, backend: str = "") -> list[Any]:
        """Returns one factory per env; the same for equal makers, so that it is pickled once."""
        made: dict[int, GymnasiumFactory] = {}
        factories = []
        for maker, own in zip(makers, kwargs, strict=True):
            factory = made.get(id(maker))
            if factory is None or not are_equal(factory.kwargs, own):
                factory = GymnasiumFactory.of(
                    maker,
                    own,
                    self.infos.leaves or None,
                    defaults="torchrl",
                    quiet_except_in=os.getpid() if torchrl.filter_warnings_subprocess else None,
                )
                made[id(maker)] = factory
            factories.append(factory)
        return factories

    def engine_options(self, backend: str) -> dict[str, Any]:
        """Returns options of the engine that this kind of env needs."""
        return {"keep_infos": self.infos.needs_dicts}

    def select(self, env_ids: list[int]) -> Children:
        """Returns those of some envs, which are all alike."""
        return self

    def common_device(self) -> torch.device | None:
        """Returns ``None``: Gymnasium knows no devices."""
        return None

    def specs(self, num_envs: int) -> dict[str, TensorSpec]:
        """Returns the specs of the batch, with the flags and the reward of Gymnasium."""
        observation = self._codec.observation_spec.clone()
        for key, spec in self.infos.specs.items():
            observation[key] = spec
        flag = Categorical(2, dtype=torch.bool, shape=(1,))
        done = {name: flag.clone() for name in ("done", "terminated", "truncated")}
        one = {
            "observation_spec": observation,
            "action_spec": self._codec.action_spec,
            "reward_spec": Unbounded(shape=(1,)),
            "done_spec": Composite(done),
        }
        return {name: spec.expand(num_envs, *spec.shape) for name, spec in one.items()}

    def open(self, engine: Engine, reset_keys: Sequence[Any]) -> Rows:
        """Returns the rows of a running engine."""
        return Tables(engine, self._codec, self.infos)


def _close(env: Any) -> None:
    if isinstance(env, EnvBase):
        close_env(env)
    else:
        env.close()
