"""What is measured and which bars it has to pass: tables, next to no code.

A bar compares a contender's env-steps/s with the limit of the machine (one raw env
in this process, times the usable cores) or with another contender of the same item.
The raw env is a Gymnasium env; in items that begin with ``children`` it is one bare
TorchRL env, stepped by its own ``step_and_maybe_reset``. Envs that wait rather than
compute do so all at once: their limit is one bare env's rate times the envs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.async_pools import (
    COROUTINE,
    SLEEPER,
    STILL,
    UNEVEN,
    BareCoroutine,
    BareCoroutines,
    BareThreads,
    BareWaiting,
    BareWaitingEverywhere,
    FirstHalf,
    ShoalPool,
    Synchronous,
    SynchronousParallel,
    TorchRLPool,
)
from benchmarks.children import (
    CHEETAH,
    GYM_ENV,
    TRANSFORMED,
    BareChild,
    ShoalParallelById,
    ShoalParallelChildren,
    ShoalSerialChildren,
    TorchRLForkedChildren,
    TorchRLSerialChildren,
    TorchRLSpawnedChildren,
)
from benchmarks.contenders import (
    EnvPool,
    ShoalRollout,
    ShoalTransformed,
    StableBaselines,
    TorchRLSerialTransformed,
)
from benchmarks.envpool import BareEnvPool, ShoalMultiThreaded, ShoalMultiThreadedRollout
from shoal._compare.contenders import (
    Contender,
    GymnasiumAsync,
    GymnasiumSync,
    Raw,
    ShoalEngine,
    ShoalParallel,
    TorchRLParallel,
    TorchRLSerial,
)
from shoal.engine.system.cores import usable_cores

__all__ = [
    "ITEMS",
    "LIMIT",
    "MAX_START_S",
    "MAX_WORKER_PSS_MB",
    "NEVER_SLOWER",
    "SCALING_CONTENDERS",
    "SCALING_ENV",
    "SCALING_SIZES",
    "START_CONTENDERS",
    "START_ENV",
    "START_SIZE",
    "Bar",
    "Item",
]

LIMIT = "limit"

CARTPOLE = "CartPole-v1"
PONG = "ale_py:ALE/Pong-v5"
ANT = "Ant-v5"

ContenderType = Callable[[str, int], Contender]


@dataclass(frozen=True, slots=True)
class Bar:
    """``contender`` has to reach ``at_least`` times the rate of ``reference``."""

    contender: str
    at_least: float
    reference: str = LIMIT


@dataclass(frozen=True, slots=True)
class Item:
    """Contenders on one env and size, measured in one interleaved run.

    Peers that fork come first, shoal last: nothing of shoal is then copied into them.

    Attributes:
        raw: makes the one env that the limit is taken from; ``None``: there is no limit.
        waits: its envs wait, so that one core has room for all of them.
    """

    name: str
    env_id: str
    num_envs: int
    contenders: tuple[ContenderType, ...]
    bars: tuple[Bar, ...] = ()
    raw: Callable[[str], Contender] | None = Raw
    waits: bool = False


# Whatever the size, like against like, and against either way to start TorchRL's workers.
NEVER_SLOWER = (
    Bar(ShoalParallelChildren.name, 1, TorchRLForkedChildren.name),
    Bar(ShoalSerialChildren.name, 1, TorchRLSerialChildren.name),
)


def _core_of(worker: int) -> list[int]:
    """Returns the only core of a worker process; each core has as many as any other."""
    cores = sorted(usable_cores() or {0})
    return [cores[worker % len(cores)]]


def _with_children(name: str, env_id: str, times_spawned: float) -> tuple[Item, ...]:
    """Returns the items of one kind of TorchRL env at 2, 8 and 32 envs.

    Args:
        name: of the items, without the size.
        env_id: the kind.
        times_spawned: how many times as fast as TorchRL's default shoal has to be at 8 envs.
    """
    spawned, serial = TorchRLSpawnedChildren.name, TorchRLSerialChildren.name
    by_id = (ShoalParallelById,) if env_id == GYM_ENV else ()
    many = (
        TorchRLForkedChildren,
        TorchRLSerialChildren,
        *by_id,
        ShoalSerialChildren,
        ShoalParallelChildren,
    )
    few = (TorchRLForkedChildren, TorchRLSpawnedChildren, *many[1:])
    bars = {
        2: (Bar(ShoalParallelChildren.name, 1, spawned), *NEVER_SLOWER),
        8: (Bar(ShoalParallelChildren.name, times_spawned, spawned), *NEVER_SLOWER),
        # 32 fresh interpreters that import torch take minutes to start: SerialEnv instead.
        32: (Bar(ShoalParallelChildren.name, 1, serial), *NEVER_SLOWER),
    }
    return tuple(
        Item(
            f"children-{name}-{num_envs}",
            env_id,
            num_envs,
            many if num_envs == 32 else few,
            bars[num_envs],
            raw=BareChild,
        )
        for num_envs in bars
    )


def _with_pools() -> tuple[Item, ...]:
    """Returns the items whose envs are sent and received each on its own."""
    torchrl = [f"TorchRL AsyncEnvPool, {label}" for label in ("shm", "queue", "shm, 8 each")]
    apart = partial(ShoalPool, backend="multiprocessing")
    threading = partial(ShoalPool, label="threading", backend="threading")
    in_turn = partial(apart, label="8 in turn", envs_per_worker=8, env_threads=False)
    return (
        Item(
            "pool-dispatch-8",
            STILL,
            8,
            (
                partial(TorchRLPool, label="shm", backend="multiprocessing", exchange="shm"),
                partial(TorchRLPool, label="queue", backend="multiprocessing", exchange="queue"),
                partial(
                    TorchRLPool,
                    label="shm, 8 each",
                    backend="multiprocessing",
                    exchange="shm",
                    envs_per_worker=8,
                ),
                partial(TorchRLPool, label="threading", backend="threading"),
                in_turn,
                partial(apart, label="a process each"),
                threading,
                partial(ShoalPool, label="serial", backend="serial"),
            ),
            tuple(Bar("shoal AsyncEnvPool, 8 in turn", 20, name) for name in torchrl),
            raw=None,
        ),
        Item(
            "pool-waiting-64",
            SLEEPER,
            64,
            (
                BareWaitingEverywhere,
                partial(apart, label="a process each"),
                partial(apart, label="16 in a process", envs_per_worker=16),
                partial(
                    apart,
                    label="32 in a process, a core each",
                    envs_per_worker=32,
                    worker_affinity=_core_of,
                ),
                BareThreads,
                threading,
            ),
            (
                Bar("shoal AsyncEnvPool, 32 in a process, a core each", 0.9),
                Bar("shoal AsyncEnvPool, threading", 0.9),
            ),
            raw=BareWaiting,
            waits=True,
        ),
        Item(
            "pool-coroutines-256",
            COROUTINE,
            256,
            (
                BareCoroutines,
                partial(ShoalPool, label="asyncio", backend="asyncio"),
                partial(ShoalPool, label="asyncio, 16 or more", backend="asyncio", min_get=16),
            ),
            (Bar("shoal AsyncEnvPool, asyncio", 0.9),),
            raw=BareCoroutine,
            waits=True,
        ),
        Item(
            "pool-uneven-32",
            UNEVEN,
            32,
            (
                SynchronousParallel,
                partial(Synchronous, label="AsyncEnvPool.step", backend="threading"),
                partial(FirstHalf, label="first half, processes", backend="multiprocessing"),
                partial(FirstHalf, label="first half, threading", backend="threading"),
            ),
            (
                Bar(
                    "shoal AsyncEnvPool, first half, processes",
                    2,
                    "shoal ParallelEnv, a process each",
                ),
                Bar("shoal AsyncEnvPool, first half, threading", 2, "shoal AsyncEnvPool.step"),
            ),
            raw=BareWaiting,
            waits=True,
        ),
    )


ITEMS = (
    Item(
        "cartpole-64",
        CARTPOLE,
        64,
        # No TorchRL ParallelEnv: it takes longer to close its 64 processes than all
        # others take to be measured.
        (
            GymnasiumAsync,
            StableBaselines,
            GymnasiumSync,
            TorchRLSerial,
            EnvPool,
            ShoalEngine,
            ShoalRollout,
            ShoalParallel,
        ),
        (
            Bar(ShoalEngine.name, 0.65),
            Bar(ShoalEngine.name, 8, GymnasiumAsync.name),
            Bar(ShoalEngine.name, 8, StableBaselines.name),
            Bar(ShoalRollout.name, 0.50),
            Bar(ShoalParallel.name, 0.40),
            Bar(ShoalParallel.name, 25, TorchRLSerial.name),
        ),
    ),
    Item(
        "cartpole-64-transformed",
        CARTPOLE,
        64,
        (TorchRLSerialTransformed, ShoalTransformed),
        (Bar(ShoalTransformed.name, 10, TorchRLSerialTransformed.name),),
    ),
    Item(
        "cartpole-8",
        CARTPOLE,
        8,
        (
            TorchRLParallel,
            GymnasiumAsync,
            StableBaselines,
            GymnasiumSync,
            TorchRLSerial,
            EnvPool,
            ShoalEngine,
            ShoalParallel,
        ),
        (
            Bar(ShoalEngine.name, 0.40),
            Bar(ShoalParallel.name, 25, TorchRLParallel.name),
        ),
    ),
    Item(
        "pong-8",
        PONG,
        8,
        (GymnasiumAsync, TorchRLSerial, ShoalEngine, ShoalParallel),
        (Bar(ShoalEngine.name, 0.90), Bar(ShoalParallel.name, 0.90)),
    ),
    Item(
        "ant-8",
        ANT,
        8,
        (GymnasiumAsync, TorchRLSerial, ShoalEngine, ShoalParallel),
        (Bar(ShoalEngine.name, 0.90),),
    ),
    # EnvPool's envs are its own: its Pong returns stacked grey frames of 84 x 84.
    Item(
        "envpool-pong-8",
        PONG,
        8,
        (BareEnvPool, ShoalMultiThreadedRollout, ShoalMultiThreaded, ShoalParallel),
        (Bar(ShoalMultiThreaded.name, 0.90, BareEnvPool.name),),
    ),
    Item(
        "envpool-cartpole-64",
        CARTPOLE,
        64,
        (BareEnvPool, ShoalMultiThreadedRollout, ShoalMultiThreaded, ShoalParallel),
        (Bar(ShoalMultiThreaded.name, 0.50, BareEnvPool.name),),
    ),
    *_with_children("gymenv", GYM_ENV, times_spawned=20),
    Item(
        "children-gymenv-64",
        GYM_ENV,
        64,
        (TorchRLSerialChildren, ShoalParallelById, ShoalParallelChildren),
        (Bar(ShoalParallelChildren.name, 0.6, ShoalParallelById.name),),
        raw=BareChild,
    ),
    *_with_children("transformed", TRANSFORMED, times_spawned=5),
    *_with_children("cheetah", CHEETAH, times_spawned=3),
    *_with_pools(),
)

SCALING_ENV = CARTPOLE
SCALING_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
SCALING_CONTENDERS: tuple[ContenderType, ...] = (ShoalEngine, ShoalParallel)

START_ENV = CARTPOLE
START_SIZE = 64
START_CONTENDERS: tuple[ContenderType, ...] = (GymnasiumAsync, ShoalEngine, ShoalParallel)
MAX_START_S = 2.0
MAX_WORKER_PSS_MB = 40.0
