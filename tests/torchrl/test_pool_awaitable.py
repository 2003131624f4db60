"""Coroutines that await envs of a pool: they wake up from every backend, and lose nothing."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from typing import Any

import pytest
from pool_cases import (
    APART,
    MAIN,
    SOON,
    WAYS,
    Thread,
    act,
    acts,
    index_of,
    named,
    seen,
    wait_until_waiting,
)
from pool_envs import RAISE, WAIT

from shoal import ClosedError, EnvError, NoPendingCallError, PendingCallError, RecvTimeout


def run(coroutine: Any) -> Any:
    """Runs a coroutine on a loop of its own; within a time."""

    async def limited() -> Any:
        async with asyncio.timeout(SOON):
            return await coroutine

    return asyncio.run(limited())


async def until_at(gate: Any) -> None:
    await asyncio.to_thread(gate.wait_reached, SOON)


async def until_waiting(pool: Any, count: int = 1) -> None:
    """Lets the loop run until so many wait."""
    while pool._engine._num_waiting < count:  # noqa: ASYNC110 - nobody could set an event
        await asyncio.sleep(0)


# --- one per agent -------------------------------------------------------------------


async def live(pool: Any, env_id: int, num_steps: int) -> list[Any]:
    """Steps an env of episodes of 4; returns what was seen."""
    await pool.areset(env_index=env_id)
    found = []
    for step in range(num_steps):
        stepped, root = await pool.astep_and_maybe_reset(act(step), env_id)
        assert stepped.shape == root.shape == ()
        assert index_of(stepped) == index_of(root) == env_id
        assert stepped["next", "reward"].item() == step
        found.append((seen(stepped["next"]), seen(root)))
    return found


def assert_lived(found: list[Any], env_id: int) -> None:
    for step, (after, root) in enumerate(found):
        episode, count = divmod(step, 4)
        assert after == [env_id, 1 + episode, 1 + count]
        assert root == ([env_id, 2 + episode, 0] if count == 3 else after)


@pytest.mark.parametrize("way", WAYS)
def test_a_coroutine_per_env(way: str, open_pool: Any) -> None:
    num_envs = 12
    pool = open_pool(way, num_envs, env={"length": 4})

    async def main() -> Any:
        return await asyncio.gather(*[live(pool, i, 15) for i in range(num_envs)])

    for env_id, found in enumerate(run(main())):
        assert_lived(found, env_id)
    assert not pool._engine._watches


@pytest.mark.parametrize("way", MAIN)
def test_batches(way: str, open_pool: Any) -> None:
    pool = open_pool(way, 4)

    async def main() -> None:
        root = await pool.areset()
        assert seen(root) == [[i, 1, 0] for i in range(4)]
        stepped = await pool.astep(acts(3, 1, ids=[3, 1]))
        assert index_of(stepped) == named(stepped["next"]) == [1, 3]
        assert stepped["next", "reward"].flatten().tolist() == [1, 3]
        root = await pool.areset(env_index=[2, 0], options={"count": 5})
        assert seen(root) == [[0, 2, 5], [2, 2, 5]]
        pair = await pool.astep_and_maybe_reset(acts(1, 1), env_index=[2, 0])
        assert [index_of(td) for td in pair] == [[0, 2]] * 2

    run(main())


@pytest.mark.parametrize("way", MAIN)
def test_receiving_what_was_sent_otherwise(way: str, open_pool: Any) -> None:
    pool = open_pool(way, 4)

    async def main() -> None:
        pool.async_reset_send()
        assert len(await pool.areset_recv(min_get=4)) == 4
        pool.async_step_send(acts(1, 2, 3, 4, ids=range(4)))
        got = [await pool.astep_recv(min_get=1, max_get=1) for _ in range(2)]
        got.append(await pool.astep_recv(min_get=2))
        assert sorted(name for td in got for name in named(td["next"])) == [0, 1, 2, 3]
        pool.async_step_and_maybe_reset_send(acts(1, 2, ids=[1, 2]))
        stepped, root = await pool.astep_and_maybe_reset_recv(env_index=[1, 2])
        assert named(root) == named(stepped["next"]) == [1, 2]
        with pytest.raises(NoPendingCallError):
            await pool.astep_recv()
        with pytest.raises(ValueError, match="timeout"):
            await pool.astep_recv(timeout=-1)

    run(main())


@pytest.mark.parametrize("way", MAIN)
def test_a_stream_of_results(way: str, open_pool: Any) -> None:
    """`arecv` ends when nothing is in flight any more."""
    num_envs, num_steps = 4, 10
    pool = open_pool(way, num_envs, env={"length": 4})

    async def main() -> list[Any]:
        await pool.areset()
        pool.async_step_and_maybe_reset_send(acts(*[0] * num_envs, ids=range(num_envs)))
        steps, rows = [1] * num_envs, []
        async for stepped, root in pool.arecv(min_get=2):
            rows += seen(stepped["next"])
            again = [i for i in index_of(root) if steps[i] < num_steps]
            for i in again:
                steps[i] += 1
            if again:
                pool.async_step_and_maybe_reset_send(acts(*[1] * len(again), ids=again))
        return rows

    expected = [[i, 1 + n // 4, 1 + n % 4] for i in range(num_envs) for n in range(num_steps)]
    assert sorted(run(main())) == expected


def test_streams_share_what_comes(open_pool: Any) -> None:
    """Two of them get everything between them, and both end."""
    pool = open_pool("threads", 6)

    async def consume() -> list[int]:
        mine = []
        async for stepped, root in pool.arecv(max_get=1):
            mine += named(stepped["next"])
            if root["observation"][0, 2] < 5:
                pool.async_step_and_maybe_reset_send(acts(1, ids=index_of(root)))
        return mine

    async def main() -> list[Any]:
        await pool.areset()
        pool.async_step_and_maybe_reset_send(acts(*[1] * 6, ids=range(6)))
        return await asyncio.gather(consume(), consume())

    assert sorted(itertools.chain(*run(main()))) == sorted(list(range(6)) * 5)


# --- errors, cancels, timeouts -------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
def test_errors_reach_who_awaits(way: str, open_pool: Any) -> None:
    pool = open_pool(way)

    async def main() -> None:
        await pool.areset()
        found = await asyncio.gather(
            *[pool.astep(act(a), i) for i, a in enumerate((1, RAISE, 3))], return_exceptions=True
        )
        assert isinstance(found[1], EnvError)
        assert found[1].env_id == 1
        assert [seen(found[i]["next"]) for i in (0, 2)] == [[0, 1, 1], [2, 1, 1]]
        assert seen((await pool.astep(act(1), 1))["next"]) == [1, 1, 1]

    run(main())


@pytest.mark.parametrize("way", APART)
def test_a_cancelled_coroutine_takes_nothing_with_it(way: str, open_pool: Any, gate: Any) -> None:
    pool = open_pool(way, env={"gate": gate})

    async def main() -> None:
        await pool.areset()
        task = asyncio.create_task(pool.astep(act(WAIT), 1))
        await until_at(gate)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(PendingCallError, match=r"envs \[1\] are busy"):
            await pool.astep(act(1), 1)
        gate.open()
        assert seen((await pool.astep_recv(env_index=1))["next"]) == [1, 1, 1]
        assert seen((await pool.astep(act(1), 1))["next"]) == [1, 1, 2]

    run(main())
    assert not pool._engine._watches


@pytest.mark.parametrize("way", APART)
def test_a_cancel_that_comes_with_the_result(way: str, open_pool: Any, gate: Any) -> None:
    """The coroutine ends as cancelled, and the result is still there."""
    pool = open_pool(way, env={"gate": gate})

    async def main() -> None:
        await pool.areset()
        task = asyncio.create_task(pool.astep(act(WAIT), 0))
        await until_at(gate)
        gate.open()
        while not pool._engine.rows.status[0]:
            pass  # the loop does not run meanwhile
        pool._engine._on_noise()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen((await pool.astep_recv(env_index=0))["next"]) == [0, 1, 1]

    run(main())


@pytest.mark.parametrize("way", APART)
def test_a_timeout_takes_nothing_with_it(way: str, open_pool: Any, gate: Any) -> None:
    pool = open_pool(way, env={"gate": gate})

    async def main() -> None:
        await pool.areset()
        with pytest.raises(RecvTimeout, match=r"envs 1 to step within 0\.02 s"):
            await pool.astep(act(WAIT), 1, timeout=0.02)
        await until_at(gate)
        with pytest.raises(TimeoutError):
            await pool.astep_recv(env_index=1, timeout=0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await pool.astep_recv(env_index=1)
        pool.async_step_send(acts(2, ids=[2]))
        # With a timeout it waits for others, too, until that is over.
        assert named((await pool.astep_recv(timeout=0.02))["next"]) == [2]
        gate.open()
        assert seen((await pool.astep_recv(env_index=1))["next"]) == [1, 1, 1]

    run(main())


def test_who_awaits_what_another_takes_is_told(open_pool: Any, gate: Any) -> None:
    pool = open_pool("threads", env={"gate": gate})

    async def main() -> None:
        await pool.areset()
        pool.async_step_send(acts(WAIT, ids=[0]))
        waiting = [
            asyncio.create_task(call)
            for call in (pool.astep_recv(), pool.astep_recv(env_index=0), pool.astep_recv())
        ]
        await until_waiting(pool, 3)
        gate.open()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert sorted(type(one).__name__ for one in found) == [
            "NoPendingCallError",
            "NoPendingCallError",
            "TensorDict",
        ]
        pool.async_step_send(acts(WAIT, ids=[1]))
        await until_at(gate)
        await until_at(gate)
        waiting = [asyncio.create_task(pool.astep_recv(env_index=1))]
        await until_waiting(pool)
        thread = Thread(lambda: pool.async_step_recv(env_index=1))
        await until_waiting(pool, 2)
        gate.open()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        results = [type(found[0]), type(thread.result())]
        assert NoPendingCallError in results

    run(main())


# --- close ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", APART)
def test_closed_while_coroutines_and_threads_wait(way: str, open_pool: Any, gate: Any) -> None:
    pool = open_pool(way, env={"gate": gate}, shutdown_timeout=0.2)
    pool.reset()

    async def main() -> list[Any]:
        calls = [pool.astep(act(WAIT), 0), pool.astep(act(1), 1)]
        tasks = [asyncio.create_task(call) for call in calls]
        await until_at(gate)
        assert seen((await tasks[1])["next"]) == [1, 1, 1]
        tasks.append(asyncio.create_task(pool.astep_recv(env_index=0)))
        thread = Thread(lambda: pool.async_step_recv(env_index=0))
        await until_waiting(pool, 3)
        gate.close()  # the env gives up when it is closed
        await asyncio.to_thread(pool.close)
        found = await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
        return [*found, thread.result()]

    found = run(main())
    # The env raises when its gate is gone, perhaps before the pool is closed.
    assert all(isinstance(one, ClosedError | EnvError | NoPendingCallError) for one in found)
    assert sum(isinstance(one, EnvError) for one in found) <= 1
    assert pool.is_closed


@pytest.mark.parametrize("way", APART)
def test_closed_on_the_loop_itself(way: str, open_pool: Any, gate: Any) -> None:
    pool = open_pool(way, env={"gate": gate}, shutdown_timeout=5)
    pool.reset()

    async def main() -> Any:
        tasks = [asyncio.create_task(pool.astep(act(WAIT), i)) for i in range(2)]
        await until_waiting(pool, 2)
        await until_at(gate)
        await until_at(gate)
        gate.open(2)
        pool.close()
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(one) for one in run(main())] == [ClosedError] * 2


@pytest.mark.parametrize("way", MAIN)
def test_a_loop_that_ends_with_coroutines_on_it(way: str, open_pool: Any, gate: Any) -> None:
    """`asyncio.run` cancels them; another loop goes on."""
    pool = open_pool(way, env={"gate": gate})
    pool.reset()

    async def leave() -> None:
        task = asyncio.create_task(pool.astep(act(WAIT if way != "serial" else 1), 0))
        if way != "serial":
            await until_at(gate)
        kept.append(task)

    kept: list[Any] = []
    run(leave())
    gate.open()
    assert not pool._engine._watches
    if kept[0].cancelled():
        assert seen(run(pool.astep_recv(env_index=0))["next"]) == [0, 1, 1]
    assert seen(run(pool.astep(act(1), 0))["next"]) == [0, 1, 2]


# --- several at once -----------------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
def test_two_loops_and_a_thread(way: str, open_pool: Any) -> None:
    num_envs, num_steps = 9, 20
    pool = open_pool(way, num_envs, env={"length": 4})

    def on_a_loop(ids: Any) -> Any:
        async def main() -> Any:
            return await asyncio.gather(*[live(pool, i, num_steps) for i in ids])

        return run(main())

    def in_a_thread(env_id: int) -> list[Any]:
        pool.async_reset_send(env_index=env_id)
        pool.async_reset_recv(env_index=env_id)
        found = []
        for step in range(num_steps):
            pool.async_step_and_maybe_reset_send(act(step), env_index=env_id)
            stepped, root = pool.async_step_and_maybe_reset_recv(env_index=env_id)
            found.append((seen(stepped["next"]), seen(root)))
        return found

    loops = [Thread(functools.partial(on_a_loop, range(k, k + 4))) for k in (0, 4)]
    thread = Thread(functools.partial(in_a_thread, 8))
    found = [*loops[0].result(), *loops[1].result(), thread.result()]
    for env_id, lived in enumerate(found):
        assert_lived(lived, env_id)
    assert not pool._engine._watches


@pytest.mark.parametrize("way", APART)
def test_nobody_polls(way: str, open_pool: Any, gate: Any, monkeypatch: Any) -> None:
    """While all wait, no thread and no loop looks again, or wakes up at all."""
    pool = open_pool(way, 4, env={"gate": gate})
    pool.reset()
    engine, looks, turns = pool._engine, [], []
    look = engine._look
    monkeypatch.setattr(engine, "_look", lambda pick: (looks.append(1), look(pick))[1])

    async def main() -> Any:
        loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(pool.astep(act(WAIT), i)) for i in range(4)]
        for _ in range(4):
            await until_at(gate)
        await asyncio.sleep(0.05)  # what the sends have set off is over
        run_once = loop._run_once  # type: ignore[attr-defined]
        monkeypatch.setattr(loop, "_run_once", lambda: (turns.append(1), run_once())[1])
        looks.clear()
        await asyncio.sleep(0.3)
        counts = len(looks), len(turns)
        gate.open(4)
        await asyncio.gather(*tasks)
        return counts

    num_looks, num_turns = run(main())
    assert num_looks == 0
    assert num_turns <= 2
    assert len(looks) <= 4 * 4


def test_the_loop_runs_while_others_wait(open_pool: Any, gate: Any) -> None:
    pool = open_pool("threads", env={"gate": gate})
    pool.reset()

    async def main() -> int:
        task = asyncio.create_task(pool.astep(act(WAIT), 0))
        turns = 0
        while turns < 100:
            await asyncio.sleep(0)
            turns += 1
        assert not task.done()
        gate.open()
        await task
        return turns

    assert run(main()) == 100


def test_a_thread_that_dozes_hears_for_the_loop(open_pool: Any, gate: Any) -> None:
    """Whoever hears a noise first tells all others."""
    pool = open_pool("threads", 4, env={"gate": gate})
    pool.reset()
    pool.async_step_send(act(WAIT), env_index=0)
    gate.wait_reached(timeout=SOON)
    thread = Thread(lambda: pool.async_step_recv(env_index=0))
    wait_until_waiting(pool)
    assert_lived_names(run(_several(pool, 100)))
    gate.open()
    assert seen(thread.result()["next"]) == [0, 1, 1]
    assert threading.active_count() >= 4


async def _several(pool: Any, count: int) -> list[Any]:
    async def one(env_id: int) -> list[Any]:
        return [seen((await pool.astep(act(1), env_id))["next"]) for _ in range(count)]

    return await asyncio.gather(*[one(i) for i in (1, 2, 3)])


def assert_lived_names(found: list[Any]) -> None:
    assert found == [[[i, 1, n + 1] for n in range(100)] for i in (1, 2, 3)]
