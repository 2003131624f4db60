"""Envs that do what a script says: count, draw, echo, and go wrong where they are told.

They follow the env contract of `shoal.engine` and use no library but numpy, so a
test says in one line what an env does at which call, in whatever process it lives.
"""

from __future__ import annotations

import copy
import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shoal.engine.spec import ArraySpec, EnvSpec, LeafPath, LeafSpec, describe_path
from shoal.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shoal.testing.gates import Gate

__all__ = ["Fault", "How", "ScriptedEnv", "ScriptedError", "ScriptedFactory", "Verb"]

Verb = Literal["build", "reset", "step", "seed", "call", "close"]
_SPEC_VALUES = ("observation", "reward", "terminated", "truncated", "info")


class How(Enum):
    """What an env does when its fault strikes."""

    RAISE = auto()  # `ScriptedError`
    RAISE_UNPICKLABLE = auto()  # an error that cannot leave the process
    RAISE_UNLOADABLE = auto()  # an error that leaves it, and cannot be rebuilt elsewhere
    INTERRUPT = auto()  # Ctrl-C, in the env's own process
    SYS_EXIT = auto()  # sys.exit(7)
    HARD_EXIT = auto()  # os._exit(7)
    SIGKILL = auto()
    SEGFAULT = auto()
    HANG = auto()
    GATE = auto()  # waits at the fault's gate, then goes on as if nothing had been
    PRINT = auto()  # writes to stdout, through Python and to the descriptor
    OBSERVATION = auto()  # returns the fault's value in its place; the same for the others
    REWARD = auto()
    TERMINATED = auto()
    TRUNCATED = auto()
    INFO = auto()


class ScriptedError(ValueError):
    """What a scripted env raises. It says which env it was, and at what."""


class UnpicklableError(ScriptedError):
    """Holds a lock, so it cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class UnloadableError(ScriptedError):
    """Can be pickled, but not rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse_to_load, (str(self),))


class UnloadableValue:
    """A value that can be pickled, but not rebuilt."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse_to_load, ("a value",))


def _refuse_to_load(text: str) -> None:
    raise LookupError(f"{text} cannot be rebuilt here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and when.

    Attributes:
        how: what happens.
        at: the verb during which it happens.
        number: at the how-manieth time the verb is called, from 1; 0 for every time.
        value: what is returned, where ``how`` replaces something.
        gate: where the env waits, for `How.GATE`.
    """

    how: How
    at: Verb = "step"
    number: int = 1
    value: Any = None
    gate: Gate | None = None

    def strikes(self, verb: str, number: int) -> bool:
        """Returns whether it happens at this call."""
        return self.at == verb and self.number in (0, number)


def _default_observation() -> Mapping[LeafPath, LeafSpec]:
    return {
        ("count",): ArraySpec((), np.dtype(np.int64)),
        ("draw",): ArraySpec((3,), np.dtype(np.float64)),
    }


def _default_action() -> Mapping[LeafPath, LeafSpec]:
    return {(): ArraySpec((), np.dtype(np.int64))}


@dataclass(frozen=True, kw_only=True)
class ScriptedFactory:
    """Builds scripted envs. Picklable, if its faults are.

    Attributes:
        name: what the env calls itself in errors, infos and the journal.
        episode_length: steps until an episode ends; 0 for never.
        ends_by: the flag that an end sets.
        observation: leaves of the observation. Integers count the steps of the
            episode (modulo 100), floats are drawn from the env's generator, booleans are
            true at odd counts, objects are dicts with a count and a draw.
        action: leaves of the action; their sum goes into the reward.
        info: numeric info entries, by path; ``("episode",)`` and ``("count",)`` are
            known, others are left out by the env.
        faults: what goes wrong.
        payload_bytes: size of ``info["payload"]``; 0 for none.
        reuses_buffers: hand out the same arrays and the same info dict each time.
        abuses_actions: keep every action, and overwrite it after use.
        work_s: seconds of work per step.
        journal: a file that gets a line per build and close.
    """

    name: str = "env"
    episode_length: int = 0
    ends_by: Literal["terminated", "truncated"] = "terminated"
    observation: Mapping[LeafPath, LeafSpec] = field(default_factory=_default_observation)
    action: Mapping[LeafPath, LeafSpec] = field(default_factory=_default_action)
    info: Mapping[LeafPath, ArraySpec] = field(default_factory=dict)
    faults: Sequence[Fault] = ()
    payload_bytes: int = 0
    reuses_buffers: bool = False
    abuses_actions: bool = False
    work_s: float = 0.0
    journal: str | None = None

    def __call__(self) -> ScriptedEnv:
        """Returns a new env, unless a fault says otherwise."""
        return ScriptedEnv(self)


class ScriptedEnv:
    """An env whose every result follows from its seeds, its actions and its script.

    Attributes:
        factory: the script.
        spec: its leaves.
        count: steps since the last reset.
        episode: resets so far.
        kept_actions: actions it has kept, if it abuses them.
    """

    def __init__(self, factory: ScriptedFactory) -> None:
        self.factory = factory
        self._numbers: dict[str, int] = {}
        self._replaced: dict[str, Any] = {}
        self._strike("build")
        self._write_journal("build")
        self.spec = EnvSpec(factory.observation, factory.action, factory.info)
        self.count = 0
        self.episode = 0
        self.kept_actions: list[Any] = []
        self._rng = np.random.default_rng(0)
        self._buffers: dict[LeafPath, Any] = {}
        self._info: dict[str, Any] = {}
        is_bare = list(factory.observation) == [()]
        self.flatten_observation = None if is_bare else self._flatten
        self.build_action = None if list(factory.action) == [()] else self._build_action

    # --- the contract --------------------------------------------------------------

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins an episode; the options come back in the info."""
        self._strike("reset")
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.count = 0
        self.episode += 1
        info = self._new_info(seed=seed, options=options)
        return self._returned("observation", self._observation()), self._returned("info", info)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Counts one up; the reward is a draw plus the sum of the action."""
        self._strike("step")
        self._work()
        self.count += 1
        reward = float(self._rng.random()) + _sum_of(action)
        info = self._new_info(action=copy.deepcopy(action))
        if self.factory.abuses_actions:
            self.kept_actions.append(action)
            _overwrite(action)
        is_end = self.count == self.factory.episode_length
        by_terminated = self.factory.ends_by == "terminated"
        return (
            self._returned("observation", self._observation()),
            self._returned("reward", reward),
            self._returned("terminated", is_end and by_terminated),
            self._returned("truncated", is_end and not by_terminated),
            self._returned("info", info),
        )

    def seed(self, seed: int | None) -> None:
        """Seeds the generator."""
        self._strike("seed")
        self._rng = np.random.default_rng(seed)

    def save_rng(self) -> object:
        """Returns the generator's state."""
        return self._rng.bit_generator.state

    def load_rng(self, state: Any) -> None:
        """Puts the generator's state back."""
        self._rng.bit_generator.state = state

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls one of its methods, or reads an attribute."""
        self._strike("call")
        member = reduce(getattr, name.split("."), self)
        return member(*args, **kwargs) if callable(member) else member

    def close(self) -> None:
        """Writes to the journal."""
        self._strike("close")
        self._write_journal("close")

    # --- what tests ask for --------------------------------------------------------

    def echo(self, value: Any) -> Any:
        """Returns what it got."""
        return value

    def pid(self) -> int:
        """Returns the process it lives in."""
        return os.getpid()

    def modules(self) -> list[str]:
        """Returns the names of all modules its process has imported."""
        return sorted(sys.modules)

    def new_lock(self) -> Any:
        """Returns something that cannot be pickled."""
        return threading.Lock()

    def unloadable(self) -> Any:
        """Returns something that can be pickled, but not rebuilt."""
        return UnloadableValue()

    # --- how it works --------------------------------------------------------------

    def _observation(self) -> Any:
        leaves = {path: self._leaf(path, leaf) for path, leaf in self.spec.observation.items()}
        return _nest(leaves)

    def _leaf(self, path: LeafPath, leaf: LeafSpec) -> Any:
        value: Any
        if not isinstance(leaf, ArraySpec):
            value = {"count": self.count, "draw": float(self._rng.random())}
            if self.factory.reuses_buffers:
                kept = self._buffers.setdefault(path, {})
                kept.update(value)
                return kept
            return value
        if leaf.dtype.kind in "iu":
            value = np.full(leaf.shape, self.count % 100, leaf.dtype)
        elif leaf.dtype.kind == "b":
            value = np.full(leaf.shape, self.count % 2, leaf.dtype)
        else:
            value = np.asarray(self._rng.random(leaf.shape)).astype(leaf.dtype)
        if self.factory.reuses_buffers:
            kept = self._buffers.setdefault(path, np.zeros(leaf.shape, leaf.dtype))
            kept[...] = value
            return kept
        return value[()]  # a scalar where there is no shape, else the array

    def _flatten(self, observation: Any) -> list[Any]:
        values = []
        remaining = _count_leaves(observation)
        for path in self.spec.observation:
            value = observation
            for name in path:
                if name not in value:
                    raise SpecError(
                        key=describe_path("observation", path), expected="there", actual="missing"
                    )
                value = value[name]
            remaining -= 1
            values.append(value)
        objects = sum(not isinstance(leaf, ArraySpec) for leaf in self.spec.observation.values())
        if remaining and not objects:
            raise SpecError(
                key="observation",
                expected=f"the leaves {sorted(self.spec.observation)}",
                actual=f"a mapping with {remaining} more",
            )
        return values

    def _build_action(self, leaves: Sequence[Any]) -> Any:
        return _nest(dict(zip(self.spec.action, leaves, strict=True)))

    def _new_info(self, **entries: Any) -> dict[str, Any]:
        info = self._info if self.factory.reuses_buffers else {}
        info.clear()
        info.update(name=self.factory.name, count=self.count, episode=self.episode, **entries)
        if self.factory.payload_bytes:
            info["payload"] = bytes([self.count % 256]) * self.factory.payload_bytes
        return info

    def _returned(self, what: str, value: Any) -> Any:
        return self._replaced.pop(what, value)

    def _strike(self, verb: Verb) -> None:
        number = self._numbers[verb] = self._numbers.get(verb, 0) + 1
        self._replaced.clear()
        for fault in self.factory.faults:
            if fault.strikes(verb, number):
                self._do(fault, f"{self.factory.name} at {verb} {number}")

    def _do(self, fault: Fault, where: str) -> None:
        what = fault.how.name.lower()
        if what in _SPEC_VALUES:
            self._replaced[what] = fault.value
            return
        _ACTS[fault.how](where, fault)

    def _work(self) -> None:
        if self.factory.work_s:
            until = time.perf_counter() + self.factory.work_s
            while time.perf_counter() < until:
                pass

    def _write_journal(self, verb: str) -> None:
        if self.factory.journal is not None:
            with Path(self.factory.journal).open("a") as journal:
                journal.write(f"{verb} {self.factory.name}\n")


# --- faults ------------------------------------------------------------------------


def _raise(where: str, fault: Fault) -> None:
    raise ScriptedError(where)


def _raise_unpicklable(where: str, fault: Fault) -> None:
    raise UnpicklableError(where)


def _raise_unloadable(where: str, fault: Fault) -> None:
    raise UnloadableError(where)


def _interrupt(where: str, fault: Fault) -> None:
    signal.raise_signal(signal.SIGINT)


def _sys_exit(where: str, fault: Fault) -> None:
    sys.exit(7)


def _hard_exit(where: str, fault: Fault) -> None:
    os._exit(7)


def _kill(where: str, fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash(where: str, fault: Fault) -> None:
    ctypes.string_at(0)


def _hang(where: str, fault: Fault) -> None:
    threading.Event().wait()


def _wait_at_gate(where: str, fault: Fault) -> None:
    if fault.gate is not None:
        fault.gate.enter()


def _print(where: str, fault: Fault) -> None:
    sys.stdout.write(f"{where} says hello\n")
    sys.stdout.flush()
    os.write(1, f"{where} writes to the descriptor\n".encode())


_ACTS = MappingProxyType(
    {
        How.RAISE: _raise,
        How.RAISE_UNPICKLABLE: _raise_unpicklable,
        How.RAISE_UNLOADABLE: _raise_unloadable,
        How.INTERRUPT: _interrupt,
        How.SYS_EXIT: _sys_exit,
        How.HARD_EXIT: _hard_exit,
        How.SIGKILL: _kill,
        How.SEGFAULT: _crash,
        How.HANG: _hang,
        How.GATE: _wait_at_gate,
        How.PRINT: _print,
    }
)


# --- trees -------------------------------------------------------------------------


def _nest(leaves: Mapping[LeafPath, Any]) -> Any:
    if list(leaves) == [()]:
        return leaves[()]
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        place = tree
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return tree


def _count_leaves(tree: Any) -> int:
    return sum(map(_count_leaves, tree.values())) if isinstance(tree, dict) else 1


def _sum_of(action: Any) -> float:
    if isinstance(action, dict):
        return sum(map(_sum_of, action.values()))
    if isinstance(action, str | bytes):
        return float(len(action))
    return float(np.sum(np.asarray(action)).real)


def _overwrite(action: Any) -> None:
    if isinstance(action, dict):
        for value in action.values():
            _overwrite(value)
    elif isinstance(action, np.ndarray):
        action[...] = 77
