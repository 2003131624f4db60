"""Nothing hangs: large payloads, many envs, envs that never answer, dead workers, closes.

Every wait here has a deadline of its own, and the leak check sees what is left.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import warnings
from typing import Any

import pytest
import torch
from pool_cases import (
    APART,
    PLAIN,
    SOON,
    WAYS,
    Thread,
    act,
    acts,
    named,
    open_named,
    seen,
    wait_until_waiting,
)
from pool_envs import WAIT, AsyncNamed, Bulky, Named, Talker
from tensordict import NonTensorStack, TensorDict

from shoal import AsyncEnvPool, PendingCallError, RecvTimeout, WorkerDied

LARGE = 5 * 2**20


# --- close ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_results_that_nobody_has_read(way: str, open_pool: Any) -> None:
    pool = open_pool(way, 6)
    pool.reset()
    pool.async_step_send(acts(*range(6), ids=range(6)))
    pool.async_step_recv(min_get=2, max_get=2)
    Thread(pool.close).result()
    assert pool.is_closed


@pytest.mark.parametrize("way", PLAIN)
def test_large_results_that_nobody_has_read(way: str, pools: Any) -> None:
    """More than fits into a pipe."""
    makers = [functools.partial(Talker, i, LARGE) for i in range(3)]
    pools.append(AsyncEnvPool(makers, **WAYS[way]))
    pools[0].async_reset_send()
    assert Thread(pools[0].close).result() is None


@pytest.mark.parametrize("way", APART)
def test_an_env_that_never_answers(way: str, open_pool: Any, gate: Any) -> None:
    """It keeps nobody from the others, and not the pool from its end."""
    pool = open_pool(way, env={"gate": gate}, shutdown_timeout=0.3)
    pool.reset()
    pool.async_step_send(acts(1, WAIT, 3, ids=range(3)))
    gate.wait_reached(timeout=SOON)
    assert named(pool.async_step_recv(min_get=2)["next"]) == [0, 2]
    for arguments in ({}, {"env_index": 1}):
        with pytest.raises(RecvTimeout, match="envs 1 to step"):
            pool.async_step_recv(**arguments, timeout=0.05)
    with pytest.raises(PendingCallError, match=r"\[1\]"):
        pool.step(acts(1, 2, 3))
    with warnings.catch_warnings():
        # Neither a thread nor what a loop has handed to one can be ended from outside.
        warnings.simplefilter("ignore", RuntimeWarning)
        closed = Thread(pool.close)
        assert closed.result() is None
    assert pool.is_closed
    gate.close()  # a thread that was left behind goes on, and ends


def test_the_timeout_of_the_pool(open_pool: Any, gate: Any) -> None:
    pool = open_pool("threads", env={"gate": gate}, timeout=0.05)
    pool.async_reset_send(env_index=[0, 2], options={"wait": True})
    with pytest.raises(RecvTimeout, match=r"envs 0, 2 to reset within 0\.05 s"):
        pool.async_reset_recv()
    gate.open(2)
    assert named(pool.async_reset_recv(min_get=2, timeout=SOON)) == [0, 2]


# --- payloads --------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["threads", "processes-2"])
def test_large_arrays_both_ways(way: str, pools: Any) -> None:
    pools.append(AsyncEnvPool([functools.partial(Bulky, LARGE)] * 2, **WAYS[way]))
    [pool] = pools
    pool.reset()
    action = torch.arange(2 * LARGE).remainder(250).to(torch.uint8).reshape(2, LARGE)
    sender = Thread(
        lambda: pool.async_step_send(TensorDict({"action": action}, [2]), env_index=[1, 0])
    )
    assert sender.result() is None
    stepped = Thread(lambda: pool.async_step_recv(min_get=2)).result()
    assert torch.equal(stepped["next", "observation"], action.flip(0) + 1)


@pytest.mark.parametrize("way", PLAIN)
def test_large_objects_both_ways(way: str, pools: Any) -> None:
    """Two workers at once, and results that wait while the next actions are written."""
    makers = [functools.partial(Talker, i, LARGE) for i in range(2)]
    pools.append(AsyncEnvPool(makers, **WAYS[way]))
    [pool] = pools
    texts = [letter * LARGE for letter in "ab"]

    def play() -> list[Any]:
        pool.async_reset_send()
        pool.async_reset_recv(min_get=2)
        heard = []
        for turn in range(3):
            for env_id in (turn % 2, 1 - turn % 2):
                td = TensorDict({}, [1]).set("action", NonTensorStack(texts[env_id]))
                pool.async_step_send(td, env_index=[env_id])
            heard.append(list(pool.async_step_recv(min_get=2)["next", "heard"]))
        return heard

    heard = Thread(play).result()
    assert all(row == texts for row in heard)


# --- many ---------------------------------------------------------------------------------

_MANY = {
    "threads": {"backend": "threading"},
    "coroutines": {"backend": "asyncio"},
    "processes": {
        "backend": "multiprocessing",
        "mp_start_method": "fork",
        "envs_per_worker": 64,
        "env_threads": False,
    },
    "threaded processes": {
        "backend": "multiprocessing",
        "mp_start_method": "fork",
        "envs_per_worker": 64,
    },
}


@pytest.mark.parametrize("way", _MANY)
def test_256_envs(way: str, pools: Any) -> None:
    num_envs = 256
    kind = AsyncNamed if way == "coroutines" else Named
    makers = [functools.partial(kind, i, 3) for i in range(num_envs)]
    pools.append(AsyncEnvPool(makers, **_MANY[way]))
    [pool] = pools

    def play() -> list[int]:
        pool.async_reset_send()
        steps, in_flight = [0] * num_envs, 0
        ready = pool.async_reset_recv(min_get=num_envs)["env_index"]
        while ready or in_flight:
            in_flight += len(ready)
            if ready:
                pool.async_step_and_maybe_reset_send(acts(*[1] * len(ready), ids=ready))
            stepped, _ = pool.async_step_and_maybe_reset_recv(min_get=min(in_flight, 32))
            rows = seen(stepped["next"])
            in_flight -= len(rows)
            for i, resets, count in rows:
                assert (resets, count) == (1 + steps[i] // 3, 1 + steps[i] % 3)
                steps[i] += 1
            ready = [row[0] for row in rows if steps[row[0]] < 5]
        return steps

    assert Thread(play).result() == [5] * num_envs


@pytest.mark.parametrize("way", ["threads", "coroutines"])
def test_256_coroutines(way: str, pools: Any) -> None:
    num_envs = 256
    pools.append(open_named(way, num_envs))
    [pool] = pools

    async def live(env_id: int) -> Any:
        await pool.areset(env_index=env_id)
        for _ in range(3):
            stepped = await pool.astep(act(1), env_id)
        return seen(stepped["next"])

    async def main() -> Any:
        async with asyncio.timeout(SOON):
            return await asyncio.gather(*map(live, range(num_envs)))

    assert asyncio.run(main()) == [[i, 1, 3] for i in range(num_envs)]


# --- deaths -----------------------------------------------------------------------------------


@pytest.mark.crash
@pytest.mark.parametrize("way", ["processes", "processes-2"])
def test_a_worker_is_killed_while_others_have_results(way: str, pools: Any, gate: Any) -> None:
    """Coroutines and threads hear of it at once; what is ready can be had before."""
    pools.append(open_named(way, 4, env={"gate": gate}))
    [pool] = pools
    pool.reset()
    pool.async_step_send(acts(1, 2, WAIT, ids=[0, 1, 3]))
    gate.wait_reached(timeout=SOON)

    async def main() -> list[Any]:
        tasks = [
            asyncio.create_task(call)
            for call in (pool.astep_recv(min_get=3), pool.astep_recv(env_index=[3]))
        ]
        while pool._engine._num_waiting < 2:  # noqa: ASYNC110 - nobody could set an event
            await asyncio.sleep(0)
        os.kill(pool._engine.worker_pids[-1], signal.SIGKILL)
        async with asyncio.timeout(SOON):
            return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(main())
    assert [type(one) for one in found] == [WorkerDied] * 2
    assert all("SIGKILL" in str(one) for one in found)
    assert seen(asyncio.run(pool.astep_recv(min_get=2))["next"]) == [[0, 1, 1], [1, 1, 1]]
    with pytest.raises(WorkerDied):
        pool.step(acts(1, 1, 1, 1))
    assert Thread(pool.close).result() is None


@pytest.mark.crash
@pytest.mark.parametrize("way", ["threads", "coroutines"])
def test_an_env_that_ends_its_thread(way: str, pools: Any) -> None:
    kind = {"threads": Leaving, "coroutines": AsyncLeaving}[way]
    makers = [functools.partial(kind, i) for i in range(2)]
    pools.append(AsyncEnvPool(makers, **WAYS[way]))
    [pool] = pools
    pool.reset()
    pool.async_step_send(acts(1, ids=[0]))
    assert named(pool.async_step_recv()["next"]) == [0]
    pool.async_step_send(acts(5, ids=[1]))
    words = "thread of env 1" if way == "threads" else "event loop of the envs"
    with pytest.raises(WorkerDied, match=rf"{words}.*ended with exit code 7 during step") as caught:
        pool.async_step_recv(timeout=SOON)
    assert "SystemExit" in str(caught.value)
    assert "somebody killed" not in str(caught.value)
    assert isinstance(caught.value.__cause__, SystemExit)


class Leaving(Named):
    def step(self, action: Any) -> Any:
        if action == 5:
            raise SystemExit(7)
        return super().step(action)


class AsyncLeaving(AsyncNamed):
    async def step(self, action: Any) -> Any:
        if action == 5:
            raise SystemExit(7)
        return await super().step(action)


# --- interrupts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", APART)
def test_an_interrupted_verb_loses_nothing_of_others(way: str, open_pool: Any, gate: Any) -> None:
    """Ctrl-C ends a reset of one env; the steps of two others are still to be had."""
    pool = open_pool(way, env={"gate": gate})
    pool.reset()
    pool.async_step_send(acts(1, 2, ids=[0, 1]))
    mask = TensorDict({"_reset": torch.tensor([[False], [False], [True]])}, [3])

    def interrupt() -> None:
        gate.wait_reached(SOON)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.reset(mask, options={"wait": True})
    assert thread.result() is None
    gate.open()
    assert seen(pool.async_step_recv(min_get=2)["next"]) == [[0, 1, 1], [1, 1, 1]]
    pool.async_step_send(acts(3, ids=[0]))
    assert seen(pool.async_step_recv()["next"]) == [[0, 1, 2]]
    assert seen(pool.reset(mask)) == [[0, 1, 2], [1, 1, 1], [2, 3, 0]]


@pytest.mark.parametrize("way", APART)
def test_an_interrupted_receive_loses_nothing(way: str, open_pool: Any, gate: Any) -> None:
    pool = open_pool(way, env={"gate": gate})
    pool.reset()
    pool.async_step_send(acts(1, WAIT, ids=[0, 1]))

    def interrupt() -> None:
        gate.wait_reached(SOON)
        wait_until_waiting(pool)
        os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.async_step_recv(min_get=2)
    assert thread.result() is None
    gate.open()
    assert seen(pool.async_step_recv(min_get=2)["next"]) == [[0, 1, 1], [1, 1, 1]]
