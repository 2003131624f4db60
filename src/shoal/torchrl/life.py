"""The life of a batched env: envs start with the first call, end with `close`, start again.

Knows the engine's public verbs and the seeds' rules. Does not know EnvBase, specs or
data; `base` brings what an engine is opened with.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.engine import Engine
from shoal.errors import EnvError
from shoal.torchrl.tables import Tables

if TYPE_CHECKING:
    from typing import Self

    from shoal.adapters.gymnasium import GymnasiumFactory
    from shoal.torchrl.infos import InfoReaders
    from shoal.torchrl.options import BatchOptions
    from shoal.torchrl.specs import SpaceCodec

__all__ = ["Life"]


class Life:
    """Starting, seeding, copying and closing."""

    _backend: ClassVar[str]
    _options: BatchOptions
    _infos: InfoReaders
    _codec: SpaceCodec
    _seeds: list[int] | None

    def _factories(self) -> list[GymnasiumFactory]:
        """Returns one factory per env."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        """Whether no envs run. `reset`, `step` and `set_seed` start them."""
        engine: Engine | None = self.__dict__.get("_engine")
        return engine is None

    @is_closed.setter
    def is_closed(self, value: bool) -> None:
        # TransformedEnv writes through after it has closed its base.
        if value and not self.is_closed:
            self.close()

    def start(self) -> None:
        """Starts the envs.

        Raises:
            RuntimeError: they run already.
        """
        if not self.is_closed:
            raise RuntimeError("the env has been started already; close it first")
        self._running()

    def _running(self) -> Engine:
        """Returns the engine, started if it was not."""
        engine: Engine | None = self.__dict__["_engine"]
        if engine is not None:
            return engine
        options = self._options
        engine = Engine(
            self._factories(),
            backend=self._backend,
            num_processes=options.num_processes,
            start_method=options.mp_start_method or "forkserver",
            timeout=options.timeout,
            close_timeout=options.shutdown_timeout,
            prefetch_resets=options.prefetch_resets,
            keep_infos=self._infos.needs_dicts,
            memmap=options.memmap,
            caller_steps=options.caller_steps,
        )
        self.__dict__["_engine"] = engine
        return engine

    def _started(self) -> tuple[Engine, Tables]:
        tables: Tables | None = self.__dict__["_tables"]
        engine = self._running()
        if tables is None:
            tables = self.__dict__["_tables"] = Tables(engine, self._codec)
        return engine, tables

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends all envs and workers. The next `reset` or `step` starts new ones.

        Raises:
            RuntimeError: it is closed already, and ``raise_if_closed`` is true.
        """
        engine: Engine | None = self.__dict__["_engine"]
        if engine is None:
            if raise_if_closed:
                raise RuntimeError("the env is closed already; pass raise_if_closed=False")
            return
        self.__dict__["_engine"] = None
        self.__dict__["_tables"] = None
        engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(raise_if_closed=False)

    def __getstate__(self) -> dict[str, Any]:
        # Processes do not travel: a copy is closed, and starts envs of its own.
        return {**self.__dict__, "_engine": None, "_tables": None}

    def _ask(self, *names: str) -> Any:
        """Returns the first of these attributes that the running env 0 has."""
        for name in names[:-1]:
            with suppress(EnvError):
                return self._running().call(name, env_ids=[0])[0]
        return self._running().call(names[-1], env_ids=[0])[0]

    # --- seeds ---------------------------------------------------------------------

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seeds all envs by TorchRL's chain, in one round trip.

        Args:
            seed: of env 0; ``None`` changes nothing.
            static_seed: give all envs the same seed.

        Returns:
            The seed that follows the last one.
        """
        if seed is None:
            return None
        self._seeds, following = self._running().seed(seed, static=static_seed)
        return following

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)
