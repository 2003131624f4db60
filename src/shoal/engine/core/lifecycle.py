"""The life of a worker and of the engine: an event in, a new state out.

Pure tables. Nothing here starts, watches or ends anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["EngineState", "Worker", "WorkerState", "on_exit", "on_stop", "on_up"]


class WorkerState(Enum):
    """``STARTING -> UP -> STOPPING -> STOPPED``; from any living state ``DIED``."""

    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    STOPPED = "stopped"
    DIED = "died"


class EngineState(Enum):
    """``OPEN -> BROKEN``; from both ``CLOSED``, which is final."""

    OPEN = "open"
    BROKEN = "broken"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of one worker process.

    Attributes:
        worker_id: its number.
        env_ids: the envs it holds, contiguous.
        pid: its process id once it is known.
        exitcode: its exit code once it has ended; negative for a signal.
    """

    worker_id: int
    env_ids: range
    state: WorkerState = WorkerState.STARTING
    pid: int | None = None
    exitcode: int | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self.state in (WorkerState.STOPPED, WorkerState.DIED)


def on_up(worker: Worker) -> Worker:
    """The worker has said that it serves."""
    if worker.state is WorkerState.STARTING:
        return replace(worker, state=WorkerState.UP)
    return worker


def on_stop(worker: Worker) -> Worker:
    """The engine has asked the worker to end."""
    return worker if worker.has_ended else replace(worker, state=WorkerState.STOPPING)


def on_exit(worker: Worker, exitcode: int | None) -> Worker:
    """The process is gone. An end that was asked for is no death."""
    if worker.has_ended:
        return worker
    wanted = worker.state is WorkerState.STOPPING
    state = WorkerState.STOPPED if wanted else WorkerState.DIED
    return replace(worker, state=state, exitcode=exitcode)
