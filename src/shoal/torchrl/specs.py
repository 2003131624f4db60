"""TorchRL specs of one env, and batches between the engine's form and TorchRL's.

Knows torch, torchrl, Gymnasium's spaces and how `adapters.spaces` names leaves. Does
not know envs, the engine, or TensorDicts.

The specs equal those of ``torchrl.envs.GymWrapper``, from whose own conversion they
come, wherever that wrapper can run the env. `SpaceCodec` tells what is done elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from torchrl.data import Composite, TensorSpec
from torchrl.envs.libs.gym import _is_from_pixels

from shoal.errors import SpecError
from shoal.torchrl._space_trees import Compiler, Leaf, Space, Tree, gymnasium_in_torchrl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shoal.engine.spec import LeafPath
    from shoal.torchrl._leaf_codecs import LeafCodec

__all__ = ["Field", "Key", "SpaceCodec"]

Key = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor, or list of objects, on the TorchRL side.

    Attributes:
        key: where it is in the TensorDict.
        paths: the leaves of the engine that it stands for.
        codec: the way between the two.
        where: what messages call it.
    """

    key: Key
    paths: tuple[LeafPath, ...]
    codec: LeafCodec
    where: str


class SpaceCodec:
    """The specs of one env, and what turns batches of many into each other's form.

    A leaf of the engine and a tensor of TorchRL mostly are the same thing. They differ
    in these cases, where the TorchRL side is

    - for a Box of shape (): of shape (1,);
    - for choices without ``categorical_action_encoding``: one-hot, also as observations;
    - for a Discrete or MultiDiscrete space with a start: counted from 0;
    - for uint16, uint32 and uint64: int32, int64 and int64, since torch has no
      arithmetic for these; a uint64 of 2**63 or more is refused;
    - for a Tuple of leaves with the same spec: stacked along a new first dimension;
    - for a Tuple of Discrete spaces of different sizes: ``MultiCategorical`` or
      ``MultiOneHot``, as for a MultiDiscrete space;
    - for a MultiDiscrete space of several dimensions whose rows differ: integers with
      bounds, in the env's own counting;
    - for a MultiDiscrete action with an ``"action_mask"`` of one entry for each
      combination: the number of the combination;
    - for a Dict: nested by its keys, where ``"state"`` is called ``"observation"``
      unless that is there too (for actions: or is an observation);
    - for any other Tuple: nested by position, as ``("observation", "0")``;
    - for anything without a fixed shape: a list of Python objects.

    An object of this class is not changed by use; any thread may use it.

    Attributes:
        observation_spec: the observations of one env.
        action_spec: the actions of one env: a leaf, which is called ``"action"``, or a
            Composite that holds the action keys.
        observation_fields: the tensors of an observation.
        action_fields: the tensors of an action.
        observation_is_identity: every observation field is its leaf, unchanged.
        identity_observations: key and leaf of the fields that are their leaf unchanged.
        object_observations: the keys whose values are lists of Python objects.
        action_keys: the keys of an action.
        object_actions: the action keys whose values are lists of Python objects.
    """

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        *,
        categorical_action_encoding: bool = True,
        bare_name: str | None = None,
    ) -> None:
        """Compiles both spaces.

        Args:
            observation_space: the env's observation space.
            action_space: the env's action space.
            categorical_action_encoding: choices are numbers rather than one-hot rows.
            bare_name: the key of an observation that is no Dict; ``None`` for
                ``"pixels"`` or ``"observation"``, as ``GymWrapper`` decides.

        Raises:
            SpecError: a space is empty, or has a dtype that torch lacks.
        """
        compiler = Compiler(is_categorical=categorical_action_encoding)
        observation = compiler.tree(observation_space, (), "observation")
        if not isinstance(observation_space, spaces.Dict):
            observation = {bare_name or _bare_name(observation_space): observation}
        assert isinstance(observation, dict)
        action: Tree = compiler.action_tree(observation_space, action_space, observation)
        action_spec = _spec_of(action)
        if not isinstance(action_space, spaces.Dict):
            # A Tuple that stays nested needs a name, since its keys are only positions.
            action = {"action": action}
            action_spec = action_spec if not _is_nested(action_spec) else _spec_of(action)
        self.observation_spec = _spec_of(observation)
        self.action_spec: TensorSpec = action_spec
        self.observation_fields = tuple(_fields_of(observation, (), "observation"))
        self.action_fields = tuple(_fields_of(action, (), "action"))
        self.identity_observations = tuple(
            (f.key, f.paths[0]) for f in self.observation_fields if f.codec.is_identity
        )
        self.observation_is_identity = all(f.codec.is_identity for f in self.observation_fields)
        self.object_observations = _object_keys(self.observation_fields)
        self.action_keys = tuple(field.key for field in self.action_fields)
        self.object_actions = _object_keys(self.action_fields)

    def decode_observation(self, leaves: Mapping[LeafPath, Any]) -> dict[Key, Any]:
        """Returns a batch of observations as the specs describe them.

        Args:
            leaves: a tensor ``[num_envs, *shape]`` for each array leaf, a list of
                ``num_envs`` values for each object leaf. They are passed on where nothing
                has to be done, so they must belong to the caller.

        Returns:
            Tensors ``[num_envs, *spec.shape]``; lists for `object_observations`.

        Raises:
            SpecError: a value is outside its space, so that it has no one-hot form.
        """
        return {
            field.key: field.codec.decode([leaves[path] for path in field.paths], key=field.where)
            for field in self.observation_fields
        }

    def encode_action(self, actions: Mapping[Key, Any], num_envs: int) -> dict[LeafPath, Any]:
        """Returns a batch of actions as the engine takes them, having checked it.

        Args:
            actions: a tensor ``[num_envs, *spec.shape]`` for each of `action_keys`; lists for
                `object_actions`. Other keys are left alone.
            num_envs: the number of rows that there must be.

        Returns:
            Arrays ``[num_envs, *shape]`` of the space's dtype, lists for object leaves. An
            array can share the memory of its tensor.

        Raises:
            SpecError: a key is missing, or a value does not fit; it says which and why.
        """
        encoded: dict[LeafPath, Any] = {}
        for field in self.action_fields:
            try:
                value = actions[field.key]
            except KeyError:
                raise SpecError(
                    key=field.where, expected=f"there, as {field.key!r}", actual="missing"
                ) from None
            parts = field.codec.encode(value, num_envs=num_envs, key=field.where)
            encoded.update(zip(field.paths, parts, strict=True))
        return encoded


def _bare_name(space: Space) -> str:
    if isinstance(space, spaces.Box) and len(space.shape) == 3:
        with gymnasium_in_torchrl():
            if _is_from_pixels(SimpleNamespace(observation_space=space)):
                return "pixels"
    return "observation"


def _spec_of(tree: Tree) -> TensorSpec:
    if isinstance(tree, Leaf):
        return tree.codec.spec
    return Composite({name: _spec_of(child) for name, child in tree.items()})


def _is_nested(spec: TensorSpec) -> bool:
    return isinstance(spec, Composite)


def _fields_of(tree: Tree, key: tuple[str, ...], root: str) -> Iterator[Field]:
    if isinstance(tree, Leaf):
        yield Field(key[0] if len(key) == 1 else key, tree.paths, tree.codec, tree.where)
        return
    for name, child in tree.items():
        yield from _fields_of(child, (*key, name), root)


def _object_keys(fields: tuple[Field, ...]) -> tuple[Key, ...]:
    return tuple(field.key for field in fields if field.codec.is_object)
