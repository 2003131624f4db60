"""The torch-free engine: runs many envs at once, numpy in, numpy out."""

from shoal.engine.api import Engine
from shoal.engine.batch import Batch
from shoal.engine.config import EngineConfig
from shoal.engine.env import AsyncEnv, AsyncEnvFactory, Env, EnvFactory
from shoal.engine.spec import ArraySpec, EnvSpec, ObjectSpec

__all__ = [
    "ArraySpec",
    "AsyncEnv",
    "AsyncEnvFactory",
    "Batch",
    "Engine",
    "EngineConfig",
    "Env",
    "EnvFactory",
    "EnvSpec",
    "ObjectSpec",
]
