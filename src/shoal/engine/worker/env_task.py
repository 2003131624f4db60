"""One env on an event loop: its task carries out one command after the other.

Knows the env contract, the host and asyncio. Does not know the other envs, threads, or
who waits. What the env raises becomes a record here; what would end a worker is handed
on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, assert_never, cast

from shoal.engine.core.layout import Op
from shoal.engine.core.messages import CallEnvs, SeedEnvs
from shoal.engine.worker.host import describe_failure

if TYPE_CHECKING:
    from shoal.engine.core.messages import EnvFailure
    from shoal.engine.env import AsyncEnv
    from shoal.engine.worker.tasks import EnvTasks

__all__ = ["AnswerCall", "Call", "EnvTask", "ResetEnv", "RunOp"]

_RESET, _STEP_PREPARE = int(Op.RESET), int(Op.STEP_PREPARE)


@dataclass(slots=True, eq=False)
class Call:
    """A call on several envs, and the answers so far.

    Attributes:
        num_left: envs that have not answered; counted down last.
    """

    command: CallEnvs | SeedEnvs
    num_left: int
    values: dict[int, Any] = field(default_factory=dict)
    failures: list[EnvFailure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunOp:
    """Carry out what the op row says."""

    op: int


@dataclass(frozen=True, slots=True)
class ResetEnv:
    """Reset with a seed or keyword arguments."""

    seed: int | None
    kwargs: Any
    undo_prepared: bool


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Answer a call, as the env at this position of it."""

    call: Call
    position: int


Command = RunOp | ResetEnv | AnswerCall


class EnvTask:
    """One env and its task: one command after the other, from the factory to `close`.

    Attributes:
        i: the env's id.
        is_asked: its row is being worked on, or will be.
        is_leaving: what it does from here on is not to be cancelled.
    """

    def __init__(self, tasks: EnvTasks, i: int) -> None:
        self.i = i
        self.is_asked = False
        self.is_leaving = False
        self._tasks = tasks
        self._commands: deque[Command] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._during = "build"

    def put(self, command: Command) -> None:
        """Has the env do this after what it does now."""
        self._commands.append(command)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def live(self) -> None:
        """The env's task."""
        tasks = self._tasks
        try:
            if await self._build():
                await self._serve()
        except GeneratorExit:
            raise  # given up with its loop
        except asyncio.CancelledError:
            _forget_cancels()
        except BaseException as exc:  # noqa: BLE001 - the outermost frame of the task
            tasks.die(exc, self._during)
        while not tasks.is_closing:
            try:
                await tasks.wait_closing()
            except asyncio.CancelledError:
                _forget_cancels()
        self.is_leaving = True
        if (env := tasks.envs[self.i]) is not None:
            try:
                await _awaited(env.close())
            except (GeneratorExit, asyncio.CancelledError):
                raise
            except BaseException:  # noqa: BLE001, S110 - border: nobody is left to be told
                pass

    async def _build(self) -> bool:
        failure = None
        try:
            await self._tasks.build(self.i)
        except (Exception, asyncio.CancelledError) as exc:  # border: foreign code
            if self._leaves(exc):
                raise
            failure = describe_failure(self.i, "build", exc)
        self._tasks.note_built(failure)
        return failure is None

    async def _serve(self) -> None:
        commands, tasks = self._commands, self._tasks
        loop = asyncio.get_running_loop()
        while not tasks.is_closing:
            if commands:
                await self._carry_out(commands.popleft())
                continue
            self._during = "idle"
            self._waiter = loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as exc:
                # Without a command it is nobody's result: an env's own task group may
                # cancel the task that it was opened in.
                if self._leaves(exc):
                    raise
            finally:
                self._waiter = None

    async def _carry_out(self, command: Command) -> None:
        match command:
            case RunOp(op):
                if op == _RESET:
                    await self._reset(None, {}, undo_prepared=False)
                else:
                    await self._step(op)
                self._tasks.publish(self)
            case ResetEnv(seed, kwargs, undo_prepared):
                await self._reset(seed, kwargs, undo_prepared=undo_prepared)
                self._tasks.publish(self)
            case AnswerCall(call, position):
                await self._answer(call, position)
            case _:
                assert_never(command)

    async def _step(self, op: int) -> None:
        i, host = self.i, self._tasks.host
        env = self._env()
        self._during = "step"
        try:
            result = await env.step(host.take_action(i))
        except (Exception, asyncio.CancelledError) as exc:  # border: foreign code
            if self._leaves(exc):
                raise
            host.fail_step(i, exc)
            return
        if not host.finish_step(i, op, result):
            return
        guessed = op == _STEP_PREPARE
        self._during = "reset"
        try:
            host.begin_reset_ahead(i, guessed=guessed)
            host.finish_reset(i, await env.reset(), is_ahead=True)
        except (Exception, asyncio.CancelledError) as exc:  # border: foreign code
            if self._leaves(exc):
                raise
            # A guess that fails was never made: the reset that may come will fail too.
            if not guessed:
                host.fail_reset(i, exc)

    async def _reset(self, seed: int | None, kwargs: Any, *, undo_prepared: bool) -> None:
        i, host = self.i, self._tasks.host
        self._during = "reset"
        try:
            kwargs = host.begin_reset(i, seed, kwargs, undo_prepared=undo_prepared)
            host.finish_reset(i, await self._env().reset(**kwargs))
        except (Exception, asyncio.CancelledError) as exc:  # border: foreign code
            if self._leaves(exc):
                raise
            host.fail_reset(i, exc)

    async def _answer(self, call: Call, position: int) -> None:
        i, env = self.i, self._env()
        try:
            match call.command:
                case SeedEnvs(_, _, seeds):
                    self._during = "seed"
                    call.values[i] = await _awaited(env.seed(seeds[position]))
                case CallEnvs(_, _, name, args, kwargs):
                    self._during = f"call {name}"
                    call.values[i] = await _awaited(env.call(name, args, kwargs))
        except (Exception, asyncio.CancelledError) as exc:  # border: foreign code
            if self._leaves(exc):
                raise
            call.failures.append(describe_failure(i, self._during, exc))
        self._tasks.note_answer(call)

    def _env(self) -> AsyncEnv:
        return cast("AsyncEnv", self._tasks.envs[self.i])

    def _leaves(self, exc: BaseException) -> bool:
        """Returns whether this is the end, and not a failure of the env's own."""
        if not isinstance(exc, asyncio.CancelledError):
            return False
        if not self._tasks.is_closing:
            _forget_cancels()
        return self._tasks.is_closing


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _forget_cancels() -> None:
    """Lets time limits and task groups that come later see none of it."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()
