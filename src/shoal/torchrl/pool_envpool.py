"""`AsyncEnvPool(backend="envpool")`: envs of EnvPool that are sent and received one by one.

Knows the async pool and how one of EnvPool's is made. Does not know how it is driven.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.adapters.envpool import EnvPoolFactory, import_envpool
from shoal.torchrl.envpool_children import EnvPoolChildren
from shoal.torchrl.pool import _POOLS, AsyncEnvPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["EnvPoolAsyncEnvPool"]


class EnvPoolAsyncEnvPool(AsyncEnvPool):
    """Envs of EnvPool; results come as soon as each env has them, with its number.

    A pool that is made here returns envs one by one. One of the caller's returns them
    ``batch_size`` at a time: what is sent beyond a multiple of that comes with later ones.
    One without ``batch_size`` takes the next envs when those before are all done.

    Rewards and flags have the shape ``[n]``, as in `MultiThreadedEnv`.

    Example:
        >>> pool = AsyncEnvPool(["Pong-v5"] * 8, backend="envpool")
        >>> root = pool.reset()
        >>> pool.async_step_and_maybe_reset_send(pool.rand_action(root))
        >>> stepped, root = pool.async_step_and_maybe_reset_recv(min_get=2)
        >>> pool.close()
    """

    _backend = "envpool"
    backend_name = "envpool"

    def __init__(
        self,
        env_makers: Any,
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        lazy_start: bool = False,
        **options: Any,
    ) -> None:
        """Makes the pool.

        Args:
            env_makers: the name of a task, once per env, or a pool that was made with
                ``envpool.make_gymnasium``, which stays the caller's.
            create_env_kwargs: whatever ``envpool.make`` takes besides; the same for all envs.
                Left out, ``batch_size`` is 1 and ``num_threads`` the cores, or the envs.
            lazy_start: make the pool with the first call.
            **options: as for `AsyncEnvPool`.

        Raises:
            ImportError: EnvPool is not installed.
            TypeError: something else than a pool or names; different names.
            ValueError: different keyword arguments.
        """
        factory = _factory_of(env_makers, create_env_kwargs)
        super().__init__(list(factory), lazy_start=lazy_start, **options)
        if not lazy_start:
            self._started()

    def _find_children(self) -> Any:
        return EnvPoolChildren(self.create_env_fn[0].describe(), self._options)


def _factory_of(env_makers: Any, create_env_kwargs: Any) -> EnvPoolFactory:
    import_envpool()
    names = list(env_makers) if isinstance(env_makers, list | tuple) else [env_makers]
    if not names or not all(isinstance(name, str) for name in names):
        if len(names) == 1:
            return EnvPoolFactory.of_pool(names[0])
        raise TypeError(
            "backend='envpool' takes the name of one of EnvPool's tasks once per env, or one pool"
        )
    if len(set(names)) > 1:
        raise TypeError(f"one pool has one kind of env, not {sorted(set(names))}")
    kwargs = create_env_kwargs or {}
    if isinstance(kwargs, list | tuple):
        if len(kwargs) != len(names) or any(own != kwargs[0] for own in kwargs):
            raise ValueError("all envs of one pool have the same keyword arguments: give one dict")
        kwargs = kwargs[0]
    return EnvPoolFactory(names[0], len(names), {"batch_size": 1, **kwargs})


_POOLS[EnvPoolAsyncEnvPool.backend_name] = EnvPoolAsyncEnvPool
