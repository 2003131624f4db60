"""What the tests of pools share: ways to run one, and how to read what it returns."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from pool_envs import AsyncNamed, Named
from tensordict import TensorDict

from shoal import AsyncEnvPool

if TYPE_CHECKING:
    from collections.abc import Callable

# A fork of this process has torch already: envs that a function makes are up in a moment.
_FORK = {"backend": "multiprocessing", "mp_start_method": "fork"}
WAYS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "threads": {"backend": "threading"},
    "processes": dict(_FORK),
    "processes-2": {**_FORK, "envs_per_worker": 2},
    "coroutines": {"backend": "asyncio"},
}
# One env per process is started where it matters only: each process takes its time.
MAIN = [way for way in WAYS if way != "processes"]
# Those whose sends do not wait, and those that do not need envs of a special kind.
APART = [way for way in MAIN if way != "serial"]
PLAIN = [way for way in MAIN if way != "coroutines"]
SOON = 30.0


def makers_for(way: str, num_envs: int, **kwargs: Any) -> list[Any]:
    """Returns makers of envs that are named by their index."""
    kind = AsyncNamed if way == "coroutines" else Named
    return [functools.partial(kind, i, **kwargs) for i in range(num_envs)]


def open_named(
    way: str, num_envs: int, *, env: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Returns a pool of envs that are named by their index."""
    return AsyncEnvPool(makers_for(way, num_envs, **(env or {})), **{**WAYS[way], **options})


def acts(*actions: int, ids: Any = None) -> TensorDict:
    """Returns actions, one per env; with an ``env_index`` entry for ``ids``."""
    td = TensorDict({"action": torch.tensor(actions)}, [len(actions)])
    return td if ids is None else td.set("env_index", torch.as_tensor(ids))


def act(action: int) -> TensorDict:
    """Returns the action of one env, without a dimension for it."""
    return TensorDict({"action": torch.tensor(action)}, [])


def index_of(td: Any) -> Any:
    """Returns what a result says about whose it is."""
    entry = td.get("env_index")
    return entry.tolist() if hasattr(entry, "tolist") else entry


def seen(td: Any) -> Any:
    """Returns the observations of a result: name, resets and steps of each env."""
    return td.get("observation").tolist()


def named(td: Any) -> list[int]:
    """Returns whose observations these are, by themselves."""
    return [row[0] for row in seen(td)]


class Thread(threading.Thread):
    """A thread whose result or error can be had."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self._function()
        except BaseException as error:  # noqa: BLE001 - told by `result`
            self.found = error

    def result(self) -> Any:
        """Waits for its end; returns what it returned or raised."""
        self.join(SOON)
        assert not self.is_alive(), "the thread still waits"
        return self.found


def wait_until_waiting(pool: Any, count: int = 1) -> None:
    """Waits until so many threads and coroutines wait for results."""
    pause = threading.Event()
    for _ in range(int(SOON / 0.002)):
        if pool._engine._num_waiting >= count:
            return
        pause.wait(0.002)
    raise AssertionError("nobody waits")
