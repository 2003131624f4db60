"""Whether to reset an env in the same breath as the step that ended its episode.

A step that is known to be followed by a reset says so (`Op.STEP_AUTORESET`). For a
plain step nobody knows: below a transform the reset comes as a call of its own. The
predictor watches what follows the ends of episodes, and prepares resets once it has
seen plain resets follow them often enough. One wrong guess that reached a result
ends it for good, so that a caller who steps on past the end gets what a lone env
would have given him.

Pure: ids in, a decision out.
"""

from __future__ import annotations

__all__ = ["ResetPredictor"]

# Each confirmation costs one more round trip, once in the life of a pool, so it can
# be high. A caller that repeats each action four times, and resets after the last,
# looks like one who resets at once with chance 1/4: eight in a row have 1 in 65,536.
_CONFIRMATIONS = 8


class ResetPredictor:
    """Learns whether ends of episodes are followed by plain resets.

    Attributes:
        predicts_reset: the present decision.
    """

    __slots__ = ("_confirmed", "_unanswered", "predicts_reset")

    def __init__(self, *, enabled: bool = True) -> None:
        self.predicts_reset = False
        self._confirmed = 0 if enabled else -1
        self._unanswered = False

    def note_ends(self, *, any_finished: bool) -> None:
        """Notes that a plain step has returned."""
        self._unanswered = any_finished

    def note_step(self) -> None:
        """Notes that a step comes next."""
        if self._unanswered:
            self._refute()

    def note_wrong_guess(self) -> None:
        """Notes that an env was stepped although its reset was prepared."""
        self._refute()

    def note_reset(self, *, plain: bool) -> None:
        """Notes that a reset comes next; plain is one without seeds or options."""
        if not self._unanswered:
            return
        self._unanswered = False
        if not plain:
            # A reset in vain, but no wrong result: seeds and options undo it.
            self._confirmed = min(self._confirmed, 0)
            self.predicts_reset = False
        elif self._confirmed >= 0:
            self._confirmed += 1
            self.predicts_reset = self._confirmed >= _CONFIRMATIONS

    def _refute(self) -> None:
        self._unanswered = False
        if self.predicts_reset:
            self._confirmed = -1  # it cost a wrong result: never again
        elif self._confirmed > 0:
            self._confirmed = 0
        self.predicts_reset = False
