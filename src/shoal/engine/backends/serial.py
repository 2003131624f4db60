"""All envs in the caller's thread: the reference that every other backend must equal.

Knows the host. Does not know threads or processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine.backends.common import LocalHost, OneBreath, build_here, close_envs
from shoal.engine.core.layout import plan_layout, view_arrays
from shoal.engine.core.merge import agree_on_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shoal.engine.core.deadline import Deadline
    from shoal.engine.core.messages import CallEnvs, EnvNotes, Returned, SeedEnvs
    from shoal.engine.env import EnvFactory
    from shoal.engine.spec import LeafPath

__all__ = ["SerialBackend"]


class SerialBackend(OneBreath):
    """Runs every env in the thread that calls."""

    def __init__(
        self, factories: Sequence[EnvFactory], *, keep_infos: bool, mixed_specs: bool = False
    ) -> None:
        envs = build_here(factories, 0)
        try:
            self.spec = agree_on_spec([env.spec for env in envs], mixed=mixed_specs)
            layout = plan_layout(self.spec, len(envs), 1)
            self.arrays = view_arrays(layout, np.zeros(layout.nbytes, np.uint8))
            self._host = LocalHost(envs, 0, self.arrays, self.spec, keep_infos=keep_infos)
        except BaseException:
            close_envs(envs)
            raise

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """There are no worker processes."""
        return ()

    def worker_of(self, env_id: int) -> int:
        """All envs are with worker 0, the caller."""
        return 0

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Carries out the op rows, here and now."""
        self._host.run_pending()

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Resets with seeds or keyword arguments, here and now."""
        self._host.submit_resets(env_ids, seeds, kwargs, undo_prepared)

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Keeps action leaves without a fixed shape for the next step."""
        self._host.send_action_objects(actions)

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Returns whether ``done()``: there is nothing to wait for."""
        return done()

    def wake_fds(self) -> Sequence[int]:
        """Nothing ever happens by itself."""
        return ()

    def arm(
        self, armed: bool, *, watched: bool = True, is_due: Callable[[], bool] | None = None
    ) -> None:
        """Does nothing: nobody ever waits."""

    def doze(self, deadline: Deadline) -> list[int]:
        """Returns at once: nothing will happen."""
        return []

    def poke(self) -> None:
        """Does nothing: nobody ever dozes."""

    def take_news(self, news: list[int]) -> None:
        """Does nothing: there are none."""

    def all_done(self) -> bool:
        """Everything submitted has been carried out already."""
        return True

    def has_notes(self) -> bool:
        """Returns whether `take_notes` would return something."""
        return bool(self._host.notes)

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns what results hold beside their rows, and forgets it."""
        return self._host.take_notes()

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Carries out the commands, here and now."""
        return [self._host.answer(command) for _, command in commands]

    def resubmit(self, deadline: Deadline) -> None:
        """Drops what an interrupt left undone: the caller was the worker."""
        self._host.drop_pending()

    def close(self, deadline: Deadline) -> None:
        """Closes the envs. May be called again."""
        self._host.close()
