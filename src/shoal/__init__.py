"""Many reinforcement-learning environments at once, behind the classes you know.

The public names, loaded on first use: `import shoal` brings in neither numpy nor
torch nor any environment library, so that worker processes and tools stay light.
Knows only the errors; everything else is imported when its name is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import (
    BrokenError,
    ClosedError,
    EnvError,
    NoPendingCallError,
    PendingCallError,
    RecvTimeout,
    ShoalError,
    SpecError,
    StartError,
    StartTimeout,
    UsageError,
    WorkerDied,
)

if TYPE_CHECKING:
    from shoal.engine import Engine
    from shoal.torchrl import (
        AsyncEnvPool,
        AsyncioAsyncEnvPool,
        EnvPoolAsyncEnvPool,
        MultiThreadedEnv,
        MultiThreadedEnvWrapper,
        ParallelEnv,
        ProcessorAsyncEnvPool,
        SerialAsyncEnvPool,
        SerialEnv,
        ThreadingAsyncEnvPool,
        WorkerState,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncEnvPool",
    "AsyncioAsyncEnvPool",
    "BrokenError",
    "ClosedError",
    "Engine",
    "EnvError",
    "EnvPoolAsyncEnvPool",
    "MultiThreadedEnv",
    "MultiThreadedEnvWrapper",
    "NoPendingCallError",
    "ParallelEnv",
    "PendingCallError",
    "ProcessorAsyncEnvPool",
    "RecvTimeout",
    "SerialAsyncEnvPool",
    "SerialEnv",
    "ShoalError",
    "SpecError",
    "StartError",
    "StartTimeout",
    "ThreadingAsyncEnvPool",
    "UsageError",
    "WorkerDied",
    "WorkerState",
    "__version__",
]

_HOME_OF = {
    "AsyncEnvPool": "shoal.torchrl",
    "AsyncioAsyncEnvPool": "shoal.torchrl",
    "Engine": "shoal.engine",
    "EnvPoolAsyncEnvPool": "shoal.torchrl",
    "MultiThreadedEnv": "shoal.torchrl",
    "MultiThreadedEnvWrapper": "shoal.torchrl",
    "ParallelEnv": "shoal.torchrl",
    "ProcessorAsyncEnvPool": "shoal.torchrl",
    "SerialAsyncEnvPool": "shoal.torchrl",
    "SerialEnv": "shoal.torchrl",
    "ThreadingAsyncEnvPool": "shoal.torchrl",
    "WorkerState": "shoal.torchrl",
}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next access does not come here again
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
