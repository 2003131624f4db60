"""Worker processes and the caller: each steps a share of the envs.

Knows the process backend and the host. With few cores the caller is the worker that
costs nothing: it is awake already when a step begins, and awake when it ends. The
price is that its envs are not isolated from it, so this is for envs that cannot crash
or hang, and for callers who ask for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.engine.backends.common import OneBreath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine.backends.common import LocalHost
    from shoal.engine.backends.processes import ProcessBackend
    from shoal.engine.core.deadline import Deadline
    from shoal.engine.core.messages import CallEnvs, EnvNotes, Returned, SeedEnvs
    from shoal.engine.spec import LeafPath

__all__ = ["SharedBackend"]


class SharedBackend(OneBreath):
    """Envs up to some id run in worker processes, the others here."""

    def __init__(self, remote: ProcessBackend, local: LocalHost) -> None:
        self._remote = remote
        self._local = local
        self._first = local.first_id
        self.spec = remote.spec
        self.arrays = remote.arrays

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the worker processes."""
        return self._remote.worker_pids

    def worker_of(self, env_id: int) -> int:
        """Returns the worker that holds an env; the caller has the number after the last."""
        if env_id < self._first:
            return self._remote.worker_of(env_id)
        return len(self.worker_pids)

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Asks the workers first, then does the caller's share."""
        if env_ids is None:
            self._remote.submit(None)
        elif remote := [env_id for env_id in env_ids if env_id < self._first]:
            self._remote.submit(remote)
        self._local.run_pending()

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Sends resets to the workers, then carries out the caller's."""
        for mine in (False, True):
            ks = [k for k, env_id in enumerate(env_ids) if (env_id >= self._first) == mine]
            if ks:
                target = self._local if mine else self._remote
                target.submit_resets(
                    [env_ids[k] for k in ks],
                    [seeds[k] for k in ks],
                    [kwargs[k] for k in ks],
                    [undo_prepared[k] for k in ks],
                )

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Hands over action leaves without a fixed shape."""
        remote = {i: leaves for i, leaves in actions.items() if i < self._first}
        if remote:
            self._remote.send_action_objects(remote)
        self._local.send_action_objects(
            {i: leaves for i, leaves in actions.items() if i >= self._first}
        )

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Waits for the workers; the caller's share is done."""
        return self._remote.wait(done, deadline, for_all=for_all)

    def wake_fds(self) -> Sequence[int]:
        """Returns those of the workers."""
        return self._remote.wake_fds()

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """Says so to the workers; the caller's share is done when it is submitted."""
        self._remote.arm(armed, watched=watched, is_due=is_due)

    def doze(self, deadline: Deadline) -> list[int]:
        """Waits until something happens in the workers."""
        return self._remote.doze(deadline)

    def poke(self) -> None:
        """Ends a `doze`."""
        self._remote.poke()

    def take_news(self, news: list[int]) -> None:
        """Takes in what the workers have said."""
        self._remote.take_news(news)

    def all_done(self) -> bool:
        """Returns whether the workers are done."""
        return self._remote.all_done()

    def has_notes(self) -> bool:
        """Returns whether `take_notes` would return something."""
        return bool(self._local.notes) or self._remote.has_notes()

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns what results hold beside their rows, and forgets it."""
        return {**self._remote.take_notes(), **self._local.take_notes()}

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Sends the commands of the workers, carries out the caller's, and waits."""
        everything = list(commands)
        mine = [command for worker, command in everything if worker == len(self.worker_pids)]
        theirs = [pair for pair in everything if pair[0] != len(self.worker_pids)]
        answers = self._remote.call(iter(theirs), deadline) if theirs else []
        return answers + [self._local.answer(command) for command in mine]

    def resubmit(self, deadline: Deadline) -> None:
        """Asks the workers again; drops what an interrupt left undone here."""
        self._local.drop_pending()
        self._remote.resubmit(deadline)

    def close(self, deadline: Deadline) -> None:
        """Ends everything. May be called again."""
        try:
            self._local.close()
        finally:
            self._remote.close(deadline)
