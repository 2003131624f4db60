"""What a caller may ask of an env besides its own methods.

Knows how to look up, set and run things on one object. Does not know env libraries.
A name that begins with ``?`` only asks and changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["SPECIAL", "answer", "call_or_read"]

SPECIAL = frozenset({"?has", "!set", "!map", "!write"})


def answer(
    env: Any, find: Callable[[str], Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Carries out one of the `SPECIAL` calls.

    Args:
        env: the library's env.
        find: looks up a dotted name on it, or raises an ``AttributeError``.
        name: ``"?has"`` says what a name leads to: ``"method"``, ``"value"`` or
            ``"missing"``. ``"!set"`` sets an attribute. ``"!map"`` runs a function on the
            env. ``"!write"`` puts it into the state of another one.
        args: of the call.
        kwargs: of the call.

    Raises:
        NotImplementedError: the env cannot be put into the state of another one.
    """
    if name == "?has":
        try:
            return "method" if callable(find(args[0])) else "value"
        except AttributeError:
            return "missing"
    if name == "!set":
        owner, _, last = args[0].rpartition(".")
        target = find(owner) if owner else env
        setter = getattr(target, "set_wrapper_attr", None)
        if setter is None:
            setattr(target, last, args[1])
        else:
            setter(last, args[1])
        return None
    if name == "!map":
        function, positional, named = args
        return function(env, *positional, **named)
    try:
        env[slice(None)] = args[0]
    except (TypeError, NotImplementedError, AttributeError) as exc:
        raise NotImplementedError(
            f"a {type(env).__name__} does not support snapshot writeback: it cannot be put into"
            f" the state of another env ({type(exc).__name__}: {exc})"
        ) from exc
    return None


def call_or_read(found: Any, where: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls what was found, or returns it if it is no method.

    Raises:
        TypeError: it is no method, but there are arguments.
    """
    if callable(found):
        return found(*args, **kwargs)
    if args or kwargs:
        raise TypeError(f"{where} is a {type(found).__name__}; it takes no arguments")
    return found
