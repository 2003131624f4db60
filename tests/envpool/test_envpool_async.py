"""`AsyncEnvPool(backend="envpool")`: first ready rows, awaitable verbs, deadlines."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from torchrl.envs.utils import check_env_specs

import shoal
from shoal.errors import RecvTimeout

N = 4


@pytest.fixture
def make():
    made = []

    def make_one(num: int = N, **kwargs):
        pool = shoal.AsyncEnvPool(
            ["CartPole-v1"] * num,
            backend="envpool",
            create_env_kwargs={"max_episode_steps": 7, **kwargs},
        )
        made.append(pool)
        return pool

    yield make_one
    for pool in made:
        pool.close(raise_if_closed=False)


def _act(root):
    return root.set("action", torch.randint(0, 2, (len(root),)))


@pytest.mark.parametrize("batch_size", [1, 2, N])
def test_every_env_has_exact_episodes(make, batch_size: int) -> None:
    pool = make(batch_size=batch_size)
    assert type(pool) is shoal.EnvPoolAsyncEnvPool
    last = pool.reset()["observation"]
    pool.async_step_and_maybe_reset_send(_act(pool.reset()))
    last, length, ends = {}, [0] * N, 0
    for _ in range(150):
        stepped, root = pool.async_step_and_maybe_reset_recv(min_get=1, timeout=60)
        for k, i in enumerate(list(stepped["env_index"])):
            length[i] += 1
            assert stepped["next", "reward"][k] == 1
            if i in last:
                assert torch.equal(stepped["observation"][k], last[i])
            if stepped["next", "done"][k]:
                assert bool(stepped["next", "truncated"][k]) == (length[i] == 7)
                length[i], ends = 0, ends + 1
            last[i] = root["observation"][k].clone()
        pool.async_step_and_maybe_reset_send(_act(root))
    assert ends > N


def test_specs_and_synchronous_verbs(make) -> None:
    pool = make()
    check_env_specs(pool)
    data = pool.rollout(20, break_when_any_done=False)
    assert (data["next", "reward"] == 1).all()
    assert data["next", "done"].any()


def test_awaited_by_many_coroutines(make) -> None:
    pool = make()

    async def run(i: int, root) -> int:
        for _ in range(30):
            stepped, root = await pool.astep_and_maybe_reset(_act(root), timeout=60)
            assert list(stepped["env_index"]) == [i]
        return i

    async def main() -> list[int]:
        roots = pool.reset()
        return await asyncio.gather(*[run(i, roots[i : i + 1]) for i in range(N)])

    assert asyncio.run(main()) == list(range(N))


def test_several_threads_share_a_pool(make) -> None:
    pool = make(num=8)
    roots = pool.reset()
    counts = []

    def run(i: int) -> None:
        root = roots[i : i + 1]
        for _ in range(40):
            pool.async_step_and_maybe_reset_send(_act(root), env_index=[i])
            _, root = pool.async_step_and_maybe_reset_recv(env_index=[i], timeout=60)
        counts.append(40)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [40] * 8


def test_a_deadline_loses_nothing() -> None:
    import envpool

    native = envpool.make_gymnasium("CartPole-v1", num_envs=4, batch_size=2)
    pool = shoal.AsyncEnvPool(native, backend="envpool")
    root = _act(pool.reset())
    pool.async_step_send(root[:1])
    with pytest.raises(RecvTimeout):
        pool.async_step_recv(min_get=1, timeout=0.05)  # EnvPool returns two at a time
    pool.async_step_send(root[2:3])
    assert pool.async_step_recv(min_get=2, timeout=60)["env_index"] == [0, 2]
    pool.close()


def test_what_makes_no_pool_is_refused() -> None:
    with pytest.raises(TypeError, match="one kind"):
        shoal.AsyncEnvPool(["CartPole-v1", "Acrobot-v1"], backend="envpool")
    with pytest.raises(TypeError, match="name"):
        shoal.AsyncEnvPool([lambda: None] * 2, backend="envpool")
    with pytest.raises(ValueError, match="same keyword"):
        shoal.AsyncEnvPool(
            ["CartPole-v1"] * 2, backend="envpool", create_env_kwargs=[{"seed": 1}, {"seed": 2}]
        )
