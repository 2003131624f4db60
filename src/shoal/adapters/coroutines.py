"""An env with Gymnasium's members, whose reset and step are coroutines, as the engine's env.

Knows Gymnasium's spaces, the env contract and specs. Does not know the engine, event
loops or any framework; never imports torch.
"""

from __future__ import annotations

import copy
import inspect
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np

from shoal.adapters.calls import SPECIAL, answer, call_or_read
from shoal.adapters.gymnasium import GymnasiumDescription
from shoal.adapters.spaces import builder, flattener, leaves_of
from shoal.engine.env import find_plain_methods
from shoal.engine.spec import ArraySpec, EnvSpec, LeafPath

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

__all__ = ["AsyncGymnasiumEnv", "AsyncGymnasiumFactory"]

_MEMBERS = ("reset", "step", "observation_space", "action_space")


class AsyncGymnasiumEnv:
    """An object with Gymnasium's members as an `shoal.engine.AsyncEnv`.

    Resets are prepared ahead only where the object has Gymnasium's ``np_random``: nobody
    else can put back what a reset has drawn.

    Attributes:
        env: the object.
        step: its own bound method, with nothing in between.
        observation_space: its observation space.
        action_space: its action space.
        metadata: its metadata.
        spec: the leaves of both spaces, and the info entries asked for.
        flatten_observation: see `shoal.engine.env.Env`.
        build_action: see `shoal.engine.env.Env`.
    """

    def __init__(self, env: Any, *, info: Mapping[LeafPath, ArraySpec] | None = None) -> None:
        """Checks the env and reads its spaces; does not reset it.

        Args:
            env: has ``observation_space``, ``action_space``, ``async def reset(*, seed,
                options)`` and ``async def step(action)``; perhaps ``close``, plain or not.
            info: numeric entries of the info dict that travel with every result.

        Raises:
            TypeError: it is something else.
            SpecError: one of its spaces cannot be described.
        """
        _check_is_async_env(env)
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.metadata: dict[str, Any] = getattr(env, "metadata", {})
        self.step: Callable[[Any], Awaitable[tuple[Any, Any, Any, Any, dict[str, Any]]]] = env.step
        self._innermost = getattr(env, "unwrapped", env)
        self.spec = EnvSpec(
            observation=leaves_of(env.observation_space, root="observation"),
            action=leaves_of(env.action_space, root="action"),
            info=info or {},
            undoes_resets=_may_draw_from_np_random(self._innermost),
        )
        self.flatten_observation: Callable[[Any], Sequence[Any]] | None = flattener(
            env.observation_space, root="observation"
        )
        self.build_action: Callable[[Sequence[Any]], Any] | None = builder(
            env.action_space, root="action"
        )
        self._next_seed: int | None = None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None, **more: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Resets the env, with the seed that `seed` has kept if none is given here."""
        if seed is None:
            seed = self._next_seed
        result: tuple[Any, dict[str, Any]] = await self.env.reset(
            seed=seed, options=options, **more
        )
        self._next_seed = None
        return result

    def seed(self, seed: int | None) -> None:
        """Keeps the seed for the next reset.

        Args:
            seed: the seed; ``None`` takes a fresh random one.
        """
        self._next_seed = secrets.randbits(31) if seed is None else seed

    def save_rng(self) -> object:
        """Returns the seed that is kept and the state of the env's random generator."""
        generator = _find_generator(self._innermost)
        return self._next_seed, None if generator is None else generator.bit_generator.state

    def load_rng(self, state: object) -> None:
        """Puts back what `save_rng` returned."""
        if not isinstance(state, tuple):
            return
        self._next_seed, generator_state = state
        generator = _find_generator(self._innermost)
        if generator is not None and generator_state is not None:
            generator.bit_generator.state = generator_state

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a method of the env, coroutine or not, or returns an attribute.

        ``"?describe"`` returns a `GymnasiumDescription`; see also `calls`.

        Args:
            name: its name; dots lead into attributes of attributes.
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            AttributeError: the env does not have it.
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

    def close(self) -> Any:
        """Closes the env, if it can be closed; returns what to await, if anything."""
        close = getattr(self.env, "close", None)
        return None if close is None else close()


@dataclass(frozen=True)
class AsyncGymnasiumFactory:
    """Builds one `AsyncGymnasiumEnv`, on the event loop that will run it.

    It need not be picklable.

    Attributes:
        target: returns the env, or is a coroutine function that does: a class, for one.
        kwargs: its keyword arguments; each env gets a copy.
        info: numeric entries of the info dict that travel with every result.
    """

    target: Callable[..., Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[LeafPath, ArraySpec] | None = None

    async def __call__(self) -> AsyncGymnasiumEnv:
        """Builds the env.

        Raises:
            TypeError: the target returned something else.
        """
        made = self.target(**copy.deepcopy(dict(self.kwargs)))
        env = await made if inspect.isawaitable(made) else made
        return AsyncGymnasiumEnv(env, info=self.info)


def _check_is_async_env(env: object) -> None:
    missing = [member for member in _MEMBERS if getattr(env, member, None) is None]
    if isinstance(env, type):
        what = "which is a class. Call it, so that there is an env."
    elif missing:
        what = f"which has no {', '.join(missing)}."
    elif plain := find_plain_methods(env):
        what = (
            f"whose {' and '.join(plain)} {'are' if len(plain) > 1 else 'is'} plain. Write"
            ' `async def`, or use a GymnasiumFactory and backend="threads" or "processes".'
        )
    else:
        return
    raise TypeError(
        f"expected an env with {', '.join(_MEMBERS)}, whose reset and step are coroutine"
        f" functions, but got {_named(env)}, {what}"
    )


def _may_draw_from_np_random(env: Any) -> bool:
    return isinstance(env, gymnasium.Env) or _find_generator(env) is not None


def _find_generator(env: Any) -> np.random.Generator | None:
    # Gymnasium's own property makes a generator where there is none yet.
    name = "_np_random" if isinstance(env, gymnasium.Env) else "np_random"
    generator = getattr(env, name, None)
    return generator if isinstance(generator, np.random.Generator) else None


def _named(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
