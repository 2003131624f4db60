"""Owns the envs of one worker and carries out one command at a time.

Knows the env contract, its own rows, and the messages. Does not know how commands
arrive, other workers, or any env library. An env's exception becomes a record here;
nothing else is caught.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from shoal.engine.core.deadline import stopwatch
from shoal.engine.core.layout import Arrays, Op, Status
from shoal.engine.core.merge import builder_from, flattener_to
from shoal.engine.core.messages import CallEnvs, EnvFailure, EnvNotes, SeedEnvs
from shoal.engine.spec import ArraySpec, LeafPath, describe_path
from shoal.engine.worker.rows import ObservationWriter, as_flag, as_reward, leaf_writer
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.engine.env import Env, EnvFactory
    from shoal.engine.spec import EnvSpec

__all__ = ["Host", "build_envs", "describe_failure", "own_copy"]

_STEP, _STEP_PREPARE, _RESET = int(Op.STEP), int(Op.STEP_PREPARE), int(Op.RESET)
_READY, _FAILED, _RESET_DONE = int(Status.READY), int(Status.FAILED), int(Status.RESET_DONE)
_NOTHING: dict[Any, Any] = {}
_StepCall = tuple[int, Callable[[Any], Any], Callable[[Any], None]]
_FLAG_TYPES = frozenset({bool, np.bool_})


def describe_failure(env_id: int, during: str, exc: BaseException) -> EnvFailure:
    """Returns the record of what an env raised."""
    if isinstance(exc, SpecError):
        exc.at(env_id)
    try:
        pickled: bytes | None = cloudpickle.dumps(exc)
    except Exception:  # noqa: BLE001 - border: foreign code
        pickled = None
    return EnvFailure(
        env_id=env_id,
        during=during,
        text="".join(traceback.format_exception_only(exc)).strip(),
        traceback="".join(traceback.format_exception(exc)),
        exception=pickled,
    )


def build_envs(
    factories: Sequence[EnvFactory], env_ids: Sequence[int]
) -> tuple[list[Env], EnvFailure | None]:
    """Returns the envs, or those built so far and what the next one raised."""
    envs: list[Env] = []
    for env_id, factory in zip(env_ids, factories, strict=True):
        try:
            envs.append(factory())
        except Exception as exc:  # noqa: BLE001 - border: foreign code
            return envs, describe_failure(env_id, "build", exc)
    return envs, None


class Host:
    """The envs of one worker, and their rows.

    Local indices count this worker's envs from 0; ``first_id`` is the id of the first.

    Attributes:
        notes: what the present results hold beside their rows, per env id. Taken and
            emptied by the caller before it publishes the rows.
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
        self.envs = envs
        self.first_id = first_id
        self.notes: dict[int, EnvNotes] = {}
        self._keep_infos = keep_infos
        self._steps = [env.step for env in envs]
        self._resets = [env.reset for env in envs]
        own = slice(first_id, first_id + len(envs))
        self._op = arrays.op[own]
        self._status = arrays.status[own]
        self._timed: Any = memoryview(arrays.timed)  # type: ignore[arg-type]
        self._ready_at = arrays.ready_at[own]
        # Of one row, as a memoryview: a write takes a third of an array's.
        self._op_of: Any = memoryview(self._op)  # type: ignore[arg-type]
        self._status_of: Any = memoryview(self._status)  # type: ignore[arg-type]
        self._ready_at_of: Any = memoryview(self._ready_at)  # type: ignore[arg-type]
        # As a memoryview: takes anything that is a real number and nothing else, at half
        # the price of an array.
        self._rewards: Any = memoryview(arrays.reward[own])  # type: ignore[arg-type]
        self._terminated = arrays.terminated[own]
        self._truncated = arrays.truncated[own]
        flatteners = [flattener_to(spec, env.spec, env.flatten_observation) for env in envs]
        self._writer, self._reset_writer = (
            ObservationWriter(spec.observation, {p: a[own] for p, a in rows.items()}, flatteners)
            for rows in (arrays.observation, arrays.reset_observation)
        )
        self._writes = self._writer.bound_writes(self._keep_objects)
        self._action_rows = [
            arrays.action[path][own] if isinstance(leaf, ArraySpec) else path
            for path, leaf in spec.action.items()
        ]
        self._builders = [builder_from(spec, env.spec, env.build_action) for env in envs]
        self._action_is_leaf = all(build is None for build in self._builders)
        self._action_objects: dict[int, dict[LeafPath, Any]] = {}
        self._unbuilt: dict[int, Callable[[Any], Any]] = {}  # stand-ins for steps that cannot be
        self._info_writers, self._reset_info_writers = (
            [
                (path, leaf_writer(rows[path][own], leaf, describe_path("info", path)), leaf)
                for path, leaf in spec.info.items()
            ]
            for rows in (arrays.info, arrays.reset_info)
        )
        self._wants_info = bool(spec.info) or keep_infos
        self._all = range(len(envs))
        self._all_alike = {bytes([op]) * len(envs) for op in Op if op is not Op.NONE}
        self._rng_states: list[object] = [None] * len(envs)
        self._reset_done: list[int] = []
        self._has_ends = False
        self._finished: list[int] = []

    # --- rows that the engine asked for through the slab ---------------------------

    def pending(self) -> tuple[bytes, Sequence[int]]:
        """Returns the op byte of every env, and the local indices that have one."""
        ops = self._op.tobytes()
        if ops in self._all_alike:
            return ops, self._all
        return ops, [i for i, op in enumerate(ops) if op]

    def run(self, ops: bytes, indices: Sequence[int]) -> None:
        """Carries out the ops of these envs. `publish` hands the rows over."""
        if _RESET not in ops:
            self._step(indices, ops)
            return
        if stepping := [i for i in indices if ops[i] != _RESET]:
            self._step(stepping, ops)
        for i in indices:
            if ops[i] == _RESET:
                self._reset_plainly(i)

    def publish(self, indices: Sequence[int]) -> None:
        """Hands the rows over: the engine may read them from here on.

        The op is cleared first: once the status is set the engine may set a new one.
        Only envs that have something to tell besides being ready cost more than two
        writes for all.
        """
        if len(indices) == 1:
            self._publish_one(indices[0])
            return
        special = dict.fromkeys(self._reset_done, _READY | _RESET_DONE)
        self._reset_done.clear()
        for env_id, note in self.notes.items():
            if note.failure is not None:
                special[env_id - self.first_id] = _READY | _FAILED
        whole = indices is self._all
        if self._timed[0]:
            self._ready_at[... if whole else indices] = stopwatch()
        if whole:
            self._op.fill(0)
        else:
            self._op[indices] = 0
        if not special:
            self._status[... if whole else indices] = _READY
            return
        statuses = [special.get(i, _READY) for i in indices]
        self._status[... if whole else indices] = statuses

    def _publish_one(self, i: int) -> None:
        status = _READY
        if self._reset_done:
            status |= _RESET_DONE if i in self._reset_done else 0
            self._reset_done.clear()
        if self.notes:
            note = self.notes.get(self.first_id + i)
            if note is not None and note.failure is not None:
                status = _READY | _FAILED
        if self._timed[0]:
            self._ready_at_of[i] = stopwatch()
        self._op_of[i] = 0
        self._status_of[i] = status

    def forget(self) -> None:
        """Forgets what was run and not published: an interrupt came in between."""
        self.notes = {}
        self._reset_done.clear()

    def set_action_objects(self, actions: Mapping[int, Mapping[LeafPath, Any]]) -> None:
        """Keeps the action leaves without a fixed shape for the next step."""
        self._action_objects.update({i: dict(leaves) for i, leaves in actions.items()})

    # --- step ----------------------------------------------------------------------

    def _take_actions(self, indices: Sequence[int]) -> list[Any]:
        # One copy per leaf, then one view or scalar per env: an env may keep or change
        # its action without touching the slab.
        columns: list[list[Any]] = []
        for rows in self._action_rows:
            if isinstance(rows, tuple):
                # Taken out: one that is optional must not be there at the next step.
                objects = self._action_objects
                columns.append([objects.get(i, _NOTHING).pop(rows, None) for i in indices])
                continue
            if indices is self._all:
                own = rows.copy()
            elif len(indices) == 1:
                own = rows[indices[0] : indices[0] + 1].copy()  # a list takes four times as long
            else:
                own = rows[indices]
            # Integers as Python's own: what TorchRL hands to an env.
            as_ints = own.ndim == 1 and own.dtype.kind in "iu"
            columns.append(own.tolist() if as_ints else list(own))
        if self._action_is_leaf:
            return columns[0]
        self._unbuilt = {}
        rows_of_leaves = zip(*columns, strict=True) if columns else [()] * len(indices)
        return [
            self._build_action(i, leaves) for i, leaves in zip(indices, rows_of_leaves, strict=True)
        ]

    def _build_action(self, i: int, leaves: Sequence[Any]) -> Any:
        build = self._builders[i]
        try:
            return leaves[0] if build is None else build(leaves)
        except Exception as exc:  # noqa: BLE001 - border: foreign code
            self._unbuilt[i] = partial(_raise, exc)
            return None

    def _step(self, indices: Sequence[int], ops: bytes) -> None:
        whole = indices is self._all
        if self._has_ends:
            # Most steps end no episode, so the flags are cleared together, set singly.
            self._clear_ends(... if whole else indices)
            self._has_ends = not whole
        actions = self._take_actions(indices)
        if self._unbuilt:
            steps = {i: self._unbuilt.get(i, self._steps[i]) for i in indices}
            calls: Any = ((i, steps[i], self._writes[i]) for i in indices)
        elif whole:
            calls = zip(indices, self._steps, self._writes, strict=True)
        else:
            calls = ((i, self._steps[i], self._writes[i]) for i in indices)
        self._run_steps(calls, actions, ops)
        # After all steps, as a caller would do it: envs that draw from one global
        # generator then draw in the same order as without this.
        for i in self._finished:
            self._reset_finished(i, guessed=ops[i] == _STEP_PREPARE)

    def _run_steps(
        self, calls: Iterable[_StepCall], actions: Iterable[Any], ops: Mapping[int, int] | bytes
    ) -> None:
        """Steps and writes the results; `_finished` then holds whom to reset next."""
        rewards, wants_info = self._rewards, self._wants_info
        self._finished.clear()
        for (i, step, write), action in zip(calls, actions, strict=True):
            try:
                observation, reward, terminated, truncated, info = step(action)
                write(observation)
                try:
                    rewards[i] = reward
                except (TypeError, ValueError, OverflowError):
                    rewards[i] = as_reward(reward)
                if wants_info:
                    self._take_info(i, info)
                if terminated is not False or truncated is not False:
                    self._take_end(i, terminated, truncated, ops[i])
            except Exception as exc:  # noqa: BLE001 - border: foreign code
                self._note_failure(i, "step", exc)
                rewards[i] = 0.0

    def _clear_ends(self, indices: Any) -> None:
        self._terminated[indices] = False
        self._truncated[indices] = False

    def _take_end(self, i: int, terminated: Any, truncated: Any, op: int) -> None:
        if terminated.__class__ not in _FLAG_TYPES:
            terminated = as_flag(terminated, "terminated")
        if truncated.__class__ not in _FLAG_TYPES:
            truncated = as_flag(truncated, "truncated")
        if not (terminated or truncated):
            return
        self._has_ends = True
        self._terminated[i] = terminated
        self._truncated[i] = truncated
        if op != _STEP:
            self._finished.append(i)

    def _reset_finished(self, i: int, *, guessed: bool) -> None:
        try:
            self.begin_reset_ahead(i, guessed=guessed)
            self.finish_reset(i, self._resets[i](), is_ahead=True)
        except Exception as exc:  # noqa: BLE001 - border: foreign code
            # A guess that fails was never made: the reset that may come will fail too.
            if not guessed:
                self._note_failure(i, "reset", exc)

    # --- reset ---------------------------------------------------------------------

    def _reset_plainly(self, i: int) -> None:
        try:
            self.finish_reset(i, self._resets[i]())
        except Exception as exc:  # noqa: BLE001 - border: foreign code
            self._note_failure(i, "reset", exc)

    def reset(
        self, i: int, seed: int | None, kwargs: Mapping[str, Any], *, undo_prepared: bool
    ) -> None:
        """Resets one env with a seed or keyword arguments. `publish` hands it over.

        A reset that was prepared in vain has drawn random numbers; with
        ``undo_prepared`` they are put back, so that this one draws what it would have
        drawn without it.
        """
        try:
            kwargs = self.begin_reset(i, seed, kwargs, undo_prepared=undo_prepared)
            self.finish_reset(i, self._resets[i](**kwargs))
        except Exception as exc:  # noqa: BLE001 - border: foreign code
            self._note_failure(i, "reset", exc)

    def _write_reset(self, i: int, observation: Any, info: Any) -> None:
        objects = self._reset_writer.write(i, observation)
        if objects is not None:
            self._note(i).reset_observation = objects
        if self._wants_info:
            for path, write, leaf in self._reset_info_writers:
                write(i, _look_up(info, path, leaf))
            if self._keep_infos:
                self._note(i).reset_info = info

    # --- one env, whose step or reset is awaited in between ------------------------

    def take_action(self, i: int) -> Any:
        """Returns what the engine wants one env to do.

        Raises:
            Exception: the env's `build_action` did.
        """
        [action] = self._take_actions([i])
        if i in self._unbuilt:
            self._unbuilt.pop(i)(None)
        return action

    def finish_step(self, i: int, op: int, result: Any) -> bool:
        """Writes what one env's step returned; returns whether a reset has to follow."""
        self._clear_ends(i)
        self._run_steps(((i, _returned, self._writes[i]),), (result,), {i: op})
        return bool(self._finished)

    def fail_step(self, i: int, exc: BaseException) -> None:
        """Notes what one env's step raised, in place of `finish_step`."""
        self._clear_ends(i)
        self._note_failure(i, "step", exc)
        self._rewards[i] = 0.0

    def begin_reset_ahead(self, i: int, *, guessed: bool) -> None:
        """Prepares for the reset right after an end, whose result is not taken yet.

        ``guessed``: it may have to be taken back.
        """
        if guessed:
            self._rng_states[i] = self.envs[i].save_rng()
        if (note := self.notes.get(self.first_id + i)) is not None:
            # Not in the rows, so not copied yet.
            note.observation = own_copy(note.observation)
            note.info = own_copy(note.info)

    def begin_reset(
        self, i: int, seed: int | None, kwargs: Mapping[str, Any], *, undo_prepared: bool
    ) -> dict[str, Any]:
        """Puts random numbers back, if asked to; returns the reset's keyword arguments."""
        if undo_prepared and self._rng_states[i] is not None:
            self.envs[i].load_rng(self._rng_states[i])
        return dict(kwargs) if seed is None else {**kwargs, "seed": seed}

    def finish_reset(self, i: int, result: Any, *, is_ahead: bool = False) -> None:
        """Writes what one env's reset returned; ``is_ahead``: after a step.

        Raises:
            SpecError: it does not fit. The caller notes that, or forgets it.
        """
        observation, info = result
        self._write_reset(i, observation, info)
        if is_ahead:
            self._reset_done.append(i)

    def fail_reset(self, i: int, exc: BaseException) -> None:
        """Notes what one env's reset raised."""
        self._note_failure(i, "reset", exc)

    # --- everything else -----------------------------------------------------------

    def _keep_objects(self, i: int, objects: dict[LeafPath, Any]) -> None:
        self._note(i).observation = objects

    def _take_info(self, i: int, info: Any) -> None:
        for path, write, leaf in self._info_writers:
            write(i, _look_up(info, path, leaf))
        if self._keep_infos:
            self._note(i).info = info

    def _note(self, i: int) -> EnvNotes:
        return self.notes.setdefault(self.first_id + i, EnvNotes())

    def _note_failure(self, i: int, during: str, exc: BaseException) -> None:
        note = self._note(i)
        if note.failure is None:
            note.failure = describe_failure(self.first_id + i, during, exc)

    def for_each(
        self, env_ids: Sequence[int], during: str, action: Callable[[int, Env], Any]
    ) -> tuple[dict[int, Any], list[EnvFailure]]:
        """Runs ``action(position, env)`` for these envs; returns values and failures."""
        values: dict[int, Any] = {}
        failures: list[EnvFailure] = []
        for position, env_id in enumerate(env_ids):
            try:
                values[env_id] = action(position, self.envs[env_id - self.first_id])
            except Exception as exc:  # noqa: BLE001 - border: foreign code
                failures.append(describe_failure(env_id, during, exc))
        return values, failures

    def carry_out(self, command: CallEnvs | SeedEnvs) -> tuple[dict[int, Any], list[EnvFailure]]:
        """Carries out one call; returns values and failures per env id."""
        match command:
            case SeedEnvs(_, env_ids, seeds):
                return self.for_each(env_ids, "seed", lambda k, env: env.seed(seeds[k]))
            case CallEnvs(_, env_ids, name, args, kwargs):
                return self.for_each(
                    env_ids, f"call {name}", lambda _, env: env.call(name, args, kwargs)
                )

    def close(self) -> list[EnvFailure]:
        """Closes every env, whatever the others raise, and lets go of them."""
        ids = [self.first_id + i for i in self._all]
        failures = self.for_each(ids, "close", lambda _, env: env.close())[1]
        self.let_go()
        return failures

    def let_go(self) -> None:
        """Forgets everything. The last call."""
        # Writers and envs hold on to each other; an env shall not wait for the collector.
        vars(self).clear()


def own_copy(value: Any) -> Any:
    """Returns a deep copy, for whom the env may not change it any more."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - border: a lock or a window is handed on itself
        return value


def _returned(result: Any) -> Any:
    return result


def _raise(exc: Exception, _action: Any) -> None:
    raise exc


def _look_up(info: Any, path: LeafPath, leaf: ArraySpec) -> Any:
    """Returns an entry of an info dict; zeros where the env left it out."""
    value = info
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return np.zeros(leaf.shape, leaf.dtype)
        value = value[name]
    return value
