"""The life of a batched env: envs start with the first call, end with `close`, start again.

Knows the engine's public verbs and the seeds' rules. Does not know EnvBase, specs or
data; `base` brings what an engine is opened with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shoal.engine import Engine
from shoal.errors import EnvError
from shoal.torchrl.threads import ThreadLimits

if TYPE_CHECKING:
    from typing import Self

    from shoal.torchrl.children import Children
    from shoal.torchrl.options import BatchOptions
    from shoal.torchrl.rows import Rows

__all__ = ["Life"]

_threads = ThreadLimits()


class Life:
    """Starting, seeding, copying and closing."""

    _backend: ClassVar[str]
    _engine_class: ClassVar[type[Engine]] = Engine
    _options: BatchOptions
    _children: Children
    _seeds: list[int] | None
    # Which of the owner's envs a view shows; of an env of its own: all.
    _env_ids: list[int] | None = None
    reset_keys: Any
    create_env_fn: list[Any]
    create_env_kwargs: list[dict[str, Any]]
    num_workers: int

    @property
    def is_closed(self) -> bool:
        """Whether no envs run. `reset`, `step` and `set_seed` start them."""
        owner = self.__dict__.get("_owner")
        if owner is not None:
            return bool(self.__dict__["_has_left"] or owner.is_closed)
        return self.__dict__.get("_engine") is None

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
        owner = self.__dict__["_owner"]
        if owner is not None:
            if self.is_closed:
                what = "a closed indexed env" if self.__dict__["_has_left"] else "an indexed env"
                why = (
                    "its parent environment has been closed" if owner.is_closed else "it is closed"
                )
                raise RuntimeError(f"cannot use {what}: {why}; index the env again once it runs")
            return owner._running()  # type: ignore[no-any-return]
        self._open_described()
        engine = self.__dict__["_engine"]
        assert engine is not None
        return engine

    def _open_described(self) -> None:
        """Starts the envs that were described; once more if they differ from that."""
        rows = None
        while rows is None:
            children = self._children
            factories = children.factories(
                self.create_env_fn, self.create_env_kwargs, self._backend
            )
            engine = self._open(factories, children.engine_options(self._backend))
            try:
                rows = children.open(engine, self.reset_keys)
            except BaseException:
                self.close()
                raise
            if rows is None:
                self.close()
        self.__dict__["_rows"] = rows

    def _open(self, factories: list[Any], more: dict[str, Any]) -> Engine:
        options = self._options
        chosen = {
            "backend": self._backend,
            "num_processes": options.num_processes,
            "start_method": options.mp_start_method or "forkserver",
            "timeout": options.timeout,
            "close_timeout": options.shutdown_timeout,
            "prefetch_resets": options.prefetch_resets,
            "memmap": options.memmap,
            "caller_steps": options.caller_steps,
        }
        engine = self._engine_class(factories, **{**chosen, **self._more_options(), **more})
        self.__dict__["_engine"] = engine
        if options.num_threads is not None and self._backend == "processes":
            self.__dict__["_thread_key"] = _threads.set(options.num_threads)
        return engine

    def _more_options(self) -> dict[str, Any]:
        """Returns options of the engine that only some kinds of batched envs have."""
        return {}

    def _started(self) -> Rows:
        """Returns the rows of the engine, started if it was not."""
        rows: Rows | None = self.__dict__["_rows"]
        owner = self.__dict__["_owner"]
        if owner is not None:
            self._running()
            whole = owner._started()
            if rows is None or rows.engine is not whole.engine:
                rows = self.__dict__["_rows"] = whole.select(self._env_ids, self.reset_keys)
            return rows
        if rows is None:
            engine = self._running()
            # Envs that were asked for their own description ran before there were rows.
            rows = self.__dict__["_rows"] or self._children.open(engine, self.reset_keys)
            if rows is None:
                self.close()
                self._running()
                rows = self.__dict__["_rows"]
            self.__dict__["_rows"] = rows
        assert rows is not None
        return rows

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends all envs and workers. The next `reset` or `step` starts new ones.

        Raises:
            RuntimeError: it is closed already, and ``raise_if_closed`` is true.
        """
        if self.is_closed:
            if raise_if_closed:
                raise RuntimeError("the env is closed already; pass raise_if_closed=False")
            return
        self.__dict__["_rows"] = None
        if self.__dict__["_owner"] is not None:
            self.__dict__["_has_left"] = True  # a view leaves the envs to their owner
            return
        engine: Engine = self.__dict__["_engine"]
        self.__dict__["_engine"] = None
        key = self.__dict__.pop("_thread_key", None)
        try:
            engine.close()
        finally:
            if key is not None:
                _threads.release(key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(raise_if_closed=False)

    def __getstate__(self) -> dict[str, Any]:
        # Processes do not travel: a copy is closed, and starts envs of its own.
        state = {**self.__dict__, "_engine": None, "_rows": None}
        state.pop("_thread_key", None)
        return state

    def _call(
        self, name: str, *args: Any, env_ids: list[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Calls a method of each env, or reads an attribute; one value per env.

        Raises: what the first env to fail raised, with a note that says which env it was.
        """
        order = self._env_ids if env_ids is None else env_ids
        try:
            values = self._running().call(name, *args, env_ids=order, **kwargs)
            if order is None:
                return values
            # The engine answers in ascending order.
            by_id = dict(zip(sorted(order), values, strict=True))
            return [by_id[i] for i in order]
        except EnvError as error:
            cause = error.__cause__
            if not isinstance(cause, Exception):
                raise
            cause.add_note(str(error))
            raise cause from None

    def _call_each(self, name: str, values: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls a method of each env with a first argument of its own."""
        mine = range(self.num_workers) if self._env_ids is None else self._env_ids
        return [
            self._call(name, value, *args, env_ids=[i], **kwargs)[0]
            for i, value in zip(mine, values, strict=True)
        ]

    # --- seeds ---------------------------------------------------------------------

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seeds all envs by TorchRL's chain, in one round trip.

        The chain is worked out ahead. Where an env has a rule of its own for the seed
        after it, as one that is a batch itself, the envs behind it are seeded anew.

        Args:
            seed: of env 0; ``None`` changes nothing.
            static_seed: give all envs the same seed.

        Returns:
            The seed that follows the last one.
        """
        if seed is None:
            return None
        engine = self._running()
        if static_seed and self._children.seed_themselves:
            self._seeds = [seed] * self.num_workers
            self._call("set_seed", seed, static_seed=True)
            return seed
        self._seeds, following = engine.seed(seed, static=static_seed, env_ids=self._env_ids)
        return following

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)
