"""The exceptions of shoal, and how each one is worded.

Knows env ids, worker ids and exit codes as plain numbers. Knows no other module
of the package.

The class says whose doing it is, the attributes hold the facts, and the text is
one sentence of facts, one of likely cause, one of next step:

    ShoalError
      UsageError            you called it wrongly; nothing has changed
        ClosedError         you closed it before
        PendingCallError    a call is under way; wait for it first
        NoPendingCallError  there is nothing to wait for
        SpecError           an array or a space does not fit (also a ValueError)
      EnvError              your environment raised
      StartError            a worker could not build its environments
        StartTimeout        ... in time (also a TimeoutError)
      BrokenError           the engine cannot go on; close it
        WorkerDied          what held envs has ended: a process, a thread or a loop
      RecvTimeout           nothing was ready in time; nothing has changed
"""

from __future__ import annotations

import pickle
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

__all__ = [
    "BrokenError",
    "ClosedError",
    "EnvError",
    "NoPendingCallError",
    "PendingCallError",
    "RecvTimeout",
    "ShoalError",
    "SpecError",
    "StartError",
    "StartTimeout",
    "UsageError",
    "WorkerDied",
]


class ShoalError(RuntimeError):
    """Base of every exception that shoal raises on its own account.

    A ``RuntimeError``, which is what TorchRL raises in most of these cases.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with keyword-only constructors cannot be rebuilt from `args`,
        # which is what pickle does by default.
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(cls: type[ShoalError], args: tuple[object, ...], state: dict[str, Any]) -> ShoalError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(ShoalError):
    """The call was wrong; nothing has changed."""


class ClosedError(UsageError):
    """The object was closed before this call."""


class PendingCallError(UsageError):
    """A call on these envs is still under way."""


class NoPendingCallError(UsageError):
    """Nothing was sent, so nothing can be received."""


class SpecError(UsageError, ValueError):
    """An array, a structure or a space does not fit its spec.

    Attributes:
        env_id: the env it came from or was meant for; ``None`` if it concerns all.
        key: the leaf, as in ``"observation"`` or ``"observation/image"``.
        expected: what the spec says, in words.
        actual: what came, in words.
    """

    def __init__(
        self,
        *,
        key: str,
        expected: str,
        actual: str,
        env_id: int | None = None,
        hint: str = "",
    ) -> None:
        self.env_id = env_id
        self.key = key
        self.expected = expected
        self.actual = actual
        self.hint = hint
        super().__init__(self._text())

    def _text(self) -> str:
        who = "" if self.env_id is None else f"Env {self.env_id}: "
        text = f"{who}{self.key} should be {self.expected}, but is {self.actual}."
        return f"{text} {self.hint}" if self.hint else text

    def at(self, env_id: int) -> Self:
        """Returns the same error with the env's index in it."""
        self.env_id = env_id
        self.args = (self._text(),)
        return self


class EnvError(ShoalError):
    """One or several envs raised; their own exceptions are kept.

    The envs named here have no result for this call. The others went on: what they
    returned is in ``batch``. Every env can be used again, usually after a reset.

    Attributes:
        env_id: the first env that failed.
        during: the operation, as ``"step"``, ``"reset"``, ``"seed"``, ``"call render"``.
        worker_traceback: the traceback text from where the env ran.
        failures: one ``EnvError`` per failed env, in env order.
        batch: results of the envs that did not fail, or ``None`` if there are none.
    """

    def __init__(
        self,
        *,
        env_id: int,
        during: str,
        cause_text: str,
        worker_traceback: str = "",
    ) -> None:
        self.env_id = env_id
        self.during = during
        self.worker_traceback = worker_traceback
        self.failures: tuple[EnvError, ...] = (self,)
        self.batch: object = None
        text = f"Env {env_id} raised during {during}: {cause_text}"
        if worker_traceback:
            text += f"\n\nIn the worker:\n{worker_traceback.rstrip()}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        # `failures` holds the error itself, and a batch is data for the caller here.
        state = {**self.__dict__, "failures": self.failures[1:], "batch": None}
        return (_rebuild_env_error, (self.args, state, _if_picklable(self.__cause__)))

    @classmethod
    def of_many(cls, failures: Sequence[EnvError]) -> EnvError:
        """Returns the first failure, carrying all of them."""
        first = min(failures, key=lambda failure: failure.env_id)
        rest = sorted((f for f in failures if f is not first), key=lambda f: f.env_id)
        first.failures = (first, *rest)
        if rest:
            others = ", ".join(str(failure.env_id) for failure in rest)
            first.add_note(f"Envs {others} failed in the same call; see `failures`.")
        return first


def _if_picklable(cause: BaseException | None) -> BaseException | None:
    try:
        pickle.dumps(cause)
    except Exception:  # noqa: BLE001 - border: a foreign class; its text is kept elsewhere
        return None
    return cause


def _rebuild_env_error(
    args: tuple[object, ...], state: dict[str, Any], cause: BaseException | None
) -> EnvError:
    error = EnvError.__new__(EnvError)
    error.args = args
    error.__dict__.update(state)
    error.failures = (error, *state["failures"])
    error.__cause__ = cause
    return error


class StartError(ShoalError):
    """A worker could not build its environments; nothing was started.

    Attributes:
        env_id: the env that could not be built, or ``None`` if no env is to blame.
        worker_traceback: the traceback text from where it was built.
    """

    def __init__(self, text: str, *, env_id: int | None = None, worker_traceback: str = "") -> None:
        self.env_id = env_id
        self.worker_traceback = worker_traceback
        if worker_traceback:
            text += f"\n\nIn the worker:\n{worker_traceback.rstrip()}"
        super().__init__(text)


class StartTimeout(TimeoutError, StartError):
    """The environments were not built in time; nothing was started.

    Attributes:
        env_id: the first env that was not ready, if it is known.
    """

    __reduce__ = ShoalError.__reduce__  # OSError's own comes first otherwise

    def __init__(self, text: str, *, env_id: int | None = None, worker_traceback: str = "") -> None:
        # A constructor of its own: OSError's takes no keywords.
        StartError.__init__(self, text, env_id=env_id, worker_traceback=worker_traceback)


class BrokenError(ShoalError):
    """The engine cannot go on. Close it; a new one can be opened."""


class WorkerDied(BrokenError):
    """A worker has ended by itself or was killed.

    Attributes:
        worker_id: the number of the worker.
        env_ids: the envs that it held.
        exitcode: its exit code; negative for a signal, as in ``subprocess``; ``None``
            if it could not be learned. Of a thread: the code of the exit that was raised
            there.
        during: the operation under way, or ``"idle"``.
        batch: results of envs that had finished before, or ``None``.
        failures: one ``EnvError`` per env that had raised before, in env order.
    """

    def __init__(
        self,
        *,
        worker_id: int,
        env_ids: Sequence[int],
        exitcode: int | None,
        during: str,
        kind: str = "process",
    ) -> None:
        """Words the error.

        Args:
            worker_id: see the class.
            env_ids: see the class.
            exitcode: see the class.
            during: see the class.
            kind: what the worker was: ``"process"``, ``"thread"`` or ``"loop"``.
        """
        self.worker_id = worker_id
        self.env_ids = tuple(env_ids)
        self.exitcode = exitcode
        self.during = during
        self.batch: object = None
        self.failures: tuple[EnvError, ...] = ()
        envs = ", ".join(map(str, self.env_ids[:8])) + (", ..." if len(self.env_ids) > 8 else "")
        super().__init__(
            f"{_NAMES[kind].format(worker_id)} (envs {envs}) {describe_exit(exitcode)} during"
            f" {during}. {_likely_cause(exitcode, kind)} The engine is broken: close it and open a"
            " new one."
        )


class RecvTimeout(TimeoutError, ShoalError):
    """Nothing was ready in time. Nothing has changed: receive again to get it.

    Attributes:
        waiting_for: ids of the envs that have not answered.
        timeout: the seconds that were allowed.
    """

    __reduce__ = ShoalError.__reduce__  # OSError's own comes first otherwise

    def __init__(self, *, waiting_for: Sequence[int], timeout: float, during: str) -> None:
        self.waiting_for = tuple(waiting_for)
        self.timeout = timeout
        self.during = during
        ids = ", ".join(map(str, self.waiting_for[:8]))
        ids += ", ..." if len(self.waiting_for) > 8 else ""
        super().__init__(
            f"No answer from envs {ids} to {during} within {timeout:g} s."
            " They may be slow or stuck. Nothing has changed: call again to wait longer,"
            " or close."
        )


def describe_exit(exitcode: int | None) -> str:
    """Returns an exit code in words, with the signal's name where there is one."""
    if exitcode is None:
        return "has ended (exit code unknown)"
    if exitcode >= 0:
        return f"ended with exit code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"was killed by {name}"


_NAMES = {
    "process": "Worker {}",
    "thread": "The thread of env {}",
    "loop": "The event loop of the envs",
}


def _likely_cause(exitcode: int | None, kind: str) -> str:
    if kind != "process":
        return "An environment raised what ends a process, such as SystemExit; see the cause."
    match exitcode:
        case -9:
            return "Often the machine ran out of memory."
        case -11 | -6 | -7 | -4 | -8:
            return "Native code in an environment crashed; its stack is on stderr."
        case 0:
            return "Something in an environment ended the process."
        case _:
            return "An environment ended the process, or somebody killed it."
