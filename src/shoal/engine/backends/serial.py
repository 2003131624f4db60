"""All envs in the caller's thread: the reference that every other backend must equal.

Knows the host. Does not know threads or processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.engine.backends.common import agree_on_spec, start_error
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.layout import plan_layout, view_arrays
from shoal.engine.core.messages import CallEnvs, EnvNotes, Returned, SeedEnvs
from shoal.engine.env import EnvFactory
from shoal.engine.spec import LeafPath
from shoal.engine.worker.host import Host, build_envs

__all__ = ["SerialBackend"]


class SerialBackend:
    """Runs every env in the thread that calls."""

    def __init__(self, factories: Sequence[EnvFactory], *, keep_infos: bool) -> None:
        num_envs = len(factories)
        envs, failure = build_envs(factories, range(num_envs))
        try:
            if failure is not None:
                raise start_error(failure)
            self.spec = agree_on_spec([env.spec for env in envs])
            layout = plan_layout(self.spec, num_envs, 1)
            self.arrays = view_arrays(layout, np.zeros(layout.nbytes, np.uint8))
            self._host: Host | None = Host(envs, 0, self.arrays, keep_infos=keep_infos)
        except BaseException:
            for env in envs:
                env.close()
            raise
        self._notes: dict[int, EnvNotes] = {}

    @property
    def envs(self) -> Sequence[Any]:
        """The envs themselves."""
        return () if self._host is None else self._host.envs

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """There are no worker processes."""
        return ()

    def submit(self, env_ids: Sequence[int] | None) -> None:
        """Carries out the op rows, here and now."""
        host = self._open_host()
        ops, indices = host.pending()
        if indices:
            host.run(ops, indices)
            self._publish(host, indices)

    def submit_resets(
        self,
        env_ids: Sequence[int],
        seeds: Sequence[int | None],
        kwargs: Sequence[Mapping[str, Any]],
        undo_prepared: Sequence[bool],
    ) -> None:
        """Resets with seeds or keyword arguments, here and now."""
        host = self._open_host()
        for k, env_id in enumerate(env_ids):
            host.reset(env_id, seeds[k], kwargs[k], undo_prepared=undo_prepared[k])
        self._publish(host, env_ids)

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Keeps action leaves without a fixed shape for the next step."""
        self._open_host().set_action_objects(actions)

    def wait(self, done: Callable[[], bool], deadline: Deadline, *, for_all: bool = False) -> bool:
        """Returns whether ``done()``: there is nothing to wait for."""
        return done()

    def all_done(self) -> bool:
        """Everything submitted has been carried out already."""
        return True

    def has_notes(self) -> bool:
        """Returns whether `take_notes` would return something."""
        return bool(self._notes)

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns what results hold beside their rows, and forgets it."""
        notes, self._notes = self._notes, {}
        return notes

    def call(
        self, commands: Iterator[tuple[int, CallEnvs | SeedEnvs]], deadline: Deadline
    ) -> list[Returned]:
        """Carries out the commands, here and now."""
        host = self._open_host()
        answers = []
        for _, command in commands:
            match command:
                case SeedEnvs(call_id, env_ids, seeds):
                    found = host.for_each(env_ids, "seed", lambda k, env, s=seeds: env.seed(s[k]))
                case CallEnvs(call_id, env_ids, name, args, kwargs):
                    found = host.for_each(
                        env_ids,
                        f"call {name}",
                        lambda _, env, c=command: env.call(c.name, c.args, c.kwargs),
                    )
            answers.append(Returned(call_id, found[0], tuple(found[1])))
        return answers

    def worker_of(self, env_id: int) -> int:
        """All envs are with worker 0, the caller."""
        return 0

    def resubmit(self) -> None:
        """Drops what an interrupt left undone: the caller was the worker."""
        self.arrays.op.fill(0)
        self.arrays.status.fill(1)

    def close(self, deadline: Deadline) -> None:
        """Closes the envs. May be called again."""
        host, self._host = self._host, None
        if host is not None:
            host.close()

    def _open_host(self) -> Host:
        assert self._host is not None, "the engine checks that it is open"
        return self._host

    def _publish(self, host: Host, indices: Sequence[int]) -> None:
        host.publish(indices)
        if host.notes:
            self._notes.update(host.notes)
            host.notes = {}
