"""Attributes and methods of the children, by name, on the batched env itself.

Knows which names belong to the children and what an access returns. Does not know
how envs are reached; the batched env's `_call` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Deferred", "Dispatch", "NotStartedError"]

# What EnvBase and nn.Module ask for without having it; children are never asked.
_NEVER = frozenset(
    {"is_closed", "parent_channels", "batch_size", "_dummy_env_str", "shared_tensordict_parent"}
)


class NotStartedError(RuntimeError, AttributeError):
    """The children do not run, so nobody can say what they have.

    An ``AttributeError`` as well, so that ``hasattr`` answers false instead of raising.
    """


class Deferred:
    """An attribute of all children, not yet fetched.

    Calling it calls their methods, iterating over it reads their values, an attribute
    of it leads on. Each is one round trip for all children together.
    """

    __slots__ = ("_env", "_name")

    def __init__(self, env: Any, name: str) -> None:
        self._env = env
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Calls the method of every child, or reads the value of what is none.

        The batched env among the arguments is left out: it cannot travel.

        Returns:
            One result per child.

        Raises: what a child raised; nothing else has happened to it or to the others.
        """
        mine = [arg for arg in args if arg is not self._env]
        values: list[Any] = self._env._call(self._name, *mine, **kwargs)
        return values

    def __iter__(self) -> Iterator[Any]:
        return iter(self())

    def __getattr__(self, name: str) -> Deferred:
        if name.startswith("_"):
            raise AttributeError(f"{self._name}.{name} of the children is private")
        return Deferred(self._env, f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<{self._name} of {self._env.num_workers} envs; call it, or iterate over it>"


class Dispatch:
    """Looks up on the children what the batched env does not have itself."""

    _defers_values: ClassVar[bool]
    _env_text: str
    is_closed: Any
    _call: Callable[..., list[Any]]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            if name.startswith("__") or name in _NEVER or name in type(self).__dict__:
                raise
        if name in dir(type(self)):
            # A property of ours that raised an AttributeError from within.
            raise AttributeError(f"{type(self).__name__}.{name} is not available now")
        if self.is_closed:
            raise NotStartedError(
                f"{type(self).__name__} has no attribute {name!r}, and its envs, which may have"
                " it, do not run: start them first, for example with env.reset()"
            )
        kinds = self._call("?has", name)
        if "missing" in kinds:
            raise AttributeError(f"{name!r} was not found in {self._env_text}")
        if kinds[0] == "value" and not self._defers_values:
            return self._call(name)
        return Deferred(self, name)

    def set_children_attr(self, name: str, value: Any) -> None:
        """Sets an attribute of every child; dots lead to attributes of attributes.

        Args:
            name: the attribute.
            value: travels to the workers by value.

        Raises: what a child raised.
        """
        self._call("!set", name, value)

    def map(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Runs ``function(child, *args, **kwargs)`` where each child lives.

        Args:
            function: may be a lambda or closure; it travels by value, and gets the child's
                TorchRL env, or its Gymnasium env where it was made as one.
            *args: positional arguments, the same for all.
            **kwargs: keyword arguments, the same for all.

        Returns:
            One result per child; results come back by value.

        Raises: what a child raised.
        """
        return self._call("!map", function, args, kwargs)
