"""An asyncio event loop in a daemon thread of its own.

Knows asyncio, threads and deadlines. Does not know what runs on the loop.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shoal.engine.core.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

__all__ = ["EventLoopThread", "seconds_or_none"]

# What a task may take to end that was cancelled after its time was up.
_LAST_WORD_S = 0.25


class EventLoopThread:
    """Runs one coroutine, and what it starts, until it returns. Then everything ends.

    The thread frees the loop itself, as its last act: one that is stuck in a call can
    be left alone, and does no harm when it comes back.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._owner_pid = os.getpid()

    def start(
        self,
        main: Callable[[], Coroutine[Any, Any, Deadline]],
        *,
        on_death: Callable[[BaseException], None],
        at_end: Callable[[], None],
    ) -> None:
        """Starts the thread.

        Args:
            main: returns when tasks that are left have to be gone.
            on_death: called on the loop's thread with what would have ended it:
                `SystemExit`, for one. The loop goes on.
            at_end: the thread's last call.

        Raises:
            RuntimeError: there can be no thread. Everything has been freed.
        """
        self._thread = threading.Thread(
            target=_run,
            args=(self._loop, self._name, main, on_death, at_end),
            name=self._name,
            daemon=True,
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system has none left
            self._thread = None
            self._loop.close()
            at_end()
            raise

    @property
    def is_here(self) -> bool:
        """Whether this is the process of the thread, and not a fork of it."""
        return self._owner_pid == os.getpid()

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        """Has the loop call this soon. Nothing happens if it has ended."""
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def join(self, deadline: Deadline) -> bool:
        """Waits until the thread has ended; returns whether it has."""
        thread = self._thread
        if thread is None:
            return True
        if thread is threading.current_thread():
            return False  # the collector may run anywhere
        thread.join(min(deadline.left_s(), threading.TIMEOUT_MAX))
        return not thread.is_alive()


def seconds_or_none(seconds: float) -> float | None:
    """Returns what asyncio takes for a timeout."""
    return None if seconds == math.inf else seconds


def _run(
    loop: asyncio.AbstractEventLoop,
    name: str,
    main: Callable[[], Coroutine[Any, Any, Deadline]],
    on_death: Callable[[BaseException], None],
    at_end: Callable[[], None],
) -> None:
    executor = ThreadPoolExecutor(thread_name_prefix=f"{name}-executor")
    loop.set_default_executor(executor)
    try:
        deadline = _run_until_done(loop, main(), on_death) or Deadline.after(_LAST_WORD_S)
        _run_until_done(loop, _end_tasks(loop, deadline), on_death)
        # The loop's own method waits without limit, on the loop. Here it is this thread
        # that waits, which nobody waits for longer than he wants to.
        executor.shutdown(wait=True, cancel_futures=True)
    finally:
        loop.close()
        at_end()


def _run_until_done(
    loop: asyncio.AbstractEventLoop,
    main: Coroutine[Any, Any, Any],
    on_death: Callable[[BaseException], None],
) -> Any:
    task = loop.create_task(main)
    while True:
        try:
            return loop.run_until_complete(task)
        except BaseException as exc:  # noqa: BLE001 - the outermost frame of the thread
            # `SystemExit` of a task that an env has started comes out here, too.
            on_death(exc)
            if task.done():
                return None


async def _end_tasks(loop: asyncio.AbstractEventLoop, deadline: Deadline) -> None:
    """Cancels what is left on the loop, and waits for its end."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await _wait_for(left, deadline)
    for task in left:
        if task.done() and not task.cancelled() and (exc := task.exception()) is not None:
            context = {"message": "a task failed when it was cancelled", "exception": exc}
            loop.call_exception_handler({**context, "task": task})
    await _wait_for([asyncio.ensure_future(loop.shutdown_asyncgens())], deadline)


async def _wait_for(tasks: Iterable[asyncio.Task[Any]], deadline: Deadline) -> None:
    if tasks := list(tasks):
        left_s = max(deadline.left_s(), _LAST_WORD_S)
        _, pending = await asyncio.wait(tasks, timeout=seconds_or_none(left_s))
        for task in pending:
            # Whoever closes the loop says so in his own words.
            task._log_destroy_pending = False  # type: ignore[attr-defined]
