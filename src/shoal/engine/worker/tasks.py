"""Envs on one asyncio event loop, each in a task of its own.

Knows the host, asyncio and the messages. Does not know threads, or who waits.

What is public here is called on the loop's thread, except for what is marked as the
engine's. The two share plain attributes, each with a single writer, and a deque, whose
ends may be used by two threads.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, assert_never

from shoal.engine.core.layout import Op
from shoal.engine.core.messages import ResetEnvs, SetActions
from shoal.engine.env import find_plain_methods
from shoal.engine.system.event_loop import seconds_or_none
from shoal.engine.worker.env_task import AnswerCall, Call, EnvTask, ResetEnv, RunOp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shoal.engine.core.deadline import Deadline
    from shoal.engine.core.layout import Arrays
    from shoal.engine.core.messages import EnvFailure, EnvNotes
    from shoal.engine.env import AsyncEnv, AsyncEnvFactory
    from shoal.engine.worker.host import Host

__all__ = ["EnvTasks", "Request", "RunRows"]


@dataclass(frozen=True, slots=True)
class RunRows:
    """Carry out what the op rows of these envs (``None``: all) say."""

    env_ids: Sequence[int] | None


Request = RunRows | ResetEnvs | SetActions | Call
_RUN_OPS = {int(op): RunOp(int(op)) for op in Op}


class EnvTasks:
    """All envs of one loop.

    Attributes:
        envs: those built so far; ``None`` for the others.
        num_built: how many there are.
        build_failures: what could not be built.
        death: what an env raised that ends a worker, and during what.
    """

    def __init__(
        self,
        factories: Sequence[AsyncEnvFactory],
        *,
        keep_notes: Callable[[Mapping[int, EnvNotes]], None],
        notify: Callable[[bool], None],
    ) -> None:
        """Builds nothing yet.

        Args:
            factories: one per env.
            keep_notes: takes what a result holds beside its row, before that is ready.
                An env may change what is in there, later.
            notify: called after something has come; true: nothing is left to do.
        """
        self.envs: list[AsyncEnv | None] = [None] * len(factories)
        self.num_built = 0
        self.build_failures: list[EnvFailure] = []
        self.death: tuple[BaseException, str] | None = None
        self._keep_notes = keep_notes
        self._notify = notify
        self._factories = list(factories)
        self._host: Host | None = None
        self._ops: Any = None
        self._requests: deque[tuple[int, Request]] = deque()
        self._num_posted = 0  # written by the engine's thread
        self._num_taken = 0  # written by the loop's, as all below
        self._num_pending = 0
        self._env_tasks: list[EnvTask] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = asyncio.Event()
        self._deadline: Deadline | None = None

    # --- the engine's thread calls these -------------------------------------------

    def serve(self, host: Host, arrays: Arrays) -> None:
        """Hands over the rows, before the first request."""
        self._host = host
        self._ops = arrays.op

    def put(self, request: Request) -> None:
        """Adds a request; `take_requests` has to be called on the loop."""
        self._num_posted = number = self._num_posted + 1
        self._requests.append((number, request))

    def all_done(self) -> bool:
        """Returns whether all rows are ready that were asked for."""
        # In this order: what was taken has been counted.
        return self._num_taken == self._num_posted and not self._num_pending

    def has_started(self) -> bool:
        """Returns whether the envs stand, or cannot be built."""
        return (
            self.num_built == len(self.envs) or bool(self.build_failures) or self.death is not None
        )

    def find_unended(self) -> list[int]:
        """Returns the envs whose tasks have not ended. Once the loop has."""
        return [i for i, task in enumerate(self._tasks) if not task.done()]

    def let_go(self) -> None:
        """Forgets the envs. Once the loop has ended."""
        self.envs.clear()
        self._factories.clear()
        self._env_tasks.clear()
        self._requests.clear()
        if self._host is not None:
            self._host.let_go()

    # --- on the loop ---------------------------------------------------------------

    async def run(self) -> Deadline:
        """Builds the envs and serves until `begin_close`; returns the deadline of that."""
        self._env_tasks = [EnvTask(self, i) for i in range(len(self.envs))]
        self._tasks = [
            asyncio.create_task(env_task.live(), name=f"shoal-env-{env_task.i}")
            for env_task in self._env_tasks
        ]
        await self._closing.wait()
        deadline = self._deadline
        assert deadline is not None
        for env_task, task in zip(self._env_tasks, self._tasks, strict=True):
            if not env_task.is_leaving:
                task.cancel()
        await asyncio.wait(self._tasks, timeout=seconds_or_none(deadline.left_s()))
        return deadline

    def begin_close(self, deadline: Deadline) -> None:
        """Has every env leave what it does, and close."""
        if self._deadline is None:
            self._deadline = deadline
            self._closing.set()

    def take_requests(self) -> None:
        """Takes what was put."""
        requests = self._requests
        while requests and not self.is_closing:
            number, request = requests.popleft()
            self._take(request)
            self._num_taken = number
        if not self._num_pending:
            self._notify(True)

    def _take(self, request: Request) -> None:
        host, env_tasks = self._host, self._env_tasks
        assert host is not None
        match request:
            case RunRows(env_ids):
                self._start_rows(range(len(env_tasks)) if env_ids is None else env_ids)
            case ResetEnvs(env_ids, seeds, kwargs, undo_prepared):
                for k, i in enumerate(env_ids):
                    env_tasks[i].is_asked = True
                    self._num_pending += 1
                    env_tasks[i].put(ResetEnv(seeds[k], kwargs[k], undo_prepared[k]))
            case SetActions(actions):
                host.set_action_objects(actions)
            case Call(command):
                for position, i in enumerate(command.env_ids):
                    env_tasks[i].put(AnswerCall(request, position))
            case _:
                assert_never(request)

    def _start_rows(self, env_ids: Sequence[int]) -> None:
        ops, env_tasks = self._ops.tobytes(), self._env_tasks
        for i in env_ids:
            # Asked again after an interrupt: its op stands until the result is there.
            if ops[i] and not env_tasks[i].is_asked:
                env_tasks[i].is_asked = True
                self._num_pending += 1
                env_tasks[i].put(_RUN_OPS[ops[i]])

    # --- the tasks of the envs call these ------------------------------------------------

    @property
    def is_closing(self) -> bool:
        """Whether `begin_close` was called."""
        return self._deadline is not None

    @property
    def host(self) -> Host:
        """The rows."""
        assert self._host is not None, "nothing is asked of an env before"
        return self._host

    async def wait_closing(self) -> None:
        """Waits for `begin_close`."""
        await self._closing.wait()

    async def build(self, i: int) -> None:
        """Builds one env.

        Raises:
            TypeError: its ``reset`` and ``step`` are no coroutine functions.
        """
        built = self._factories[i]()
        env = await built if inspect.isawaitable(built) else built
        self.envs[i] = env  # before the check: one that is refused is closed, too
        _check_is_async(env, i)

    def note_built(self, failure: EnvFailure | None) -> None:
        """Notes that one env stands, or what it raised."""
        if failure is None:
            self.num_built += 1
        else:
            self.build_failures.append(failure)
        if self.has_started():
            self._notify(True)

    def publish(self, env_task: EnvTask) -> None:
        """Hands over the row of one env, its notes first."""
        i, host = env_task.i, self.host
        if (note := host.notes.get(i)) is not None:
            self._keep_notes({i: note})
        host.publish([i])
        host.notes.pop(i, None)
        env_task.is_asked = False
        self._num_pending -= 1
        self._notify(not self._num_pending)

    def note_answer(self, call: Call) -> None:
        """Counts one more answer of a call."""
        call.num_left -= 1
        if not call.num_left:
            self._notify(True)

    def die(self, exc: BaseException, during: str = "idle") -> None:
        """Notes what ends a worker. Only closing is left then."""
        if self.death is None:
            self.death = (exc, during)
        self._notify(True)


def _check_is_async(env: object, i: int) -> None:
    if plain := find_plain_methods(env):
        kind = type(env)
        raise TypeError(
            'the backend "coroutines" expects envs whose reset and step are coroutine functions,'
            f" but {' and '.join(plain)} of env {i} ({kind.__module__}.{kind.__qualname__})"
            f" {'are' if len(plain) > 1 else 'is'} not. Write `async def`, or run this env with"
            ' backend="threads" or backend="processes".'
        )
