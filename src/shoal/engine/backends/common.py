"""What backends share: words for failures, envs in this thread."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import cloudpickle

from shoal.engine.core.layout import Arrays, Status
from shoal.engine.core.messages import CallEnvs, EnvFailure, EnvNotes, Returned, SeedEnvs
from shoal.engine.worker.host import Host, build_envs, own_copy
from shoal.errors import EnvError, StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shoal.engine.env import Env, EnvFactory
    from shoal.engine.spec import EnvSpec, LeafPath

__all__ = [
    "LocalHost",
    "OneBreath",
    "build_here",
    "close_envs",
    "env_error",
    "own_notes",
    "start_error",
]


class OneBreath:
    """A backend whose resets come with the step that ended the episode, in rows of its own."""

    steps_done: Callable[[], bool] | None = None

    def take_observation(self) -> None:
        """Returns ``None``: an observation lies in the rows, and nowhere else."""
        return


def env_error(failure: EnvFailure) -> EnvError:
    """Returns the error for one failed env, with the env's own exception as cause."""
    error = EnvError(
        env_id=failure.env_id,
        during=failure.during,
        cause_text=failure.text,
        worker_traceback=failure.traceback,
    )
    error.__cause__ = _load_exception(failure)
    return error


def start_error(failure: EnvFailure) -> StartError:
    """Returns the error for an env that could not be built, with its own cause."""
    error = StartError(
        f"Env {failure.env_id} could not be built: {failure.text}",
        env_id=failure.env_id,
        worker_traceback=failure.traceback,
    )
    error.__cause__ = _load_exception(failure)
    return error


def _load_exception(failure: EnvFailure) -> BaseException | None:
    if failure.exception is None:
        return None
    try:
        exception = cloudpickle.loads(failure.exception)
    except Exception:  # noqa: BLE001 - border: a foreign class is rebuilt here
        return None  # its text and traceback are there
    return exception if isinstance(exception, BaseException) else None


def build_here(factories: Sequence[EnvFactory], first_id: int) -> list[Env]:
    """Builds envs in this process.

    Raises:
        StartError: one could not be built; the others were closed again.
    """
    envs, failure = build_envs(factories, range(first_id, first_id + len(factories)))
    if failure is not None:
        close_envs(envs)
        raise start_error(failure)
    return envs


def close_envs(envs: Sequence[Env]) -> None:
    """Closes envs that are given up; what one raises does not spare the others."""
    for env in envs:
        with contextlib.suppress(Exception):  # the error that led here is the one to tell
            env.close()


class LocalHost:
    """Envs that the calling thread itself steps, resets and closes.

    Attributes:
        first_id: the id of its first env.
        notes: what results hold beside their rows.
    """

    def __init__(
        self,
        envs: Sequence[Env],
        first_id: int,
        arrays: Arrays,
        spec: EnvSpec,
        *,
        keep_infos: bool,
    ) -> None:
        self.first_id = first_id
        self.notes: dict[int, EnvNotes] = {}
        self._own = slice(first_id, first_id + len(envs))
        self._arrays = arrays
        self._host: Host | None = Host(envs, first_id, arrays, spec, keep_infos=keep_infos)

    def run_pending(self) -> None:
        """Carries out what the op rows say, here and now."""
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
        indices = [env_id - self.first_id for env_id in env_ids]
        for k, i in enumerate(indices):
            host.reset(i, seeds[k], kwargs[k], undo_prepared=undo_prepared[k])
        self._publish(host, indices)

    def send_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Keeps action leaves without a fixed shape for the next step."""
        self._open_host().set_action_objects(
            {env_id - self.first_id: leaves for env_id, leaves in actions.items()}
        )

    def take_notes(self) -> dict[int, EnvNotes]:
        """Returns what results hold beside their rows, and forgets it."""
        notes, self.notes = self.notes, {}
        return notes

    def answer(self, command: CallEnvs | SeedEnvs) -> Returned:
        """Carries out a call, here and now."""
        values, failures = self._open_host().carry_out(command)
        return Returned(command.call_id, values, tuple(failures))

    def drop_pending(self) -> None:
        """Drops what an interrupt left undone: nobody else will do it."""
        if self._host is not None:
            self._host.forget()
        self.notes.clear()
        self._arrays.op[self._own] = 0
        self._arrays.status[self._own] = int(Status.READY)

    def close(self) -> None:
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
            self.notes.update(own_notes(host.notes))
            host.notes = {}


def own_notes(notes: Mapping[int, EnvNotes]) -> dict[int, EnvNotes]:
    """Returns copies: nothing was pickled on the way, and an env may reuse what it returned."""
    return {
        env_id: EnvNotes(
            observation=own_copy(note.observation),
            reset_observation=own_copy(note.reset_observation),
            info=own_copy(note.info),
            reset_info=own_copy(note.reset_info),
            failure=note.failure,
        )
        for env_id, note in notes.items()
    }
