"""Rollouts of a bare env, each step written straight into buffers of ``[N, T]``.

Knows EnvBase's rules for rollouts. What it cannot do as fast it leaves to EnvBase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.utils import _make_compatible_policy

from shoal.torchrl.roots import carry_over

if TYPE_CHECKING:
    from shoal.torchrl.batched import BatchedEnv

__all__ = ["rollout_into_buffers"]

Array = np.ndarray[Any, Any]

_PLAIN = {
    "auto_cast_to_device": False,
    "break_when_all_done": None,
    "out": None,
    "storing_device": None,
    "set_state": None,
    "actions": None,
}
_OTHERS = {
    "break_when_any_done",
    "auto_reset",
    "return_contiguous",
    "tensordict",
    "set_truncated",
    "trust_policy",
}
_LARGE_ROW = 256  # bytes; beyond, a row fills cache lines of its own anyway
_FLAGS = ("done", "terminated", "truncated")


def rollout_into_buffers(
    env: BatchedEnv, max_steps: int, policy: Any, callback: Any, options: dict[str, Any]
) -> Any:
    """Returns the rollout, or ``None`` if it asks for more than this can do.

    Nothing has happened to the env in that case.
    """
    given = options.get("tensordict")
    if (
        callback is not None
        or max_steps < 1
        or options.get("break_when_any_done") is not False
        or any(options.get(name, plain) != plain for name, plain in _PLAIN.items())
        or not options.keys() <= _PLAIN.keys() | _OTHERS
        or (given is None and not options.get("auto_reset", True))
        or (policy is None and type(env).rand_action is not EnvBase.rand_action)
        or not env._can_fill_buffers()
        or _writes_next(policy)
    ):
        return None
    buffers = _Buffers(env, max_steps)
    if given is not None and not buffers.holds_only_own(given):
        return None
    is_random = policy is None
    if not is_random:
        policy = _make_compatible_policy(
            policy,
            env.observation_spec,
            env=env,
            fast_wrap=True,
            trust_policy=options.get("trust_policy", False),
        )
    root = env.reset(given) if options.get("auto_reset", True) else env.maybe_reset(given)
    data = buffers.fill(policy, root, is_random=is_random)
    if options.get("set_truncated"):
        data["next", "truncated"][:, -1] = True
        data["next", "done"][:, -1] = True
    data.refine_names(..., "time")
    return data


def _writes_next(policy: Any) -> bool:
    keys = getattr(policy, "out_keys", None) or ()
    return any(isinstance(key, tuple) and key[0] == "next" for key in keys)


def sample(spec: Composite) -> TensorDict:
    """Returns random values of a spec, drawn as its own ``rand`` draws them.

    Without the search for an optional module that ``TensorDict.from_dict`` repeats in
    every call, which takes as long as a step of ten cheap envs.
    """
    found = {
        key: sample(leaf) if isinstance(leaf, Composite) else leaf.rand()
        for key, leaf in spec.items()
        if leaf is not None
    }
    return TensorDict._new_unsafe(found, batch_size=spec.shape)


class _Column:
    """One leaf of ``next`` over all steps, ``[N, T, *shape]`` in the end.

    Small rows are kept by time and turned once at the end: a step then writes one
    contiguous piece, not one cache line per env. Large rows are written in place.
    """

    def __init__(self, rows: Array, max_steps: int, dtype: Any = None) -> None:
        self._by_time = rows[0].nbytes < _LARGE_ROW
        num_envs = len(rows)
        lead = (max_steps, num_envs) if self._by_time else (num_envs, max_steps)
        self._data = np.empty((*lead, *rows.shape[1:]), dtype or rows.dtype)
        # Indexed by time in both cases.
        self._steps = self._data if self._by_time else self._data.swapaxes(0, 1)
        self._rows = rows

    def write(self, t: int) -> None:
        """Takes the rows as the results of step ``t``."""
        self._steps[t] = self._rows

    def following(self) -> torch.Tensor:
        """Returns what the steps returned."""
        return self._turned(self._data)

    def root(self, first: Any, resets: list[tuple[int, Array, Array]]) -> torch.Tensor:
        """Returns what each step started from.

        Args:
            first: the observation before the first step.
            resets: step, env ids and observations of the resets on the way.
        """
        root = np.empty_like(self._data)
        by_time = root if self._by_time else root.swapaxes(0, 1)
        by_time[0] = first
        by_time[1:] = self._steps[:-1]
        for t, env_ids, rows in resets:
            by_time[t + 1, env_ids] = rows
        return self._turned(root)

    def _turned(self, data: Array) -> torch.Tensor:
        if self._by_time:
            data = np.ascontiguousarray(data.swapaxes(0, 1))
        return torch.from_numpy(data)


class _Buffers:
    """The data of one rollout while it grows. A step only adds one piece per leaf."""

    def __init__(self, env: BatchedEnv, max_steps: int) -> None:
        self._env = env
        self._max_steps = max_steps
        self._tables: Any = env._started()
        self._engine = self._tables.engine
        self._action_spec = env.full_action_spec
        assert self._tables.plain is not None
        self._leaves = [
            (key, _Column(rows, max_steps), reset_rows)
            for key, rows, reset_rows in self._tables.plain
        ]
        rows = self._engine.rows
        self._reward = _Column(rows.reward, max_steps, np.float32)
        self._terminated = _Column(rows.terminated, max_steps)
        self._truncated = _Column(rows.truncated, max_steps)
        self._columns = [column for _, column, _ in self._leaves]
        self._columns += [self._reward, self._terminated, self._truncated]
        self._resets: list[list[tuple[int, Array, Array]]] = [[] for _ in self._leaves]
        self._own = {*_FLAGS, *(key for key, _, _ in self._leaves)}
        self._extras: dict[str, list[Any]] = {}
        # What a policy has put in place of the env's entries: by key and step.
        self._changed: dict[str, dict[int, Any]] = {}

    def holds_only_own(self, root: Any) -> bool:
        """Returns whether a root holds just what an env returns, and perhaps a mask."""
        return (
            type(root) is TensorDict
            and root.device == self._env.device
            and not root._has_names()
            and bool(self._own <= set(root.keys()) <= self._own | {"_reset"})
        )

    def fill(self, policy: Any, root: TensorDict, *, is_random: bool) -> Any:
        """Steps to the end and returns the data."""
        first = {key: root.get(key) for key in self._own}
        for t in range(self._max_steps):
            if is_random:
                root = sample(self._action_spec)
            else:
                self._act(policy, root, t)
                if "next" in root._tensordict:
                    if t == 0:
                        return _stack_steps(self._env, root, policy, self._max_steps)
                    raise RuntimeError(
                        f"the policy wrote into 'next' at step {t}, but not at the first step;"
                        " all steps of a rollout have the same keys"
                    )
            for key, value in root.items():
                if key not in self._own:
                    self._extras.setdefault(key, []).append(value)
            last = t == self._max_steps - 1
            self._tables.step(root, autoreset=not last)
            for column in self._columns:
                column.write(t)
            if not last:
                self._keep_resets(t)
                if not is_random:
                    before = root
                    root = self._env._td(self._tables.present(none_at_end=True))
                    carry_over(before, root, self._tables.fresh_rows)
        return self._finish(first)

    def _act(self, policy: Any, root: TensorDict, t: int) -> None:
        """Lets a policy act, and notes where it changed what the env had returned."""
        entries = root._tensordict
        shown = [(key, entries[key], _version(entries[key])) for key in self._own]
        chosen = policy(root)
        if chosen is not root:
            root.update(chosen)
        for key, value, version in shown:
            now = entries.get(key)
            if now is not value or version is None or value._version != version:
                self._changed.setdefault(key, {})[t] = now

    def _keep_resets(self, t: int) -> None:
        gather = self._engine.gatherer
        if gather.any_fresh and len(ids := gather.is_fresh.nonzero()[0]):
            for kept, (_, _, reset_rows) in zip(self._resets, self._leaves, strict=True):
                kept.append((t, ids, reset_rows[ids]))

    def _finish(self, first: dict[str, torch.Tensor]) -> TensorDict:
        size = torch.Size((self._env.num_workers, self._max_steps))
        tail = self._tables.tail
        root: dict[str, Any] = {}
        following: dict[str, Any] = {}
        for (key, column, _), resets in zip(self._leaves, self._resets, strict=True):
            root[key] = column.root(first[key].numpy(), resets)
            following[key] = column.following()
        for name in _FLAGS:
            # Past the first step no row of the root is at an end: it was reset.
            root[name] = torch.zeros(*size, *tail, dtype=torch.bool)
            root[name][:, 0] = first[name]
        terminated = self._terminated.following().reshape(*size, *tail)
        truncated = self._truncated.following().reshape(*size, *tail)
        following["reward"] = self._reward.following().reshape(*size, *tail)
        following["terminated"] = terminated
        following["truncated"] = truncated
        following["done"] = terminated | truncated
        for key, changes in self._changed.items():
            steps = list(root[key].unbind(1))
            for t, value in changes.items():
                steps[t] = value
            root[key] = torch.stack(steps, 1)
        data = TensorDict._new_unsafe(root, batch_size=size)
        for key, values in self._extras.items():
            if len(values) != self._max_steps:
                raise RuntimeError(
                    f"the policy wrote {key!r} at some steps only; all steps of a rollout have"
                    " the same keys"
                )
            data.set(key, torch.stack(values, 1))
        data.set("next", TensorDict._new_unsafe(following, batch_size=size))
        return data


def _stack_steps(env: BatchedEnv, root: Any, policy: Any, max_steps: int) -> Any:
    """Goes on where a policy has just written ``next`` entries, which only steps keep."""
    steps = []
    for t in range(max_steps):
        if t:
            root.update(policy(root))
        if t == max_steps - 1:
            steps.append(env.step(root))
        else:
            step, root = env.step_and_maybe_reset(root)
            steps.append(step)
    return torch.stack(steps, 1)


def _version(value: torch.Tensor) -> int | None:
    """Returns how often a tensor was written to, ``None`` if that is not counted."""
    return None if value.is_inference() else value._version
