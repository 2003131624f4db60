"""Rollouts of a bare env, each step written straight into buffers of ``[N, T]``.

Knows EnvBase's rules for rollouts. What it cannot do as fast it leaves to EnvBase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.envs.utils import _make_compatible_policy

if TYPE_CHECKING:
    from shoal.torchrl.batched import BatchedEnv

__all__ = ["rollout_into_buffers"]

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
        or not env._can_fill_buffers()
        or _writes_next(policy)
    ):
        return None
    buffers = _Buffers(env, max_steps)
    if given is not None and not buffers.holds_only_own(given):
        return None  # entries of the caller's own are carried along by EnvBase
    is_random = policy is None
    if is_random:
        policy = env.rand_action
    else:
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


class _Buffers:
    """The data of one rollout while it grows. The next step only adds a column."""

    def __init__(self, env: BatchedEnv, max_steps: int) -> None:
        self._env = env
        self._max_steps = max_steps
        self._engine, tables = env._started()
        assert tables.plain is not None
        self._plain = tables.plain
        self._tables = tables
        self._shape = (env.num_workers, max_steps)
        self._root = {key: self._like(rows) for key, rows, _ in self._plain}
        self._next = {key: self._like(rows) for key, rows, _ in self._plain}
        # As numpy: a column is written at a third of the price.
        self._columns = [
            (rows, reset_rows, self._root[key].numpy(), self._next[key].numpy())
            for key, rows, reset_rows in self._plain
        ]
        for name in _FLAGS:
            # Past the first column no row of the root is at an end: it was reset.
            self._root[name] = torch.zeros(*self._shape, 1, dtype=torch.bool)
            self._next[name] = torch.zeros(*self._shape, 1, dtype=torch.bool)
        self._next["reward"] = torch.zeros(*self._shape, 1)
        self._own = set(self._root)
        self._extras: dict[str, list[Any]] = {}

    def _like(self, rows: Any) -> torch.Tensor:
        leaf = torch.from_numpy(rows)
        return torch.empty((*self._shape, *leaf.shape[1:]), dtype=leaf.dtype)

    def holds_only_own(self, root: Any) -> bool:
        """Returns whether a root holds just what an env returns, and perhaps a mask."""
        return self._own <= set(root.keys()) <= self._own | {"_reset"}

    def fill(self, policy: Any, root: Any, *, is_random: bool) -> Any:
        """Steps to the end and returns the data."""
        for key in self._own:
            self._root[key][:, 0] = root.get(key)
        for t in range(self._max_steps):
            if is_random:
                root = TensorDict({}, batch_size=self._env.batch_size)
            chosen = policy(root)
            if chosen is not root:
                root.update(chosen)
            if t == 0 and "next" in root.keys():
                return _stack_steps(self._env, root, policy, self._max_steps)
            self._keep_extras(root)
            last = t == self._max_steps - 1
            self._engine.step_rows(self._env._encode(root, self._engine), autoreset=not last)
            self._write_column(t, last=last)
            if not (last or is_random):
                root = self._env._td(self._tables.present())
        return self._finish()

    def _keep_extras(self, root: Any) -> None:
        for key, value in root.items():
            if key not in self._own:
                self._extras.setdefault(key, []).append(value)

    def _write_column(self, t: int, *, last: bool) -> None:
        gather = self._engine.gatherer
        newer = gather.is_fresh.nonzero()[0] if gather.any_fresh else None
        for rows, reset_rows, root, following in self._columns:
            following[:, t] = rows
            if not last:
                root[:, t + 1] = rows
                if newer is not None:
                    root[newer, t + 1] = reset_rows[newer]
        reward, done, terminated, truncated = self._tables.ends()
        self._next["reward"][:, t] = reward
        if done.any():
            self._next["done"][:, t] = done
            self._next["terminated"][:, t] = terminated
            self._next["truncated"][:, t] = truncated

    def _finish(self) -> TensorDict:
        size = torch.Size(self._shape)
        data = TensorDict._new_unsafe(self._root, batch_size=size)
        for key, values in self._extras.items():
            data.set(key, torch.stack(values, 1))
        data.set("next", TensorDict._new_unsafe(self._next, batch_size=size))
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
    return LazyStackedTensorDict.maybe_dense_stack(steps, 1)
