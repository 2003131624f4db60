"""The life of a worker process: build envs, then wait, run, publish, repeat.

Knows the host and the system parts it waits with. Does not know the engine, the
server that started it, or any env library. Runs in a process without torch.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from shoal.engine.core.deadline import NEVER, Deadline, stopwatch
from shoal.engine.core.layout import Arrays, Word, view_arrays
from shoal.engine.core.messages import (
    Attached,
    AttachSlab,
    BuildEnvs,
    BuildFailed,
    Built,
    CallEnvs,
    LeaveLoop,
    Left,
    ResetEnvs,
    Returned,
    SeedEnvs,
    SetActions,
)
from shoal.engine.core.spinning import SpinBudget
from shoal.engine.system.bell import Bell
from shoal.engine.system.channel import Channel, ChannelClosed
from shoal.engine.system.cores import bind_to_cores
from shoal.engine.system.memory import Slab
from shoal.engine.system.poller import Poller
from shoal.engine.system.sharing import loads_sharing
from shoal.engine.worker.host import Host, build_envs, describe_failure
from shoal.engine.worker.outbox import WORD_STRIDE, Outbox
from shoal.engine.worker.threaded_loop import ThreadedLoop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.engine.env import EnvFactory

__all__ = ["ENTRY", "main"]

ENTRY = f"{__name__}:main"

# Envs slower than this are published one by one, so that the engine can hand on the
# ready ones; faster ones are published together, with one wake-up.
_SLOW_ENV_S = 500e-6
_REQUEST, _ASLEEP, _MAIL = int(Word.REQUEST), int(Word.ASLEEP), int(Word.MAIL)


def main(channel: Channel, inherited: Any) -> None:
    """Runs one worker until it is told to leave or the engine is gone."""
    try:
        command, fds = channel.recv(NEVER)
        assert isinstance(command, BuildEnvs)
        _work(channel, command, fds, inherited)
    except ChannelClosed:
        return  # the engine is gone; nobody is left to tell


def _work(channel: Channel, build: BuildEnvs, fds: list[int], inherited: Any) -> None:
    try:
        if build.cores is not None:
            bind_to_cores(build.cores)
        if inherited is not None:
            factories = [inherited[env_id] for env_id in build.env_ids]
        else:
            factories = loads_sharing(build.factories, fds)
    except Exception as exc:  # noqa: BLE001 - border: what they need may be missing here
        channel.send(BuildFailed(describe_failure(build.env_ids[0], "build", exc)), NEVER)
        return
    (_host_on_threads if build.env_threads else _host_here)(channel, build, factories)


def _host_here(channel: Channel, build: BuildEnvs, factories: Sequence[EnvFactory]) -> None:
    """Runs all envs on this thread."""
    envs, failure = build_envs(factories, build.env_ids)
    try:
        if failure is not None:
            channel.send(BuildFailed(failure), NEVER)
            return
        channel.send(Built(tuple(env.spec for env in envs)), NEVER)
        attached = _attach(channel, build)
        if attached is None:
            return
        attach, arrays, bell, outbox = attached
        host = Host(envs, build.env_ids[0], arrays, attach.spec, keep_infos=build.keep_infos)
        envs = []  # the host closes them from here on
        loop = _Loop(build, channel, host, arrays, bell, outbox)
        channel.send(Attached(), NEVER)
        try:
            loop.run()
        finally:
            loop.leave()
    finally:
        for env in envs:
            with contextlib.suppress(Exception):
                env.close()


def _host_on_threads(channel: Channel, build: BuildEnvs, factories: Sequence[EnvFactory]) -> None:
    """Runs each env on a thread of its own."""
    loop = ThreadedLoop(build, channel)
    try:
        specs = loop.build(factories)
        if specs is None:
            return
        channel.send(Built(specs), NEVER)
        attached = _attach(channel, build)
        if attached is not None and loop.attach(*attached):
            channel.send(Attached(), NEVER)
            loop.run()
    finally:
        loop.leave()


def _attach(channel: Channel, build: BuildEnvs) -> tuple[AttachSlab, Arrays, Bell, Outbox] | None:
    """Waits for the slab and maps it; ``None``: the engine wants no more of this worker."""
    attach, fds = channel.recv(NEVER)
    if isinstance(attach, LeaveLoop):
        channel.send(Left(), NEVER)
        return None
    assert isinstance(attach, AttachSlab)
    slab = Slab.attach(fds[0], attach.layout.nbytes)
    arrays = view_arrays(attach.layout, slab.memory)
    outbox = Outbox(build.worker_id, channel, arrays, Bell(fds[3], fds[4]))
    return attach, arrays, Bell(fds[1], fds[2]), outbox


class _Loop:
    """Waits for requests, runs the host, publishes."""

    def __init__(
        self,
        build: BuildEnvs,
        channel: Channel,
        host: Host,
        arrays: Arrays,
        bell: Bell,
        outbox: Outbox,
    ) -> None:
        self._channel = channel
        self._host = host
        self._outbox = outbox
        self._bell = bell
        self._words: Any = memoryview(arrays.words.reshape(-1))  # type: ignore[arg-type]
        self._base = build.worker_id * WORD_STRIDE
        self._may_spin = build.may_spin and outbox.trust_flags
        self._spin = SpinBudget(enabled=self._may_spin)
        self._seen = 0
        self._mail_seen = 0
        self._channel_woke = False
        self._env_s = 0.0
        self._leaving = False
        self._poller = Poller(bell)
        self._poller.watch(channel.fileno())

    def run(self) -> None:
        """Serves until told to leave."""
        words, request, mail = self._words, self._base + _REQUEST, self._base + _MAIL
        while not self._leaving:
            if words[request] == self._seen:
                self._wait()
            requested = words[request]
            # Messages first: they were sent before the request that announces them.
            if words[mail] != self._mail_seen or self._channel_woke:
                self._take_messages()
            if requested != self._seen:
                self._serve()
                self._seen = requested
                self._outbox.reply(requested)

    def leave(self) -> None:
        """Closes the envs and says so. The last thing a worker does."""
        failures = tuple(self._host.close())
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._channel.send(Left(failures), Deadline.after(5))

    # --- waiting -------------------------------------------------------------------

    def _wait(self) -> None:
        """Waits for a new request or a message."""
        if not self._may_spin:
            self._sleep()
            return
        words, request = self._words, self._base + _REQUEST
        seen = self._seen
        clock, spin = stopwatch, self._spin
        started = clock()
        if spin.budget_s:
            until = started + spin.budget_s
            while words[request] == seen:
                if clock() > until:
                    break
            else:
                spin.note_wait(clock() - started)
                return
        self._sleep()
        spin.note_wait(clock() - started)

    def _sleep(self) -> None:
        words, base = self._words, self._base
        words[base + _ASLEEP] = 1
        self._outbox.full_fence()
        if words[base + _REQUEST] == self._seen and words[base + _MAIL] == self._mail_seen:
            self._channel_woke = self._poller.wait_long()
        words[base + _ASLEEP] = 0

    # --- rows ----------------------------------------------------------------------

    def _serve(self) -> None:
        host = self._host
        ops, indices = host.pending()
        if self._words[self._base + _MAIL] != self._mail_seen:
            # An op for which nobody has asked yet: what belongs to it came before it.
            self._take_messages()
        if not indices:
            return
        if len(indices) == 1:
            host.run(ops, indices)
            self._outbox.publish(host, indices)
            return
        started = stopwatch()
        if self._env_s > _SLOW_ENV_S:
            for i in indices:
                host.run(ops, [i])
                self._outbox.publish(host, [i])
                self._outbox.ring_if_asleep(except_for_all=True)
        else:
            host.run(ops, indices)
            self._outbox.publish(host, indices)
        self._env_s = (stopwatch() - started) / len(indices)

    # --- messages ------------------------------------------------------------------

    def _take_messages(self) -> None:
        # The count saves a system call per step; it is raised before the message is
        # sent, so waiting for the rest of it is right.
        mail = self._base + _MAIL
        while not self._leaving:
            if self._words[mail] != self._mail_seen:
                command, _ = self._channel.recv(NEVER)
                self._mail_seen += 1
                self._carry_out(command)
            elif self._channel_woke:
                # Nothing is due, so this may be the end of the stream. A look must not
                # take anything: the next message may come in just now, counted after
                # the count was read.
                self._channel_woke = False
                self._channel.peek()
            else:
                return

    def _carry_out(self, command: Any) -> None:
        host = self._host
        match command:
            case SetActions(actions):
                host.set_action_objects(
                    {env_id - host.first_id: leaves for env_id, leaves in actions.items()}
                )
            case ResetEnvs(env_ids, seeds, kwargs, undo):
                indices = [env_id - host.first_id for env_id in env_ids]
                for k, i in enumerate(indices):
                    host.reset(i, seeds[k], kwargs[k], undo_prepared=undo[k])
                self._outbox.publish(host, indices)
                self._outbox.ring_if_asleep()
            case SeedEnvs() | CallEnvs():
                values, failures = host.carry_out(command)
                self._outbox.answer(Returned(command.call_id, values, tuple(failures)))
            case LeaveLoop():
                self._leaving = True
