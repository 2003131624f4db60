"""TorchRL's batched environments over the engine: same names, same arguments, same data.

The makers of envs and their metadata are TorchRL's own.
"""

from torchrl.envs import EnvCreator, env_creator, get_env_metadata

from shoal.torchrl.batched import BatchedEnv, ParallelEnv, SerialEnv
from shoal.torchrl.envpool import MultiThreadedEnv, MultiThreadedEnvWrapper
from shoal.torchrl.pool import (
    AsyncEnvPool,
    AsyncioAsyncEnvPool,
    ProcessorAsyncEnvPool,
    SerialAsyncEnvPool,
    ThreadingAsyncEnvPool,
)
from shoal.torchrl.pool_envpool import EnvPoolAsyncEnvPool
from shoal.torchrl.state import WorkerState

__all__ = [
    "AsyncEnvPool",
    "AsyncioAsyncEnvPool",
    "BatchedEnv",
    "BatchedEnvBase",
    "EnvCreator",
    "EnvPoolAsyncEnvPool",
    "MultiThreadedEnv",
    "MultiThreadedEnvWrapper",
    "ParallelEnv",
    "ProcessorAsyncEnvPool",
    "SerialAsyncEnvPool",
    "SerialEnv",
    "ThreadingAsyncEnvPool",
    "WorkerState",
    "env_creator",
    "get_env_metadata",
]

# TorchRL's names for the common base, the present one and the old one.
BatchedEnvBase = BatchedEnv
_BatchedEnv = BatchedEnv
