"""What is measured and which bars it has to pass: a table, no code.

A bar compares a contender's env-steps/s with the limit of the machine (one raw env
in this process, times the usable cores) or with another contender of the same item.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.contenders import (
    EnvPool,
    ShoalRollout,
    ShoalTransformed,
    StableBaselines,
    TorchRLSerialTransformed,
)
from shoal._compare.contenders import (
    Contender,
    GymnasiumAsync,
    GymnasiumSync,
    ShoalEngine,
    ShoalParallel,
    TorchRLParallel,
    TorchRLSerial,
)

__all__ = [
    "ITEMS",
    "LIMIT",
    "MAX_START_S",
    "MAX_WORKER_PSS_MB",
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
    """

    name: str
    env_id: str
    num_envs: int
    contenders: tuple[ContenderType, ...]
    bars: tuple[Bar, ...] = ()


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
)

SCALING_ENV = CARTPOLE
SCALING_SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
SCALING_CONTENDERS: tuple[ContenderType, ...] = (ShoalEngine, ShoalParallel)

START_ENV = CARTPOLE
START_SIZE = 64
START_CONTENDERS: tuple[ContenderType, ...] = (GymnasiumAsync, ShoalEngine, ShoalParallel)
MAX_START_S = 2.0
MAX_WORKER_PSS_MB = 40.0
