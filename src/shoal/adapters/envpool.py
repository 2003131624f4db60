"""EnvPool's pools as the engine's native pool, and the factory that builds one.

Knows EnvPool, Gymnasium's spaces, the contract of a native pool and specs. Does not know
the engine or any framework; never imports torch. Imports EnvPool when a pool is described
or built, not before.
"""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from shoal.adapters.calls import call_or_read
from shoal.adapters.envpool_specs import (
    PLAYER_REWARD,
    PLAYERS_ENV_ID,
    EnvPoolDescription,
    limits_of,
)
from shoal.engine.env import PoolResults
from shoal.errors import SpecError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

    from shoal.engine.spec import LeafPath

__all__ = [
    "PLAYER_REWARD",
    "EnvPoolDescription",
    "EnvPoolFactory",
    "EnvPoolPool",
    "import_envpool",
]

Array = np.ndarray[Any, Any]
Space = spaces.Space[Any]

# EnvPool makes a thread per core, and each spins before it sleeps. With cheap envs they take
# the cores from the caller and from each other, and it goes at half the speed.
_CHEAP = ("envpool.classic_control", "envpool.toy_text")
_CHEAP_ENVS_PER_THREAD = 256

_ENV_ID = "env_id"
_STATE_ENV_ID, _STATE_PLAYERS_ENV_ID = "info:env_id", "info:players.env_id"
# What would move envs behind the engine's back, or end the process.
_NOT_CALLABLE = frozenset({"async_reset", "close", "recv", "reset", "send", "step", "xla"})


def import_envpool() -> Any:
    """Returns the module.

    Raises:
        ImportError: it is not installed, or does not work with this NumPy; the message says
            what to do.
    """
    try:
        import envpool
    except ImportError as exc:
        raise ImportError(
            f"EnvPool cannot be imported ({exc}); install it with: pip install 'shoal[envpool]'"
            " (Linux and macOS only)"
        ) from exc
    if _release_of(envpool) < (0, 9) and _release_of(np) >= (2, 0):
        # It does not fail there: it returns arrays that repeat their first row.
        raise ImportError(
            f"EnvPool {envpool.__version__} was built for NumPy 1, and returns wrong numbers with"
            f" NumPy {np.__version__}; install a later one with: pip install 'shoal[envpool]'"
        )
    return envpool


def _release_of(module: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", module.__version__)[:2])


@dataclass(frozen=True)
class EnvPoolFactory:
    """Builds a pool by the name of its task, or hands on one that exists.

    It stands for each of the pool's envs: iterating over it yields it once per env, so
    ``Engine(EnvPoolFactory("CartPole-v1", 64), backend="envpool")`` has 64 of them.

    Attributes:
        task_id: as ``envpool.make`` takes it; without ``ALE/``.
        num_envs: how many envs.
        kwargs: everything else that ``envpool.make`` takes. Copied.
        seeds: one per env; ``None`` leaves them to ``kwargs``.
        pool: a pool of the caller's, instead of one by name; it stays his.
    """

    task_id: str
    num_envs: int
    kwargs: Mapping[str, Any] | None = None
    seeds: tuple[int, ...] | None = None
    pool: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "task_id", self.task_id.replace("ALE/", ""))
        object.__setattr__(self, "kwargs", copy.deepcopy(dict(self.kwargs or {})))

    @classmethod
    def of_pool(cls, pool: Any) -> Self:
        """Returns a factory that hands on a pool of the caller's.

        Raises:
            TypeError: it is no pool of EnvPool's Gymnasium interface.
        """
        import_envpool()
        from envpool.python.envpool import EnvPoolMixin

        if not isinstance(pool, EnvPoolMixin):
            raise TypeError(
                "env is not of type 'envpool.python.envpool.EnvPoolMixin': make it with"
                f" envpool.make_gymnasium; it is a {type(pool).__name__}"
            )
        return cls(type(pool).__name__, len(pool), pool=pool)

    def __len__(self) -> int:
        return self.num_envs

    def __iter__(self) -> Iterator[Self]:
        return repeat(self, self.num_envs)

    def __call__(self) -> EnvPoolPool:
        """Builds the pool, with its threads."""
        return EnvPoolPool(self)

    def describe(self) -> EnvPoolDescription:
        """Returns what each env is; builds no env.

        Raises:
            ImportError: EnvPool is not installed.
        """
        if self.pool is not None:
            return EnvPoolDescription.of(self.pool.spec, self.task_id)
        make_spec, options = import_envpool().make_spec, self._options()
        found = EnvPoolDescription.of(
            make_spec(self.task_id, num_envs=self.num_envs, **options), self.task_id
        )
        if found.num_players > 1 and "batch_size" not in options:
            # There, fewer envs than batch_size cannot be had, as when one of them is reset.
            return replace(found, batch_size=1)
        return found

    def make(self) -> Any:
        """Returns EnvPool's own object."""
        if self.pool is not None:
            return self.pool
        options = {"batch_size": self.describe().batch_size, **self._options()}
        num_cores = os.cpu_count() or 1
        if self._is_cheap():
            options.setdefault("num_threads", -(-self.num_envs // _CHEAP_ENVS_PER_THREAD))
        elif options["batch_size"] == 1:
            # EnvPool's own rule, as many as the batch is large, would run all envs in turn.
            options.setdefault("num_threads", min(self.num_envs, _count_usable(num_cores)))
        num_threads = options.get("num_threads") or options["batch_size"]
        if num_threads >= num_cores == _count_usable(0) > 1:
            # Each to a core: those that fell asleep while Python worked are often woken two
            # on a core and none on another, and the step then takes half as long again.
            options.setdefault("thread_affinity_offset", 0)
        return import_envpool().make(
            self.task_id, env_type="gymnasium", num_envs=self.num_envs, **options
        )

    def seeded(self, seeds: Sequence[int]) -> Self:
        """Returns a factory of the same pool with other seeds.

        Raises:
            UsageError: the pool is the caller's, and has the seeds that it was made with.
        """
        if self.pool is not None:
            raise UsageError(
                "EnvPool takes seeds only when a pool is made: pass seed= to envpool.make, or use"
                " MultiThreadedEnv, which makes a new pool for new seeds"
            )
        return replace(self, seeds=tuple(int(seed) for seed in seeds))

    def _takes_seeds(self, options: Mapping[str, Any]) -> bool:
        """Returns whether this release of EnvPool takes a seed per env; before 1.0 it does not."""
        # With the options: there are tasks that are nothing without.
        spec = import_envpool().make_spec(self.task_id, num_envs=self.num_envs, **options)
        return "env_seed" in spec._config_keys

    def _is_cheap(self) -> bool:
        """Returns whether a step of the task is known to take less than a microsecond."""
        from envpool.registration import registry

        return registry.specs[self.task_id][0] in _CHEAP

    def _options(self) -> dict[str, Any]:
        options = {"gym_reset_return_info": True, **(self.kwargs or {})}
        if self.seeds is not None:
            # One per env: EnvPool's own rule, seed + i, would give neighbouring seeds the
            # same envs but one. They are 32 bits with a sign there.
            for name in ("seed", "env_seed"):
                options.pop(name, None)
            given = [(seed + 2**31) % 2**32 - 2**31 for seed in self.seeds]
            # Its own rule it is, though, where there is no other.
            options["seed"] = given if self._takes_seeds(options) else min(given[0], 2**31 - 2)
        return options


class EnvPoolPool:
    """A pool of EnvPool's; see `shoal.engine.env.NativePool`.

    Attributes:
        pool: EnvPool's own object.
        description: what each of its envs is.
    """

    def __init__(self, factory: EnvPoolFactory) -> None:
        self._factory = factory
        self._open(factory.make())

    def _open(self, pool: Any) -> None:
        self.pool = pool
        description = EnvPoolDescription.of(pool.spec, self._factory.task_id)
        self.description = description
        self.spec = description.env_spec
        self.num_envs = description.num_envs
        self.batch_size = description.batch_size
        self.num_threads = description.num_threads
        self.waits_for_all = description.waits_for_all
        # The methods above these convert and check for each call anew.
        self.send: Callable[[Any], None] = pool._send
        self.reset: Callable[[Array], None] = pool._reset
        self.recv: Callable[[], Any] = pool._recv
        self._num_players = description.num_players
        self._all_ids = np.arange(self.num_envs, dtype=np.int32)
        self._plan_actions()
        self._plan_results()

    # --- actions -------------------------------------------------------------------

    def _plan_actions(self) -> None:
        pool, description = self.pool, self.description
        dtypes = {key: spec.dtype for key, spec in pool.spec.action_array_spec.items()}
        shapes = {
            key: tuple(n for n in spec.shape if n != -1)
            for key, spec in pool.spec.action_array_spec.items()
        }
        mine = [key for key in pool._action_keys if key not in (_ENV_ID, PLAYERS_ENV_ID)]
        nested = isinstance(description.action_space, spaces.Dict)
        self._action_plan: list[tuple[LeafPath, np.dtype[Any], tuple[int, ...]]] = [
            (_path_of(key, "action") if nested else (), np.dtype(dtypes[key]), shapes[key])
            for key in mine
        ]
        if {path for path, _, _ in self._action_plan} != set(self.spec.action):
            raise SpecError(
                key="action",
                expected=f"the leaves {sorted(self.spec.action)}",
                actual=f"{mine}, which the pool takes",
            )
        self._limits = limits_of(description.action_space)

    def pack(self, actions: Mapping[LeafPath, Array], env_ids: Array | None) -> Any:
        """See `NativePool.pack`."""
        ids = self._all_ids if env_ids is None else env_ids
        where: Any = slice(None) if env_ids is None else env_ids
        players = self._num_players if self.description.acts_by_player else 1
        packed = [ids, ids if players == 1 else np.repeat(ids, players)]
        for path, dtype, shape in self._action_plan:
            # Always a copy: the pool reads it while the caller writes the next ones.
            rows = actions[path][where].astype(dtype, order="C")
            packed.append(rows.reshape(len(ids) * players, *shape))
        return packed

    def unfit(self, actions: Mapping[LeafPath, Array], env_ids: Array | None) -> Array | None:
        """See `NativePool.unfit`. Whole numbers index tables in C++, unchecked."""
        for limits in self._limits:
            rows = actions[limits.path] if env_ids is None else actions[limits.path][env_ids]
            if not limits.admit(rows):
                wrong = ((rows < limits.low) | (rows > limits.high)).reshape(len(rows), -1)
                positions = np.flatnonzero(wrong.any(-1))
                return positions if env_ids is None else env_ids[positions]
        return None

    # --- results -------------------------------------------------------------------

    def _plan_results(self) -> None:
        keys = list(self.pool._state_keys)
        found = {
            _path_of(key, "obs"): number
            for number, key in enumerate(keys)
            if key == "obs" or key.startswith("obs:")
        }
        if not isinstance(self.description.observation_space, spaces.Dict) and len(found) == 1:
            found = dict.fromkeys(((),), next(iter(found.values())))
        if found.keys() != self.spec.observation.keys():
            raise SpecError(
                key="observation",
                expected=f"the leaves {sorted(self.spec.observation)}",
                actual=f"{sorted(found)}, which the pool returns",
            )
        shapes = [leaf.shape for leaf in self.spec.observation.values()]  # type: ignore[union-attr]
        numbers = [found[path] for path in self.spec.observation]
        self._leaves = list(zip(numbers, shapes, strict=True))
        self._env_id, self._reward = keys.index(_STATE_ENV_ID), keys.index("reward")
        self._done = keys.index("done")
        self._trunc = keys.index("trunc") if "trunc" in keys else None
        self._players_env_id = keys.index(_STATE_PLAYERS_ENV_ID)

    def unpack(self, received: Any) -> PoolResults:
        """See `NativePool.unpack`."""
        ids, done, reward = received[self._env_id], received[self._done], received[self._reward]
        truncated = np.zeros_like(done) if self._trunc is None else received[self._trunc]
        count = len(ids)
        info: tuple[Array, ...] = ()
        if self._num_players > 1:
            shape = (count, self._num_players)
            players = received[self._players_env_id]
            if (
                players.shape != (count * self._num_players,)
                or (players.reshape(shape) != ids[:, None]).any()
            ):
                raise RuntimeError(
                    f"EnvPool returned players of the envs {players.tolist()} for the envs"
                    f" {ids.tolist()}; a batch needs {self._num_players} of each"
                )
            reward = reward.reshape(shape)
            info, reward = (reward,), reward.sum(-1)
        leaves = [
            leaf if leaf.shape[1:] == shape else leaf.reshape(count, *shape)
            for leaf, shape in ((received[number], shape) for number, shape in self._leaves)
        ]
        # For booleans ">" is "and not".
        return PoolResults(ids, leaves, reward, done > truncated, truncated, info)

    # --- the rest ------------------------------------------------------------------

    def seed(self, seeds: Sequence[int]) -> None:
        """Makes a new pool with these seeds; EnvPool knows no other way."""
        self._factory = self._factory.seeded(seeds)
        self.close()
        self._open(self._factory.make())

    def call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `NativePool.call`.

        Raises:
            AttributeError: the pool has no such attribute, or it is not to be called.
        """
        if name == "?pool":
            return self.pool
        if name == "?has":
            found = getattr(self.pool, args[0], None)
            return "missing" if found is None else "method" if callable(found) else "value"
        if name in _NOT_CALLABLE or name.startswith("_"):
            raise AttributeError(f"{name!r} of a pool would move envs that are not its caller's")
        return call_or_read(getattr(self.pool, name), name, args, kwargs)

    def close(self) -> None:
        """Lets the pool go; its threads end with it. One of the caller's stays as it is."""
        pool, self.pool = self.pool, None
        self.send = self.reset = self.recv = _gone
        if self._factory.pool is None and pool is not None:
            pool.close()


def _count_usable(otherwise: int) -> int:
    """Returns how many cores this process may use, where one can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else otherwise


def _gone(*_: Any) -> Any:
    raise RuntimeError("the pool was closed")


def _path_of(key: str, root: str) -> LeafPath:
    """Returns the path of a leaf from EnvPool's name, as ``obs:ems.x1``."""
    names = key.removeprefix(root).replace(":", ".").split(".")
    return tuple(name for name in names if name and name != "players")
