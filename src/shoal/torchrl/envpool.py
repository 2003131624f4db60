"""`MultiThreadedEnv`: envs of EnvPool, in C++ threads, as one TorchRL environment.

Knows the batched envs and how a pool is made. Does not know how a pool is driven.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torchrl.envs.utils import _classproperty

from shoal.adapters.envpool import EnvPoolFactory, import_envpool
from shoal.engine.core.seeds import seed_chain
from shoal.errors import UsageError
from shoal.torchrl.batched import BatchedEnv
from shoal.torchrl.envpool_children import EnvPoolChildren

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["MultiThreadedEnv", "MultiThreadedEnvWrapper"]


class MultiThreadedEnvWrapper(BatchedEnv):
    """A pool that was made with ``envpool.make_gymnasium``, as one TorchRL environment.

    It has EnvPool's speed, and the data of so many single envs: an env whose episode ends
    is reset at once, by one more call of the pool for all of them, the terminal observation
    stays in ``next`` and the root shows the fresh one. EnvPool's own habit, to reset with
    the step after the end and to call that a step, never shows. An env that is stepped past
    the end of its episode stays where it is, with reward 0.

    Rewards and flags have the shape ``[N]``, as in TorchRL.

    Attributes:
        num_workers: how many envs there are.

    Example:
        >>> import envpool
        >>> env = MultiThreadedEnvWrapper(envpool.make_gymnasium("CartPole-v1", num_envs=4))
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([4, 5])
    """

    _backend = "envpool"
    _defers_values = False
    libname = "envpool"

    def __init__(self, env: Any = None, **options: Any) -> None:
        """Reads the specs; starts nothing.

        Args:
            env: the pool. It stays the caller's: `close` leaves it as it is.
            **options: ``device``, ``categorical_action_encoding`` (true), ``frame_skip``,
                ``allow_done_after_reset``, ``timeout`` and ``shutdown_timeout``.
                A ``timeout`` in seconds, for any call, costs a thread that receives results
                and two changes of thread per step; by default there is no limit.

        Raises:
            ImportError: EnvPool is not installed.
            TypeError: no pool, or something else; an unknown option.
        """
        import_envpool()
        if env is None:
            raise TypeError("Could not find environment key 'env' in kwargs: give it a pool")
        self._open_pool(EnvPoolFactory.of_pool(env), options)

    def _open_pool(self, factory: EnvPoolFactory, options: dict[str, Any]) -> None:
        options = dict(options)
        options.pop("disable_env_checker", None)
        frame_skip = options.pop("frame_skip", None) or 1
        if isinstance(frame_skip, bool) or not isinstance(frame_skip, int):
            raise ValueError(f"frame_skip must be an integer, got {frame_skip!r}")
        allow_done = bool(options.pop("allow_done_after_reset", False))
        options.setdefault("timeout", None)
        BatchedEnv.__init__(self, factory.num_envs, list(factory), **options)
        # TorchRL puts a transform around an env that has this and cannot do it itself.
        self.__dict__["frame_skip"] = frame_skip
        self.__dict__["_allow_done_after_reset"] = allow_done

    @_classproperty  # type: ignore[untyped-decorator]
    def lib(cls) -> Any:
        """The module ``envpool``."""
        return import_envpool()

    @property
    def _env(self) -> Any:
        """EnvPool's own object; started if it was not."""
        return self._running().call("?pool")[0]

    def _find_children(self) -> Any:
        return EnvPoolChildren(self.create_env_fn[0].describe(), self._options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_workers={self.num_workers}, device={self.device})"

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        # What a pool has, it has once for all envs.
        return found[0] if isinstance(found, list) and len(found) == self.num_workers else found

    # --- seeds and state -------------------------------------------------------------

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Does nothing but say so: a pool has the seeds that it was made with.

        Returns:
            The seed that would follow.
        """
        if seed is None:
            return None
        warnings.warn(
            "MultiThreadedEnvWrapper.set_seed is ignored: EnvPool takes seeds only when a pool is"
            " made. Pass seed= to envpool.make_gymnasium, or use MultiThreadedEnv",
            stacklevel=2,
        )
        return seed_chain(seed, self.num_workers, static=static_seed)[1]

    def state_dict(self, *args: Any, **kwargs: Any) -> OrderedDict[str, Any]:
        """Returns an empty dict: EnvPool's envs cannot be saved."""
        return OrderedDict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Takes what `state_dict` returns.

        Raises:
            UsageError: there is something in it.
        """
        if state_dict:
            raise UsageError(
                f"EnvPool's envs cannot be put into a state; there is {list(state_dict)[:3]}"
            )


class MultiThreadedEnv(MultiThreadedEnvWrapper):
    """Envs of EnvPool, by the name of their task; see `MultiThreadedEnvWrapper`.

    Attributes:
        env_name: the task, as EnvPool calls it.

    Example:
        >>> env = MultiThreadedEnv(8, "Pong-v5", create_env_kwargs={"num_threads": 2})
        >>> data = env.rollout(100, break_when_any_done=False)
        >>> env.close()
    """

    def __init__(
        self,
        num_workers: int,
        env_name: str,
        *,
        create_env_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> None:
        """Reads the specs; the pool is made with the first reset, step or seed.

        Args:
            num_workers: how many envs.
            env_name: the task; ``ALE/`` is left out.
            create_env_kwargs: whatever ``envpool.make`` takes besides: ``num_threads``,
                ``thread_affinity_offset``, ``batch_size``, options of the task. Copied.
                Left out, cheap tasks get one thread for 256 envs, and threads as many as the
                machine has cores get one each.
            device: where results go.
            **options: as for `MultiThreadedEnvWrapper`.

        Raises:
            ImportError: EnvPool is not installed.
            TypeError: an unknown option.
        """
        factory = EnvPoolFactory(env_name, num_workers, create_env_kwargs)
        self.env_name = factory.task_id
        self._open_pool(factory, {**options, "device": device})

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Makes a new pool whose envs have the seeds of TorchRL's chain; `reset` comes next.

        EnvPool's own rule is ``seed + i`` for env ``i``, by which neighbouring seeds share
        all envs but one. Before its release 1.0 it has no other, so there it holds.

        Args:
            seed: of env 0; ``None`` changes nothing.
            static_seed: give all envs the same seed.

        Returns:
            The seed that follows the last one.
        """
        return BatchedEnv.set_seed(self, seed, static_seed)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(env={self.env_name}, num_workers={self.num_workers},"
            f" device={self.device})"
        )
