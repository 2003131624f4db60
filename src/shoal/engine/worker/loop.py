"""The life of a worker process: build envs, then wait, run, publish, repeat.

Knows the host and the system parts it waits with. Does not know the engine, the
server that started it, or any env library. Runs in a process without torch.
"""

from __future__ import annotations

import contextlib
import platform
import threading
from typing import Any

from shoal.engine.core.deadline import NEVER, Deadline, stopwatch
from shoal.engine.core.layout import Word, view_arrays
from shoal.engine.core.messages import (
    Attached,
    AttachSlab,
    BuildEnvs,
    BuildFailed,
    Built,
    CallEnvs,
    EnvNotes,
    LeaveLoop,
    Left,
    PackedNotes,
    PackedReturned,
    ResetEnvs,
    SeedEnvs,
    SetActions,
)
from shoal.engine.core.spinning import SpinBudget, spinning_is_safe
from shoal.engine.system.bell import Bell
from shoal.engine.system.channel import Channel, ChannelClosed, dumps
from shoal.engine.system.memory import Slab
from shoal.engine.system.poller import Poller
from shoal.engine.system.sharing import loads_sharing
from shoal.engine.worker.host import Host, build_envs, describe_failure

__all__ = ["ENTRY", "main"]

ENTRY = f"{__name__}:main"

# Envs slower than this are published one by one, so that the engine can hand on the
# ready ones; faster ones are published together, with one wake-up.
_SLOW_ENV_S = 500e-6
_WORD_STRIDE = 8
_REQUEST, _REPLY, _ASLEEP = int(Word.REQUEST), int(Word.REPLY), int(Word.ASLEEP)
_NOTES, _MAIL = int(Word.NOTES), int(Word.MAIL)


def main(channel: Channel, inherited: Any) -> None:
    """Runs one worker until it is told to leave or the engine is gone."""
    try:
        command, fds = channel.recv(NEVER)
        assert isinstance(command, BuildEnvs)
        _work(channel, command, fds, inherited)
    except ChannelClosed:
        return  # the engine is gone; nobody is left to tell


def _work(channel: Channel, build: BuildEnvs, fds: list[int], inherited: Any) -> None:
    if inherited is not None:
        factories = [inherited[env_id] for env_id in build.env_ids]
    else:
        try:
            factories = loads_sharing(build.factories, fds)
        except Exception as exc:  # noqa: BLE001 - border: what they need may be missing here
            channel.send(BuildFailed(describe_failure(build.env_ids[0], "build", exc)), NEVER)
            return
    envs, failure = build_envs(factories, build.env_ids)
    try:
        if failure is not None:
            channel.send(BuildFailed(failure), NEVER)
            return
        channel.send(Built(tuple(env.spec for env in envs)), NEVER)
        attach, fds = channel.recv(NEVER)
        if isinstance(attach, LeaveLoop):
            channel.send(Left(), NEVER)
            return
        assert isinstance(attach, AttachSlab)
        slab = Slab.attach(fds[0], attach.layout.nbytes)
        arrays = view_arrays(attach.layout, slab.memory)
        host = Host(envs, build.env_ids[0], arrays, attach.spec, keep_infos=build.keep_infos)
        envs = []  # the host closes them from here on
        loop = _Loop(build, channel, host, arrays, Bell(fds[1], fds[2]), Bell(fds[3], fds[4]))
        channel.send(Attached(), NEVER)
        try:
            loop.run()
        finally:
            loop.leave()
    finally:
        for env in envs:
            with contextlib.suppress(Exception):
                env.close()


class _Loop:
    """Waits for requests, runs the host, publishes."""

    def __init__(
        self,
        build: BuildEnvs,
        channel: Channel,
        host: Host,
        arrays: Any,
        bell: Bell,
        engine_bell: Bell,
    ) -> None:
        self._channel = channel
        self._host = host
        self._bell = bell
        self._engine_bell = engine_bell
        self._words = memoryview(arrays.words.reshape(-1))
        self._engine_asleep = memoryview(arrays.engine_asleep)
        self._base = build.worker_id * _WORD_STRIDE
        bases = range(0, arrays.words.size, _WORD_STRIDE)
        self._pairs = [(base + _REQUEST, base + _REPLY) for base in bases]
        self._trust_flags = spinning_is_safe(platform.machine())
        self._spin = SpinBudget(enabled=build.may_spin and self._trust_flags)
        self._seen = 0
        self._mail_seen = 0
        self._channel_woke = False
        self._env_s = 0.0
        self._leaving = False
        self._failures: tuple[Any, ...] = ()
        self._fence = threading.Lock()
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
                self._reply(requested)

    def leave(self) -> None:
        """Closes the envs and says so. The last thing a worker does."""
        failures = tuple(self._host.close())
        with contextlib.suppress(ChannelClosed, TimeoutError):
            self._channel.send(Left(failures), Deadline.after(5))

    # --- waiting -------------------------------------------------------------------

    def _wait(self) -> None:
        """Waits for a new request or a message."""
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
        words[self._base + _ASLEEP] = 1
        self._full_fence()
        if words[request] == seen and words[self._base + _MAIL] == self._mail_seen:
            fds = self._poller.wait_any(NEVER)
            self._channel_woke = any(fd != self._bell.fd for fd in fds)
        words[self._base + _ASLEEP] = 0
        spin.note_wait(clock() - started)

    def _full_fence(self) -> None:
        # "I sleep" must be visible before the last look for work, else a request
        # could slip between the two. Taking a lock is a full barrier.
        self._fence.acquire(blocking=False)
        self._fence.release()

    # --- rows ----------------------------------------------------------------------

    def _serve(self) -> None:
        host = self._host
        ops, indices = host.pending()
        if not indices:
            return
        started = stopwatch()
        if self._env_s > _SLOW_ENV_S and len(indices) > 1:
            for i in indices:
                host.run(ops, [i])
                self._publish([i])
                self._ring_if_asleep(except_for_all=True)
        else:
            host.run(ops, indices)
            self._publish(indices)
        self._env_s = (stopwatch() - started) / len(indices)

    def _publish(self, indices: Any) -> None:
        host = self._host
        if host.notes:
            # The message must be on its way before the rows it belongs to are seen.
            number = self._words[self._base + _NOTES] + 1
            message = self._pack_notes(number, host.notes)
            self._words[self._base + _NOTES] = number
            self._ring_if_asleep()
            self._channel.send_bytes(message, NEVER)
        host.publish(indices)
        host.notes = {}

    def _pack_notes(self, number: int, notes: dict[int, EnvNotes]) -> bytes:
        env_ids = tuple(notes)
        try:
            return dumps(PackedNotes(number, env_ids, dumps(notes)))
        except Exception:  # noqa: BLE001 - values may refuse to be pickled
            for env_id, note in notes.items():
                try:
                    dumps(note)
                except Exception as exc:  # noqa: BLE001 - values may refuse to be pickled
                    failure = describe_failure(env_id, "send its result", exc)
                    notes[env_id] = EnvNotes(failure=failure)
            return dumps(PackedNotes(number, env_ids, dumps(notes)))

    def _reply(self, requested: int) -> None:
        self._seen = requested
        self._words[self._base + _REPLY] = requested  # after every row: data first
        self._full_fence()
        asleep = self._engine_asleep[0]
        # 2: the engine wants all workers, so the last one wakes it.
        if (asleep == 2 and self._all_have_replied()) or asleep == 1 or not self._trust_flags:
            self._engine_bell.ring()

    def _ring_if_asleep(self, *, except_for_all: bool = False) -> None:
        self._full_fence()
        asleep = self._engine_asleep[0]
        if asleep == 2 and except_for_all:
            return
        if asleep or not self._trust_flags:
            self._engine_bell.ring()

    def _all_have_replied(self) -> bool:
        words = self._words
        # A loop, not a generator: this runs once per spin.
        for request, reply in self._pairs:  # noqa: SIM110
            if words[request] != words[reply]:
                return False
        return True

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
                self._publish(indices)
                self._ring_if_asleep()
            case SeedEnvs() | CallEnvs():
                self._answer(command)
            case LeaveLoop():
                self._leaving = True

    def _answer(self, command: CallEnvs | SeedEnvs) -> None:
        values, failures = self._host.carry_out(command)
        try:
            packed = dumps(values)
        except Exception as exc:  # noqa: BLE001 - values may refuse to be pickled
            failures += [describe_failure(i, "send the call's result", exc) for i in values]
            packed = dumps({})
        answer = PackedReturned(command.call_id, tuple(values), packed, tuple(failures))
        self._channel.send(answer, NEVER)
