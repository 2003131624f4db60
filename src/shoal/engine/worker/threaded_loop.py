"""The life of a worker process whose envs have a thread each.

Knows the crew of threads and the system parts it waits with. Does not know the engine, or
any env library.

The main thread waits for requests and messages and hands them on, so it is never busy
with an env. Each env's thread publishes its own row. The reply to a request goes out when
everything asked for so far is done: whoever finishes last gives it.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from shoal.engine.core.deadline import NEVER, Deadline
from shoal.engine.core.layout import Word
from shoal.engine.core.messages import (
    BuildEnvs,
    BuildFailed,
    CallEnvs,
    EnvFailure,
    LeaveLoop,
    Left,
    ResetEnvs,
    Returned,
    SeedEnvs,
    SetActions,
)
from shoal.engine.spec import EnvSpec
from shoal.engine.system.channel import Channel, ChannelClosed
from shoal.engine.system.poller import Poller
from shoal.engine.worker.env_threads import EnvThreads
from shoal.engine.worker.outbox import WORD_STRIDE, Outbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shoal.engine.core.layout import Arrays
    from shoal.engine.core.messages import AttachSlab
    from shoal.engine.env import EnvFactory
    from shoal.engine.system.bell import Bell
    from shoal.engine.worker.host import Host

__all__ = ["ThreadedLoop"]

# Other envs may close when one could not be built or has ended its worker.
_GRACE_AFTER_FAILURE_S = 2.0
_REQUEST, _ASLEEP, _MAIL = int(Word.REQUEST), int(Word.ASLEEP), int(Word.MAIL)


class ThreadedLoop:
    """Waits for requests and hands them to the threads of the envs."""

    def __init__(self, build: BuildEnvs, channel: Channel) -> None:
        self._build = build
        self._channel = channel
        self._env_ids = range(build.env_ids[0], build.env_ids[-1] + 1)
        self._threads = EnvThreads(self._env_ids, self)
        self._base = build.worker_id * WORD_STRIDE
        self._seen = 0
        self._mail_seen = 0
        # Envs that had an op while they were busy. It may be the one they are busy with,
        # or a new one; the engine sees a row before we see that its thread is free. They
        # ring when they are, and until then there is no reply.
        self._passed_over: set[int] = set()
        self._reply_lock = threading.Lock()
        self._channel_woke = False
        self._is_torn = False
        self._is_leaving = False
        self._bell: Bell | None = None  # there is none before there are rows

    # --- start ---------------------------------------------------------------------

    def build(self, factories: Sequence[EnvFactory]) -> tuple[EnvSpec, ...] | None:
        """Builds all envs at once; returns their specs, or nothing: one has failed."""
        self._threads.start(factories)
        reports = self._take_reports()
        if reports is None:
            return None
        specs = [reports[env_id] for env_id in self._env_ids]
        return tuple(spec for spec in specs if isinstance(spec, EnvSpec))

    def attach(self, attach: AttachSlab, arrays: Arrays, bell: Bell, outbox: Outbox) -> bool:
        """Gives the envs their rows; returns whether all have taken them."""
        self._words: Any = memoryview(arrays.words.reshape(-1))  # type: ignore[arg-type]
        self._op = arrays.op[self._env_ids.start : self._env_ids.stop]
        self._bell = bell
        self._outbox = outbox
        self._poller = Poller(bell)
        self._poller.watch(self._channel.fileno())
        self._threads.attach(arrays, attach.spec, keep_infos=self._build.keep_infos)
        return self._take_reports() is not None

    def _take_reports(self) -> dict[int, Any] | None:
        # Without a deadline: the engine has one, and kills.
        reports = self._threads.take_reports(NEVER)
        self._raise_death()
        for report in reports.values():
            if isinstance(report, EnvFailure):
                self._channel.send(BuildFailed(report), NEVER)
                return None
        return reports

    def _raise_death(self) -> None:
        """Ends the worker as its env's thread has ended."""
        for death in self._threads.deaths.values():
            if isinstance(death.cause, SystemExit):
                # Nobody may take the end of one env for an orderly end of all.
                raise SystemExit(death.exitcode or 1)
            death.cause.add_note(f"In the env's thread:\n{death.traceback}")
            raise death.cause

    # --- the main thread -----------------------------------------------------------

    def run(self) -> None:
        """Serves until told to leave."""
        words, request = self._words, self._base + _REQUEST
        while not self._is_leaving:
            self._wait()
            self._raise_death()
            requested = words[request]
            # In this order: an env that is free by now leaves its op alone until it is told
            # of it, and what belongs to the op was sent before it was written.
            busy = {env_id for env_id in self._env_ids if self._threads.is_busy(env_id)}
            waiting = [self._env_ids[i] for i, op in enumerate(self._op.tobytes()) if op]
            if self._take_messages():
                self._threads.run(env_id for env_id in waiting if env_id not in busy)
                self._pass_over(busy.intersection(waiting))
                self._seen = requested
                self._reply_if_done()

    def leave(self) -> None:
        """Closes the envs and says so. The last thing a worker does."""
        # One that hangs is killed by the engine when it has waited long enough.
        deadline = NEVER if self._is_leaving else Deadline.after(_GRACE_AFTER_FAILURE_S)
        self._threads.close(deadline)
        if self._is_leaving and self._outbox.channel_lock.acquire(timeout=5):
            with contextlib.suppress(ChannelClosed, TimeoutError):
                self._channel.send(Left(), Deadline.after(5))

    def _wait(self) -> None:
        """Waits for a new request, a message, or a ring of one of the threads."""
        words = self._words
        words[self._base + _ASLEEP] = 1
        self._outbox.full_fence()
        nothing_new = (
            words[self._base + _REQUEST] == self._seen
            and words[self._base + _MAIL] == self._mail_seen
        )
        if nothing_new or self._is_torn:
            fds = self._poller.wait_any(NEVER)
            self._channel_woke = self._channel.fileno() in fds
        words[self._base + _ASLEEP] = 0

    def _pass_over(self, env_ids: set[int]) -> None:
        """Leaves these for when they are free, which some may be already."""
        self._passed_over = env_ids
        if not all(map(self._threads.is_busy, env_ids)):
            self._ring_main()

    def _take_messages(self) -> bool:
        """Carries out what messages say; returns whether all that were announced are here."""
        mail = self._base + _MAIL
        if self._channel_woke or self._words[mail] != self._mail_seen:
            self._channel_woke = False
            # Never waits for the rest of one: the threads could not send anything then.
            while (command := self._poll_command()) is not None:
                self._carry_out(command)
        self._is_torn = self._words[mail] != self._mail_seen
        return not self._is_torn

    def _poll_command(self) -> Any:
        with self._outbox.channel_lock:
            found = self._channel.poll_recv()
        if found is None:
            return None
        self._mail_seen += 1
        return found[0]

    def _carry_out(self, command: Any) -> None:
        match command:
            case SetActions(actions):
                self._threads.set_action_objects(actions)
            case ResetEnvs(env_ids, seeds, kwargs, undo):
                for k, env_id in enumerate(env_ids):
                    self._threads.reset(env_id, seeds[k], kwargs[k], undo_prepared=undo[k])
            case SeedEnvs() | CallEnvs():
                reply = _Gathering(len(command.env_ids), self._answer).add
                for one in _one_by_one(command):
                    self._threads.ask(one, reply)
            case LeaveLoop():
                self._is_leaving = True

    # --- the threads of the envs ---------------------------------------------------

    def publish(self, host: Host, indices: Sequence[int]) -> None:
        """Hands the row of one env over."""
        self._outbox.publish(host, indices)
        self._wake_main_for_mail()

    def on_done(self, env_id: int) -> None:
        """Wakes the engine, with a reply if this was the last."""
        if env_id in self._passed_over:
            self._ring_main()
        if not self._reply_if_done():
            self._outbox.ring_if_asleep(except_for_all=True)

    def on_death(self) -> None:
        """Wakes the main thread, which ends the worker."""
        self._ring_main()

    def _answer(self, answer: Returned) -> None:
        self._outbox.answer(answer)
        self._wake_main_for_mail()

    def _wake_main_for_mail(self) -> None:
        # A thread that sends reads, too, where the engine does not take what it sends; what
        # it has read makes no noise any more.
        if self._words[self._base + _MAIL] != self._mail_seen:
            self._ring_main()

    # --- both ----------------------------------------------------------------------

    def _ring_main(self) -> None:
        # Before there is a bell, the main thread waits for reports, and gets one.
        if self._bell is not None:
            self._bell.ring()

    def _reply_if_done(self) -> bool:
        """Gives the reply, if nothing is left to do; returns whether it is given."""
        if self._passed_over or not self._threads.all_done():
            return False
        # Who comes first gives the number that he knows of, never a smaller one after it.
        with self._reply_lock:
            seen = self._seen
            if self._passed_over or not self._threads.all_done():
                return False
            self._outbox.reply(seen)
        return True


class _Gathering:
    """Puts the answers of several envs to one call together."""

    def __init__(self, num_asked: int, answer: Callable[[Returned], None]) -> None:
        self._num_asked = num_asked
        self._answer = answer
        self._answers: list[Returned] = []
        self._lock = threading.Lock()

    def add(self, answer: Returned) -> None:
        """Takes the answer of one env; sends all of them with the last."""
        with self._lock:
            self._answers.append(answer)
            is_last = len(self._answers) == self._num_asked
        if is_last:
            values = {i: value for one in self._answers for i, value in one.values.items()}
            failures = [failure for one in self._answers for failure in one.failures]
            self._answer(Returned(answer.call_id, values, tuple(failures)))


def _one_by_one(command: CallEnvs | SeedEnvs) -> list[CallEnvs | SeedEnvs]:
    match command:
        case SeedEnvs(call_id, env_ids, seeds):
            pairs = zip(env_ids, seeds, strict=True)
            return [SeedEnvs(call_id, (env_id,), (seed,)) for env_id, seed in pairs]
        case CallEnvs(call_id, env_ids, name, args, kwargs):
            return [CallEnvs(call_id, (env_id,), name, args, kwargs) for env_id in env_ids]
