"""One env and the commands that its own thread carries out.

Knows the host and a queue. Does not know other envs, or where results go.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from shoal.engine.core.messages import (
    CallEnvs,
    EnvFailure,
    LeaveLoop,
    Returned,
    SeedEnvs,
    SetActions,
)
from shoal.engine.spec import EnvSpec
from shoal.engine.worker.host import Host, describe_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from queue import SimpleQueue

    from shoal.engine.core.layout import Arrays
    from shoal.engine.env import Env, EnvFactory

__all__ = [
    "Ask",
    "AttachRows",
    "BuildEnv",
    "Command",
    "Outlet",
    "Report",
    "ResetRow",
    "Resident",
    "RunRow",
]


class Outlet(Protocol):
    """Where results go. Called by the threads of the envs."""

    def publish(self, host: Host, indices: Sequence[int]) -> None:
        """Takes the notes of one env, then hands its row over."""
        ...

    def on_done(self, env_id: int) -> None:
        """Something that was asked of an env is done, its row handed over."""
        ...

    def on_death(self) -> None:
        """A thread has ended by itself: see `EnvThreads.deaths`."""
        ...


@dataclass(frozen=True, slots=True)
class BuildEnv:
    """Build the env. First of all."""

    factory: EnvFactory


@dataclass(frozen=True, slots=True)
class AttachRows:
    """Write results into these rows from now on."""

    arrays: Arrays
    spec: EnvSpec
    keep_infos: bool


@dataclass(frozen=True, slots=True)
class RunRow:
    """Carry out what the op row says, if anything."""

    number: int


@dataclass(frozen=True, slots=True)
class ResetRow:
    """Reset with a seed or keyword arguments."""

    number: int
    seed: int | None
    kwargs: Mapping[str, Any]
    undo_prepared: bool


@dataclass(frozen=True, slots=True)
class Ask:
    """Carry out a call of this env alone, and tell ``reply``."""

    command: CallEnvs | SeedEnvs
    reply: Callable[[Returned], None]


Command = BuildEnv | AttachRows | RunRow | ResetRow | SetActions | Ask | LeaveLoop
Report = EnvSpec | EnvFailure | None


class Resident:
    """One env, as its own thread sees it."""

    def __init__(self, env_id: int, commands: SimpleQueue[Command], outlet: Outlet) -> None:
        self.env_id = env_id
        self._commands = commands
        self._outlet = outlet
        self._env: Env | None = None
        self._host: Host | None = None

    def serve(
        self, reports: SimpleQueue[tuple[int, Report]], done: list[int], position: int
    ) -> None:
        """Carries out commands until it is told to leave."""
        get, on_done, env_id = self._commands.get, self._outlet.on_done, self.env_id
        while True:
            # Without a deadline: whoever forgets the crew lets its threads leave.
            command = get()
            match command:
                case RunRow(number):
                    self._run()
                    done[position] = number
                    on_done(env_id)
                case ResetRow(number):
                    self._reset(command)
                    done[position] = number
                    on_done(env_id)
                case SetActions(actions):
                    self._open_host().set_action_objects(actions)
                case Ask(call, reply):
                    values, failures = self._open_host().carry_out(call)
                    reply(Returned(call.call_id, values, tuple(failures)))
                case BuildEnv(factory):
                    reports.put((env_id, self._build(factory)))
                    del factory
                case AttachRows():
                    reports.put((env_id, self._attach(command)))
                case LeaveLoop():
                    return
                case _:
                    assert_never(command)
            del command  # it may hold much, and the next one may be long in coming

    def _run(self) -> None:
        host = self._open_host()
        ops, indices = host.pending()
        if indices:
            host.run(ops, indices)
            self._outlet.publish(host, indices)

    def _reset(self, command: ResetRow) -> None:
        host = self._open_host()
        host.reset(0, command.seed, command.kwargs, undo_prepared=command.undo_prepared)
        self._outlet.publish(host, [0])

    def _build(self, factory: EnvFactory) -> Report:
        try:
            self._env = env = factory()
            return env.spec
        except Exception as exc:  # noqa: BLE001 - border: foreign code
            return describe_failure(self.env_id, "build", exc)

    def _attach(self, command: AttachRows) -> EnvFailure | None:
        assert self._env is not None, "a failed build ends the crew"
        try:
            self._host = Host(
                [self._env],
                self.env_id,
                command.arrays,
                command.spec,
                keep_infos=command.keep_infos,
            )
        except Exception as exc:  # noqa: BLE001 - border: it reads members of foreign objects
            return describe_failure(self.env_id, "build", exc)
        return None

    def _open_host(self) -> Host:
        assert self._host is not None, "nothing is asked of an env before it has its rows"
        return self._host

    def close(self) -> None:
        """Closes the env, whatever it raises."""
        env, self._env = self._env, None
        host, self._host = self._host, None
        # Also what would end a worker: this one ends anyway.
        with contextlib.suppress(BaseException):
            if host is not None:
                host.close()
            elif env is not None:
                env.close()
