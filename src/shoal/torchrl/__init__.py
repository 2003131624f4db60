"""TorchRL's batched environments over the engine: same names, same arguments, same data."""

from shoal.torchrl.batched import BatchedEnv, ParallelEnv, SerialEnv
from shoal.torchrl.state import WorkerState

__all__ = ["BatchedEnv", "ParallelEnv", "SerialEnv", "WorkerState"]
