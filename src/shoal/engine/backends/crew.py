"""The worker processes of one pool and everything they share, started and ended.

The supervisor: carries out with system parts what `core.lifecycle` says. Knows
processes, channels, bells and the slab. Does not know what rows mean.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cloudpickle

from shoal.engine.backends.common import start_error
from shoal.engine.core.deadline import Deadline
from shoal.engine.core.layout import Layout, Word, plan_layout
from shoal.engine.core.lifecycle import Worker, WorkerState, on_exit, on_stop, on_up
from shoal.engine.core.merge import agree_on_spec
from shoal.engine.core.messages import (
    Attached,
    AttachSlab,
    BuildEnvs,
    BuildFailed,
    Built,
    LeaveLoop,
)
from shoal.engine.system.bell import Bell
from shoal.engine.system.channel import Channel, ChannelClosed, dumps
from shoal.engine.system.memory import Slab
from shoal.engine.system.poller import Poller
from shoal.engine.system.process import ServerProcess, StartMethod
from shoal.engine.system.server import Exited, Spawned
from shoal.engine.system.sharing import dumps_sharing
from shoal.errors import StartError, StartTimeout, UsageError, WorkerDied, describe_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from shoal.engine.env import EnvFactory
    from shoal.engine.spec import EnvSpec

__all__ = ["Crew"]

_NUM_START_MESSAGES = 2  # `BuildEnvs` and `AttachSlab`, which nobody counts
# A Ctrl-C that comes just before the system call does not end it; so it is noticed soon.
_LONGEST_WAIT_S = 1.0
# Envs that were built may close when another one could not be; those that hang are killed.
_GRACE_AFTER_FAILURE_S = 2.0
_WORKER_ENTRY = "shoal.engine.worker.loop:main"


class Crew:
    """Worker processes, their channels and bells, and the slab.

    Owns all of it: `close` ends and frees everything, in whatever state it is.

    Attributes:
        workers: the record of each worker, by number.
        slab: the shared block, once the workers have said what they hold.
    """

    def __init__(self, ranges: Sequence[range]) -> None:
        self.workers = [Worker(number, env_ids) for number, env_ids in enumerate(ranges)]
        self.channels: list[Channel] = []
        self.bells: list[Bell] = []
        self.engine_bell = Bell.create()
        self.slab: Slab | None = None
        self.layout: Layout | None = None
        self.spec: EnvSpec | None = None
        self.on_message: Callable[[int, Any], None] | None = None
        self._server: ServerProcess | None = None
        self._poller = Poller(self.engine_bell)
        self._channel_of: dict[int, int] = {}
        self._owner_pid = os.getpid()
        self._is_closed = False
        self._has_exit = False  # a worker has ended, whether it was told to or not

    # --- start ---------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        factories: Sequence[EnvFactory],
        ranges: Sequence[range],
        *,
        method: StartMethod,
        keep_infos: bool,
        num_spinning: int,
        on_disk: bool,
        more_specs: Sequence[EnvSpec] = (),
        mixed_specs: bool = False,
        env_threads: bool = False,
        affinity: Sequence[Collection[int]] | None = None,
        deadline: Deadline,
    ) -> Crew:
        """Starts workers, lets them build their envs, and maps the slab.

        ``more_specs`` are those of envs with higher ids, which run elsewhere but have
        their rows in the slab.

        Raises:
            StartError: an env could not be built, or a worker ended while it was.
            SpecError: the envs do not share their leaves.
            UsageError: a factory cannot be sent to another process.
            StartTimeout: they were not ready in time.
        """
        with ExitStack() as undo:
            packed = None if method == "fork" else _pack(factories, ranges)
            crew = cls(ranges)
            undo.callback(lambda: crew.close(Deadline.after(_GRACE_AFTER_FAILURE_S)))
            crew._start_processes(factories, method, deadline)
            for worker in crew.workers:
                cores = None if affinity is None else tuple(affinity[worker.worker_id])
                command = BuildEnvs(
                    worker_id=worker.worker_id,
                    env_ids=tuple(worker.env_ids),
                    factories=b"" if packed is None else packed[worker.worker_id][0],
                    keep_infos=keep_infos,
                    may_spin=worker.worker_id < num_spinning,
                    env_threads=env_threads,
                    cores=cores,
                )
                # One that has ended will be told with its exit code, below.
                with suppress(ChannelClosed):
                    fds = () if packed is None else packed[worker.worker_id][1]
                    crew.channels[worker.worker_id].send(command, deadline, fds)
            built = crew._wait_for_each(Built, deadline)
            specs = [spec for reply in built for spec in reply.specs]
            spec = agree_on_spec([*specs, *more_specs], mixed=mixed_specs)
            num_envs = len(specs) + len(more_specs)
            crew.spec = spec
            crew._attach(plan_layout(spec, num_envs, len(ranges)), spec, on_disk, deadline)
            undo.pop_all()
            return crew

    def _start_processes(
        self, factories: Sequence[EnvFactory], method: StartMethod, deadline: Deadline
    ) -> None:
        modules = {name for factory in factories for name in getattr(factory, "preload", ())}
        preload = ("shoal.engine.worker.loop", *sorted(modules))
        try:
            self._server = ServerProcess.start(method, preload, list(factories), deadline)
        except ChannelClosed as exc:
            raise StartError("The server of the worker processes ended at once.") from exc
        self._poller.watch(self._server.control.fileno())
        for worker in self.workers:
            ours, theirs = Channel.pair()
            self.channels.append(ours)
            self.bells.append(Bell.create())
            self._channel_of[ours.fileno()] = worker.worker_id
            self._poller.watch(ours.fileno())
            try:
                self._server.spawn(
                    worker.worker_id, _WORKER_ENTRY, theirs.fileno(), method == "spawn", deadline
                )
            finally:
                theirs.close()

    def _attach(self, layout: Layout, spec: EnvSpec, on_disk: bool, deadline: Deadline) -> None:
        self.layout = layout
        self.slab = Slab.create(layout.nbytes, on_disk=on_disk)
        engine = self.engine_bell
        for channel, bell in zip(self.channels, self.bells, strict=True):
            fds = [self.slab.fd, bell.fd, bell.ring_fd, engine.fd, engine.ring_fd]
            with suppress(ChannelClosed):
                channel.send(AttachSlab(layout, spec), deadline, fds)
        self._wait_for_each(Attached, deadline)

    def _wait_for_each(self, kind: type, deadline: Deadline) -> list[Any]:
        """Waits until each worker has sent one message of ``kind``."""
        replies: dict[int, Any] = {}

        def keep(worker_id: int, message: Any) -> None:
            if isinstance(message, BuildFailed):
                raise start_error(message.failure)
            if isinstance(message, kind):
                replies[worker_id] = message

        self.on_message = keep
        while len(replies) < len(self.workers) or any(w.pid is None for w in self.workers):
            if not self.wait(deadline) and deadline.expired():
                missing = [w.worker_id for w in self.workers if w.worker_id not in replies]
                raise StartTimeout(
                    f"Workers {missing} were not ready within {deadline.timeout_s:g} s."
                    " Allow more with start_timeout.",
                    env_id=self.workers[missing[0]].env_ids.start if missing else None,
                )
            for worker in self.workers:
                if worker.has_ended and worker.worker_id not in replies:
                    envs = f"envs {worker.env_ids.start} to {worker.env_ids.stop - 1}"
                    how = describe_exit(worker.exitcode)
                    raise StartError(
                        f"Worker {worker.worker_id} {how} while it built {envs}."
                        " Its output is on stderr."
                    ) from self.death_of(worker, "build")
        self.on_message = None
        self.workers = [on_up(worker) for worker in self.workers]
        return [replies[worker.worker_id] for worker in self.workers]

    # --- waiting -------------------------------------------------------------------

    def wait(self, deadline: Deadline) -> bool:
        """Waits for a bell, a message or a death; returns whether one came.

        It may return early without one.
        Messages go to ``on_message``; deaths into ``workers``.
        """
        fds = self._poller.wait_any(deadline, _LONGEST_WAIT_S)
        self.take_news(fds)
        return bool(fds)

    def wake_fds(self) -> list[int]:
        """Returns descriptors of which one is readable when `wait` would not wait."""
        return self._poller.fds()

    def doze(self, deadline: Deadline) -> list[int]:
        """Waits for a bell, a message or a death, and leaves it there; see `take_news`."""
        return self._poller.doze(deadline, _LONGEST_WAIT_S)

    def take_news(self, fds: Sequence[int]) -> None:
        """Takes in what made these descriptors readable. Does not wait."""
        for fd in fds:
            worker_id = self._channel_of.get(fd)
            if worker_id is not None:
                self.read_channel(worker_id)
            elif fd != self.engine_bell.fd:
                self._read_control()

    def read_channel(self, worker_id: int) -> None:
        """Hands every message of a worker that is here to ``on_message``."""
        channel = self.channels[worker_id]
        try:
            while (found := channel.peek()) is not None:
                if self.on_message is not None:
                    self.on_message(worker_id, found[0])
                channel.drop()
        except ChannelClosed:
            # The exit code comes from the server; this descriptor stays readable for
            # ever, so it is no longer waited for.
            self._forget(channel.fileno())

    def _read_control(self) -> None:
        assert self._server is not None
        try:
            while (found := self._server.control.peek()) is not None:
                match found[0]:
                    case Spawned(worker_id, pid):
                        self.workers[worker_id] = replace(self.workers[worker_id], pid=pid)
                    case Exited(worker_id, exitcode):
                        # A worker's last words are in its channel before it is gone.
                        self.read_channel(worker_id)
                        self.workers[worker_id] = on_exit(self.workers[worker_id], exitcode)
                        self._has_exit = True
                self._server.control.drop()
        except ChannelClosed:
            # Without its server no worker lives on.
            self._forget(self._server.control.fileno())
            self.workers = [on_exit(worker, None) for worker in self.workers]
            self._has_exit = True

    def _forget(self, fd: int) -> None:
        self._channel_of.pop(fd, None)
        self._poller.forget(fd)

    def first_death(self) -> Worker | None:
        """Returns a worker that has died, if there is one."""
        # The flag, since this is asked before each wait, and there may be hundreds.
        for worker in self.workers if self._has_exit else ():
            if worker.state is WorkerState.DIED:
                return worker
        return None

    def death_of(self, worker: Worker, during: str) -> WorkerDied:
        """Returns the error for a worker that has died."""
        return WorkerDied(
            worker_id=worker.worker_id,
            env_ids=worker.env_ids,
            exitcode=worker.exitcode,
            during=during,
        )

    # --- end -----------------------------------------------------------------------

    def close(self, deadline: Deadline) -> None:
        """Ends every worker and frees everything. May be called again.

        Workers are asked first; those that have not left by the deadline are killed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() != self._owner_pid:
            # A fork of the owner: the processes belong to the other one.
            self._free()
            return
        self.engine_bell.ring()  # who dozes shall not do so for ever
        try:
            if self._server is not None:
                self._ask_to_leave(deadline)
        finally:
            try:
                if self._server is not None:
                    self._server.stop(Deadline.after(2))
            finally:
                self._free()

    def _ask_to_leave(self, deadline: Deadline) -> None:
        self.on_message = None
        self.workers = [on_stop(worker) for worker in self.workers]
        for worker, channel, bell in zip(self.workers, self.channels, self.bells, strict=False):
            if worker.has_ended:
                continue
            try:
                channel.queue_bytes(dumps(LeaveLoop()))
                self.announce_mail(worker.worker_id)
                # A worker that does not read is stuck, and is not waited for here.
                channel.flush(deadline.at_most(0.2))
                bell.ring()
            except (ChannelClosed, TimeoutError):
                continue
        while not all(worker.has_ended for worker in self.workers):
            if not self.wait(deadline) and deadline.expired():
                break

    def announce_mail(self, worker_id: int) -> None:
        """Tells a worker how many commands were queued for it.

        Before they are sent: it looks at its channel only if it knows of one there, and
        then waits for the rest of it.
        """
        if self.slab is not None and self.slab.memory is not None and self.layout is not None:
            offset = self.layout.fields["words"].offset + 8 * (8 * worker_id + int(Word.MAIL))
            count = self.channels[worker_id].num_queued - _NUM_START_MESSAGES
            self.slab.memory[offset : offset + 8] = count.to_bytes(8, "little")

    def _free(self) -> None:
        for channel in self.channels:
            channel.close()
        for bell in (*self.bells, self.engine_bell):
            bell.close()
        self._poller.close()
        if self._server is not None and os.getpid() != self._owner_pid:
            self._server.control.close()
        if self.slab is not None:
            self.slab.close()


def _pack(
    factories: Sequence[EnvFactory], ranges: Sequence[range]
) -> list[tuple[bytes, list[int]]]:
    packed = []
    for env_ids in ranges:
        try:
            packed.append(_pack_some([factories[env_id] for env_id in env_ids]))
        except Exception as exc:
            raise UsageError(
                f"the function that makes envs {env_ids.start} to {env_ids.stop - 1} cannot be"
                f" sent to a worker process: {type(exc).__name__}: {exc}. Make the env's"
                " parts inside the function, or use the start method 'fork'."
            ) from exc
    return packed


def _pack_some(factories: list[EnvFactory]) -> tuple[bytes, list[int]]:
    if any(getattr(factory, "shares_memory", False) for factory in factories):
        return dumps_sharing(factories)
    return cloudpickle.dumps(factories), []
