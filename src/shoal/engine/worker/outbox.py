"""What a worker process tells the engine: notes, rows, answers, replies, and rings.

Knows the control words, the channel and the engine's bell. Does not know how commands
arrive, or who carries them out.
"""

from __future__ import annotations

import platform
import threading
from typing import TYPE_CHECKING, Any

from shoal.engine.core.deadline import NEVER
from shoal.engine.core.layout import Word
from shoal.engine.core.messages import EnvNotes, PackedNotes, PackedReturned, Returned
from shoal.engine.core.spinning import spinning_is_safe
from shoal.engine.system.channel import dumps
from shoal.engine.worker.host import describe_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.engine.core.layout import Arrays
    from shoal.engine.system.bell import Bell
    from shoal.engine.system.channel import Channel
    from shoal.engine.worker.host import Host

__all__ = ["WORD_STRIDE", "Outbox"]

WORD_STRIDE = 8
_REQUEST, _REPLY, _NOTES = int(Word.REQUEST), int(Word.REPLY), int(Word.NOTES)


class Outbox:
    """One worker's side of everything that goes to the engine.

    Several threads may use it at once, except for `reply`.

    Attributes:
        channel_lock: held by who uses the channel.
        trust_flags: words in shared memory may be relied on without a ring.
    """

    def __init__(self, worker_id: int, channel: Channel, arrays: Arrays, engine_bell: Bell) -> None:
        self.channel_lock = threading.Lock()
        self.trust_flags = spinning_is_safe(platform.machine())
        self._channel = channel
        self._engine_bell = engine_bell
        self._words: Any = memoryview(arrays.words.reshape(-1))  # type: ignore[arg-type]
        self._engine_asleep = memoryview(arrays.engine_asleep)  # type: ignore[arg-type]
        base = worker_id * WORD_STRIDE
        self._reply, self._notes = base + _REPLY, base + _NOTES
        bases = range(0, arrays.words.size, WORD_STRIDE)
        self._pairs = [(base + _REQUEST, base + _REPLY) for base in bases]
        self._fence = threading.Lock()

    def publish(self, host: Host, indices: Sequence[int]) -> None:
        """Sends the notes of these envs, then hands their rows over."""
        if host.notes:
            env_ids, packed = tuple(host.notes), _pack_notes(host.notes)
            with self.channel_lock:
                # The message must be on its way before the rows it belongs to are seen.
                number = self._words[self._notes] + 1
                message = dumps(PackedNotes(number, env_ids, packed))
                self._words[self._notes] = number
                self.ring_if_asleep()
                self._channel.send_bytes(message, NEVER)
        host.publish(indices)
        host.notes = {}

    def answer(self, answer: Returned) -> None:
        """Sends the answer to a call."""
        failures = list(answer.failures)
        try:
            packed = dumps(answer.values)
        except Exception as exc:  # noqa: BLE001 - values may refuse to be pickled
            failures += [describe_failure(i, "send the call's result", exc) for i in answer.values]
            packed = dumps({})
        message = PackedReturned(answer.call_id, tuple(answer.values), packed, tuple(failures))
        with self.channel_lock:
            self._channel.send(message, NEVER)

    def reply(self, requested: int) -> None:
        """Says that everything up to this request is done."""
        self._words[self._reply] = requested  # after every row: data first
        self.full_fence()
        asleep = self._engine_asleep[0]
        # 2: the engine wants all workers, so the last one wakes it.
        if (asleep == 2 and self._all_have_replied()) or asleep == 1 or not self.trust_flags:
            self._engine_bell.ring()

    def ring_if_asleep(self, *, except_for_all: bool = False) -> None:
        """Wakes the engine, if it sleeps; ``except_for_all``: not if it waits for all."""
        self.full_fence()
        asleep = self._engine_asleep[0]
        if asleep == 2 and except_for_all:
            return
        if asleep or not self.trust_flags:
            self._engine_bell.ring()

    def full_fence(self) -> None:
        """Makes what was written visible before anything is read. A lock is a full barrier."""
        with self._fence:
            pass

    def _all_have_replied(self) -> bool:
        words = self._words
        # A loop, not a generator: this runs once per spin.
        for request, reply in self._pairs:  # noqa: SIM110
            if words[request] != words[reply]:
                return False
        return True


def _pack_notes(notes: dict[int, EnvNotes]) -> bytes:
    try:
        return dumps(notes)
    except Exception:  # noqa: BLE001 - values may refuse to be pickled
        for env_id, note in notes.items():
            try:
                dumps(note)
            except Exception as exc:  # noqa: BLE001 - values may refuse to be pickled
                failure = describe_failure(env_id, "send its result", exc)
                notes[env_id] = EnvNotes(failure=failure)
        return dumps(notes)
