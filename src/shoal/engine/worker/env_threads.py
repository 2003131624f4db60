"""Envs that live on threads, one each, for ever: built, stepped, called and closed there.

Knows the life of one such env. Does not know who asks, where results go, or processes.

Commands stand in a queue per env and are carried out in order. Those that give a result
have a number: what was asked last and what is done are two lists of numbers, which are
equal when there is nothing left to do. Only the interpreter's lock orders them, so a
thread takes no other lock to hand over its row.
"""

from __future__ import annotations

import os
import threading
import traceback
from dataclasses import dataclass
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from shoal.engine.core.messages import (
    CallEnvs,
    EnvFailure,
    LeaveLoop,
    Returned,
    SeedEnvs,
    SetActions,
)
from shoal.engine.worker.resident import (
    Ask,
    AttachRows,
    BuildEnv,
    Command,
    Outlet,
    Report,
    ResetRow,
    Resident,
    RunRow,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from shoal.engine.core.deadline import Deadline
    from shoal.engine.core.layout import Arrays
    from shoal.engine.env import EnvFactory
    from shoal.engine.spec import EnvSpec, LeafPath

__all__ = ["Death", "EnvThreads"]


@dataclass(frozen=True, slots=True)
class Death:
    """A thread has ended by itself, and so its worker.

    Attributes:
        cause: what ended it, without its frames.
        traceback: the text of them.
    """

    env_id: int
    cause: BaseException
    traceback: str

    @property
    def exitcode(self) -> int:
        """The exit code of a process that ends this way."""
        if isinstance(self.cause, SystemExit):
            code = self.cause.code
            return code if isinstance(code, int) else int(code is not None)
        return 1


class EnvThreads:
    """A crew of threads that hold one env each.

    The threads hold on to it, and it to nobody who could be forgotten.

    Attributes:
        env_ids: the envs, contiguous.
        asked: the number of what was last asked of each env. Written by who asks.
        done: the number of what each env has last done. Written by its thread.
        deaths: threads that have ended by themselves, by env id.
    """

    def __init__(self, env_ids: range, outlet: Outlet) -> None:
        self.env_ids = env_ids
        self.asked = [0] * len(env_ids)
        self.done = [0] * len(env_ids)
        self.deaths: dict[int, Death] = {}
        self._outlet = outlet
        self._reports: SimpleQueue[tuple[int, Report]] = SimpleQueue()
        self._queues: list[SimpleQueue[Command]] = [SimpleQueue() for _ in env_ids]
        self._threads: list[threading.Thread] = []
        self._numbers = count(1)
        self._owner_pid = os.getpid()

    # --- start ---------------------------------------------------------------------

    def start(self, factories: Sequence[EnvFactory]) -> None:
        """Lets every thread build its env. `take_reports` tells how it went.

        Raises:
            RuntimeError: the system has no thread left.
        """
        for position, factory in enumerate(factories):
            self._queues[position].put(BuildEnv(factory))
            thread = threading.Thread(
                target=self._live,
                args=(position,),
                name=f"shoal-env-{self.env_ids[position]}",
                daemon=True,  # one that hangs shall not keep the interpreter
            )
            thread.start()
            self._threads.append(thread)

    def attach(self, arrays: Arrays, spec: EnvSpec, *, keep_infos: bool) -> None:
        """Gives every env its rows. `take_reports` tells how it went."""
        self._put_all(AttachRows(arrays, spec, keep_infos))

    def take_reports(self, deadline: Deadline) -> dict[int, Report]:
        """Waits until each thread has built, or attached; returns what they say.

        That is a spec after a build, nothing after `attach`, or a failure. It returns
        at once with a failure or a death, and with what there is when time is up.
        """
        reports: dict[int, Report] = {}
        while len(reports) < len(self.env_ids) and not self.deaths:
            left = min(deadline.left_s(), threading.TIMEOUT_MAX)
            try:
                env_id, report = self._reports.get(timeout=left)
            except Empty:
                break
            reports[env_id] = report
            if isinstance(report, EnvFailure):
                break
        return reports

    # --- commands ------------------------------------------------------------------

    def run(self, env_ids: Iterable[int] | None) -> None:
        """Asks these envs (``None``: all) to carry out what their op rows say."""
        command = RunRow(number := next(self._numbers))
        if env_ids is None:
            # The number first: after an interrupt in between, asking again sets it right.
            self.asked[:] = [number] * len(self.asked)
            self._put_all(command)
            return
        first = self.env_ids.start
        for env_id in env_ids:
            self.asked[env_id - first] = number
            self._queues[env_id - first].put(command)

    def reset(
        self, env_id: int, seed: int | None, kwargs: Mapping[str, Any], *, undo_prepared: bool
    ) -> None:
        """Asks one env to reset with a seed or keyword arguments."""
        position = env_id - self.env_ids.start
        self.asked[position] = number = next(self._numbers)
        self._queues[position].put(ResetRow(number, seed, kwargs, undo_prepared))

    def set_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Hands over action leaves without a fixed shape, before `run`."""
        for env_id, leaves in actions.items():
            self._queues[env_id - self.env_ids.start].put(SetActions({0: leaves}))

    def ask(self, command: CallEnvs | SeedEnvs, reply: Callable[[Returned], None]) -> None:
        """Hands over a call of one env; its thread tells ``reply`` the answer."""
        (env_id,) = command.env_ids
        self._queues[env_id - self.env_ids.start].put(Ask(command, reply))

    def all_done(self) -> bool:
        """Returns whether every env has done all that was asked of it."""
        return self.asked == self.done

    def is_busy(self, env_id: int) -> bool:
        """Returns whether something was asked of an env that it has not done yet."""
        position = env_id - self.env_ids.start
        return self.asked[position] != self.done[position]

    def _put_all(self, command: Command) -> None:
        for queue in self._queues:
            queue.put(command)

    # --- end -----------------------------------------------------------------------

    def close(self, deadline: Deadline) -> list[int]:
        """Lets every thread close its env and end; returns the envs that have not.

        Their threads cannot be killed. Each closes its env when that comes back to it.
        """
        if os.getpid() != self._owner_pid:
            return []  # a fork has the queues, but not the threads
        self._put_all(LeaveLoop())
        left = []
        for env_id, thread in zip(self.env_ids, self._threads, strict=False):
            # A collector that runs on one of them may be who closes.
            if thread is not threading.current_thread():
                wait_s = min(deadline.left_s(), threading.TIMEOUT_MAX)
                thread.join(wait_s)
                if thread.is_alive():
                    left.append(env_id)
        return left

    # --- on the threads ------------------------------------------------------------

    def _live(self, position: int) -> None:
        resident = Resident(self.env_ids[position], self._queues[position], self._outlet)
        try:
            resident.serve(self._reports, self.done, position)
        except BaseException as exc:  # noqa: BLE001 - the outermost frame of a thread
            text = "".join(traceback.format_exception(exc))
            death = Death(resident.env_id, exc.with_traceback(None), text)
            self.deaths[resident.env_id] = death
            self._reports.put((resident.env_id, None))
            self._outlet.on_death()
        finally:
            resident.close()
