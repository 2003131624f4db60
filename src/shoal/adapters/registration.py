"""What a worker must know of the caller's Gymnasium registry.

Knows Gymnasium's registry. Does not know the engine or workers.

A worker does not run the user's main module, so ids registered there, or by packages
imported there, are unknown to it. What is recorded here, in the caller's process,
travels with the factory and fills the gap.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gymnasium.envs.registration import EnvSpec, WrapperSpec, _find_spec, registry

if TYPE_CHECKING:
    import gymnasium

__all__ = ["Registrations", "WrapperCall", "find_spec", "portable"]

WrapperCall = tuple[Callable[..., "gymnasium.Env[Any, Any]"], dict[str, Any]]


def find_spec(env_id: str) -> EnvSpec:
    """Returns the registered spec of an id, as ``gymnasium.make`` would find it.

    ``"module:Env-v0"`` imports the module first; Atari ids import ``ale_py``.

    Raises:
        gymnasium.error.Error: nothing is registered under this id.
    """
    if env_id.startswith("ALE/") or "NoFrameskip" in env_id:
        try:
            importlib.import_module("ale_py")
        except ModuleNotFoundError as error:
            if error.name != "ale_py":
                raise
            # Gymnasium's own message about the unknown id, which follows, says what to do.
    return _find_spec(env_id)


def portable(spec: EnvSpec) -> tuple[EnvSpec, tuple[WrapperCall, ...]]:
    """Returns a copy of a spec that a process with another main module can make.

    An entry point in ``__main__`` is replaced by what it names, which then travels by
    value. Wrappers can only be named by text, so those from the first one in
    ``__main__`` on are taken out and returned, to be applied afterwards.
    """
    spec = copy.copy(spec)
    spec.kwargs = copy.deepcopy(spec.kwargs)
    if isinstance(spec.entry_point, str):
        spec.entry_point = _from_main(spec.entry_point) or spec.entry_point
    named = list(spec.additional_wrappers)
    first = next((i for i, w in enumerate(named) if _from_main(w.entry_point)), len(named))
    spec.additional_wrappers = tuple(named[:first])
    return spec, tuple(_wrapper_call(wrapper) for wrapper in named[first:])


def _from_main(entry_point: str) -> Callable[..., Any] | None:
    module, _, name = entry_point.partition(":")
    if module != "__main__":
        return None
    found: Callable[..., Any] = getattr(sys.modules["__main__"], name)
    return found


def _wrapper_call(wrapper: WrapperSpec) -> WrapperCall:
    if wrapper.kwargs is None:
        raise ValueError(
            f"the wrapper {wrapper.name} cannot be made again, since it does not inherit from"
            " gymnasium.utils.RecordConstructorArgs; pass a function that builds the env instead"
        )
    module, _, name = wrapper.entry_point.partition(":")
    return getattr(importlib.import_module(module), name), copy.deepcopy(wrapper.kwargs)


@dataclass(frozen=True)
class Registrations:
    """The part of a registry that a fresh process does not have.

    Attributes:
        by_value: specs whose entry point is a callable, or was one in ``__main__``.
        by_name: specs of other packages, which register them when imported.
    """

    by_value: tuple[EnvSpec, ...] = ()
    by_name: tuple[EnvSpec, ...] = ()

    _last: ClassVar[tuple[tuple[EnvSpec, ...], Registrations] | None] = None

    @classmethod
    def of_this_process(cls) -> Registrations:
        """Returns what is registered here beyond Gymnasium's own envs.

        As long as the registry stays the same the answer is the same object, which
        therefore is pickled once for any number of factories.
        """
        specs = tuple(registry.values())
        # Tuples compare their items by identity first: fast for an unchanged registry.
        if cls._last is None or cls._last[0] != specs:
            Registrations._last = (specs, cls._of(specs))
        assert cls._last is not None
        return cls._last[1]

    @classmethod
    def _of(cls, specs: tuple[EnvSpec, ...]) -> Registrations:
        by_value = []
        by_name = []
        for spec in specs:
            if callable(spec.entry_point):
                by_value.append(spec)
            elif spec.entry_point is None or spec.entry_point.startswith("gymnasium."):
                continue
            elif not spec.entry_point.startswith("__main__:"):
                by_name.append(spec)
            elif _is_in_main(spec.entry_point):
                by_value.append(portable(spec)[0])
        return cls(tuple(by_value), tuple(by_name))

    def add_by_value(self) -> None:
        """Registers the specs that no import can bring, where their ids are free."""
        for spec in self.by_value:
            registry.setdefault(spec.id, spec)

    def add_by_name(self) -> bool:
        """Imports the packages that register the other specs; ``False`` if there are none.

        This can be slow and large, so it is done only when an id was not found.
        """
        missing = [spec for spec in self.by_name if spec.id not in registry]
        # Import before adding: a package that registers an id for the second time
        # makes Gymnasium warn.
        for package in sorted({_package_of(spec) for spec in missing}):
            # The id that was asked for may be in another package; if it is in this one,
            # Gymnasium's error about the id follows.
            with contextlib.suppress(ImportError):
                importlib.import_module(package)
        for spec in missing:
            registry.setdefault(spec.id, spec)
        return bool(missing)


def _is_in_main(entry_point: str) -> bool:
    return hasattr(sys.modules["__main__"], entry_point.partition(":")[2])


def _package_of(spec: EnvSpec) -> str:
    return str(spec.entry_point).partition(":")[0].partition(".")[0]
