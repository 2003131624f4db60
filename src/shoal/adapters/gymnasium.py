"""A Gymnasium env as the engine's env, and the factory that builds one in a worker.

Knows Gymnasium, the env contract and specs. Does not know the engine, workers or any
framework; never imports torch.
"""

from __future__ import annotations

import copy
import os
import secrets
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

from shoal.adapters.calls import SPECIAL, answer, call_or_read
from shoal.adapters.registration import Registrations, WrapperCall, find_spec, portable
from shoal.adapters.shortcuts import short_step
from shoal.adapters.spaces import builder, flattener, leaves_of
from shoal.engine.spec import ArraySpec, EnvSpec, LeafPath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["GymnasiumDescription", "GymnasiumEnv", "GymnasiumFactory", "is_cheap"]

AnyEnv = gymnasium.Env[Any, Any]

_CHEAP = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
_MEMBERS = ("reset", "step", "close", "observation_space", "action_space")


@dataclass(frozen=True)
class GymnasiumDescription:
    """What a worker says of its env, which nobody else has seen.

    Attributes:
        observation_space: the env's observation space.
        action_space: the env's action space.
        text: the env's id, or what it says of itself.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    text: str

    @classmethod
    def of(cls, env: Any) -> GymnasiumDescription:
        """Returns the description of an env."""
        return cls(env.observation_space, env.action_space, text_of(env))


class GymnasiumEnv:
    """A ``gymnasium.Env`` as the engine sees it.

    Attributes:
        env: the Gymnasium env.
        step: what the env's own method does; see `shortcuts`.
        reset: the env's own bound method, with nothing in between.
        observation_space: the env's observation space.
        action_space: the env's action space.
        metadata: the env's metadata.
        spec: the leaves of both spaces, and the info entries asked for.
        flatten_observation: see `shoal.engine.env.Env`.
        build_action: see `shoal.engine.env.Env`.
    """

    def __init__(self, env: AnyEnv, *, info: Mapping[LeafPath, ArraySpec] | None = None) -> None:
        """Checks the env and reads its spaces; does not reset it.

        Args:
            env: a ``gymnasium.Env``, or an object with the same methods and spaces.
            info: numeric entries of the info dict that travel with every result.

        Raises:
            TypeError: it is something else, such as a vector env or a TorchRL env.
            SpecError: one of its spaces cannot be described.
        """
        check_is_env(env)
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.metadata: dict[str, Any] = getattr(env, "metadata", {})
        self.step: Callable[[Any], tuple[Any, Any, Any, Any, dict[str, Any]]] = short_step(env)
        self.reset: Callable[..., tuple[Any, dict[str, Any]]] = env.reset
        self.spec = EnvSpec(
            observation=leaves_of(env.observation_space, root="observation"),
            action=leaves_of(env.action_space, root="action"),
            info=info or {},
        )
        self.flatten_observation: Callable[[Any], Sequence[Any]] | None = flattener(
            env.observation_space, root="observation"
        )
        self.build_action: Callable[[Sequence[Any]], Any] | None = builder(
            env.action_space, root="action"
        )
        self._innermost = getattr(env, "unwrapped", env)

    def seed(self, seed: int | None) -> None:
        """Seeds the env by a reset; the next reset without a seed goes on from there.

        Args:
            seed: the seed; ``None`` takes a fresh random one.

        Raises:
            TypeError: its ``reset`` takes no seed and it has no ``seed`` method.
        """
        if seed is None:
            seed = secrets.randbits(31)
        try:
            self.env.reset(seed=seed)
        except TypeError as error:
            if not _is_about_seed_argument(error):
                raise
            self._seed_by_method(seed, error)

    def _seed_by_method(self, seed: int, reset_error: TypeError) -> None:
        try:
            seed_method = self._find("seed")
        except AttributeError:
            raise TypeError(
                f"{_named(self._innermost)} cannot be seeded: its reset takes no seed, and it has"
                " no seed method. Give reset the arguments `*, seed=None, options=None`."
            ) from reset_error
        seed_method(seed)

    def save_rng(self) -> object:
        """Returns the state of the env's random generator, or ``None`` if it has none yet."""
        generator = getattr(self._innermost, "_np_random", None)
        if not isinstance(generator, np.random.Generator):
            return None
        return generator.bit_generator.state

    def load_rng(self, state: object) -> None:
        """Puts back what `save_rng` returned; does nothing for ``None``."""
        generator = getattr(self._innermost, "_np_random", None)
        if isinstance(state, dict) and isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the env or of one of its wrappers, or returns an attribute.

        ``"?describe"`` returns a `GymnasiumDescription`; see also `calls`.

        Args:
            name: its name; dots lead into attributes of attributes.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            AttributeError: neither the env nor a wrapper has it.
            TypeError: it is not callable, but there are arguments.
        """
        if name == "?describe":
            return GymnasiumDescription.of(self.env)
        if name in SPECIAL:
            return answer(self.env, self._find, name, args, kwargs)
        return call_or_read(self._find(name), f"{name} of {_named(self.env)}", args, kwargs)

    def _find(self, name: str) -> Any:
        found: Any = self.env
        for part in name.split("."):
            look_up = getattr(found, "get_wrapper_attr", None)
            found = getattr(found, part) if look_up is None else look_up(part)
        return found

    def close(self) -> None:
        """Closes the env."""
        self.env.close()


@dataclass(frozen=True)
class GymnasiumFactory:
    """Builds one `GymnasiumEnv`, in whichever process it is called.

    Make it with `of`, in the process that knows the ids. It can be pickled with
    cloudpickle, and needs nothing of the main module where it is called.

    Attributes:
        target: an id, a Gymnasium ``EnvSpec``, or a callable that returns an env.
        kwargs: keyword arguments of ``gymnasium.make`` or of the callable.
        info: numeric entries of the info dict that travel with every result.
        defaults: what ``gymnasium.make`` is told where `kwargs` are silent. With
            ``"torchrl"`` it is what TorchRL's ``GymEnv`` tells it: no env checker, and
            a frame skip of 1 if the env has that argument. (The ids of Atari games ask
            for a frame skip of 4.)
        wrappers: wrappers to put around the env, with their arguments.
        registrations: the ids that the callable may ask for.
        quiet_except_in: workers show no warnings; the id of the process that does.
    """

    target: str | GymnasiumSpec | Callable[..., AnyEnv]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[LeafPath, ArraySpec] | None = None
    defaults: Literal["gymnasium", "torchrl"] = "gymnasium"
    wrappers: tuple[WrapperCall, ...] = ()
    registrations: Registrations = field(default_factory=Registrations, repr=False)
    quiet_except_in: int | None = None

    @classmethod
    def of(
        cls,
        target: str | GymnasiumSpec | Callable[..., AnyEnv],
        kwargs: Mapping[str, Any] | None = None,
        info: Mapping[LeafPath, ArraySpec] | None = None,
        *,
        defaults: Literal["gymnasium", "torchrl"] = "gymnasium",
        quiet_except_in: int | None = None,
    ) -> GymnasiumFactory:
        """Returns a factory, having looked up here what cannot be found elsewhere.

        Args:
            target: an id, a Gymnasium ``EnvSpec``, or a callable that returns an env.
            kwargs: its keyword arguments. They are copied.
            info: numeric entries of the info dict that travel with every result.
            defaults: see the class.
            quiet_except_in: see the class.

        Raises:
            gymnasium.error.Error: nothing is registered under this id.
            TypeError: the target is something else.
        """
        kwargs = copy.deepcopy(dict(kwargs or {}))
        if isinstance(target, str):
            target = find_spec(target)
        if isinstance(target, GymnasiumSpec):
            target, wrappers = portable(target)
            return cls(target, kwargs, info, defaults, wrappers, quiet_except_in=quiet_except_in)
        if not callable(target):
            raise TypeError(
                "an env is named by an id, a gymnasium EnvSpec or a callable that returns a"
                f" gymnasium.Env, not by {_named(target)}"
            )
        registrations = Registrations.of_this_process()
        return cls(target, kwargs, info, defaults, (), registrations, quiet_except_in)

    @property
    def preload(self) -> tuple[str, ...]:
        """Modules that every worker needs, imported once before they are forked."""
        return ("gymnasium", __name__)

    @property
    def is_cheap(self) -> bool:
        """Whether a step is known to take microseconds, as in Gymnasium's small games."""
        return is_cheap(self.target)

    def __call__(self) -> GymnasiumEnv:
        """Builds the env.

        Raises:
            TypeError: the callable returned something that is not a Gymnasium env.
        """
        if self.quiet_except_in not in (None, os.getpid()):
            warnings.filterwarnings("ignore")
        if isinstance(self.target, str | GymnasiumSpec):
            env = self._make(self.target)
        else:
            env = self._call(self.target)
        for wrapper, kwargs in self.wrappers:
            env = wrapper(env=env, **copy.deepcopy(kwargs))
        return GymnasiumEnv(env, info=self.info)

    def _make(self, target: str | GymnasiumSpec) -> AnyEnv:
        # Copied once more: several envs built by one factory must not share arguments.
        kwargs = copy.deepcopy(dict(self.kwargs))
        if self.defaults == "gymnasium":
            return gymnasium.make(target, **kwargs)
        kwargs.setdefault("disable_env_checker", True)
        if "frameskip" not in kwargs:
            # Whether an env has this argument is known only by trying.
            try:
                return gymnasium.make(target, frameskip=1, **kwargs)
            except TypeError as error:
                if "unexpected keyword argument 'frameskip'" not in str(error):
                    raise
        return gymnasium.make(target, **kwargs)

    def _call(self, target: Callable[..., AnyEnv]) -> AnyEnv:
        self.registrations.add_by_value()
        try:
            return target(**copy.deepcopy(dict(self.kwargs)))
        except gymnasium.error.UnregisteredEnv:
            if not self.registrations.add_by_name():
                raise
        return target(**copy.deepcopy(dict(self.kwargs)))


def is_cheap(spec: Any) -> bool:
    """Returns whether a Gymnasium ``EnvSpec`` is of one of the small games."""
    entry_point = getattr(spec, "entry_point", None)
    return isinstance(entry_point, str) and entry_point.startswith(_CHEAP)


def text_of(env: Any) -> str:
    """Returns what messages call an env: its id, or what it says of itself."""
    spec = getattr(env, "spec", None)
    if spec is not None:
        return str(getattr(spec, "id", spec))
    try:
        return str(env)
    except Exception:  # noqa: BLE001  border: the env is foreign code, and this only a name
        return type(env).__name__


def check_is_env(env: object) -> None:
    """Checks that an object can be used as a ``gymnasium.Env``.

    Raises:
        TypeError: it cannot; the message says what it is instead.
    """
    what = _what_instead(env)
    if what is not None:
        raise TypeError(
            f"expected a gymnasium.Env (or an object with {', '.join(_MEMBERS)}),"
            f" but got {_named(env)}, {what}"
        )


def _what_instead(env: object) -> str | None:
    if isinstance(env, type):
        return "which is a class. Call it, so that there is an env."
    # Told by name: none of these libraries may be imported for the question's sake.
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(env).__mro__}
    names = {name for _, name in bases}
    if ("torchrl", "EnvBase") in bases:
        return "which is a TorchRL env. Pass the Gymnasium env inside it, or its id."
    if names & {"VectorEnv", "VecEnv"}:
        return "which is a vector of envs. Pass a factory of one env; shoal makes the vector."
    if ("gym", "Env") in bases and not isinstance(env, gymnasium.Env):
        return (
            "which is an env of the old gym library."
            " Port it to gymnasium, or wrap it with shimmy's GymV21CompatibilityV0 or"
            " GymV26CompatibilityV0."
        )
    missing = [member for member in _MEMBERS if getattr(env, member, None) is None]
    if missing:
        return f"which has no {', '.join(missing)}."
    return None


def _named(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_about_seed_argument(error: TypeError) -> bool:
    text = str(error)
    return "unexpected keyword argument 'seed'" in text or "takes no keyword arguments" in text
