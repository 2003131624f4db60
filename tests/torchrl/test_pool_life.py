"""What pools share with the other batched envs: synchronous verbs, seeds, state, life."""

from __future__ import annotations

import functools
import gc
import pickle
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from batched_cases import SEED, assert_same, open_reference
from pool_cases import (
    APART,
    MAIN,
    PLAIN,
    SOON,
    WAYS,
    Thread,
    act,
    acts,
    index_of,
    makers_for,
    named,
    open_named,
    seen,
    wait_until_waiting,
)
from pool_envs import WAIT, AsyncNamed, Bulky, Named, Talker
from scripted_envs import CountingEnv
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.envs import GymEnv, RewardSum, TransformedEnv, check_env_specs

from shoal import (
    AsyncEnvPool,
    AsyncioAsyncEnvPool,
    ClosedError,
    EnvError,
    NoPendingCallError,
    PendingCallError,
    ProcessorAsyncEnvPool,
    SerialAsyncEnvPool,
    ThreadingAsyncEnvPool,
    UsageError,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector

# --- the same data as TorchRL's own serial env ---------------------------------------


def serial_data(env_id: str) -> Any:
    """Returns the first root, the seed that follows, and steps: action, td, root."""
    env = open_reference(3, env_id, max_episode_steps=9)
    torch.manual_seed(0)
    try:
        following = env.set_seed(SEED)
        root = env.reset()
        first, steps = root.clone(), []
        for _ in range(30):
            action = env.rand_action()["action"].clone()
            stepped, root = env.step_and_maybe_reset(root.set("action", action))
            steps.append((action, stepped.clone(), root.clone()))
        return first, following, steps
    finally:
        env.close()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("way", PLAIN)
def test_the_same_data_as_the_serial_env(
    way: str, env_id: str, pools: Any, wanted_data: Any
) -> None:
    first, following, steps = wanted_data[env_id]
    pools.append(
        AsyncEnvPool([env_id] * 3, create_env_kwargs={"max_episode_steps": 9}, **WAYS[way])
    )
    [pool] = pools
    assert pool.set_seed(SEED) == following
    root = pool.reset()
    assert_same(root.exclude("env_index"), first)
    for step, (action, wanted, wanted_root) in enumerate(steps):
        root.set("action", action)
        if step % 3 == 0:
            stepped, root = pool.step_and_maybe_reset(root)
        else:
            # In two parts, the later envs first.
            pool.async_step_and_maybe_reset_send(root[1:])
            pool.async_step_and_maybe_reset_send(root[:1])
            stepped, root = pool.async_step_and_maybe_reset_recv(min_get=3)
        assert_same(stepped.exclude("env_index"), wanted, f"step {step}")
        assert_same(root.exclude("env_index", "action"), wanted_root.exclude("action"))


def serial_rollouts() -> Any:
    env = open_reference(2, "CartPole-v1")
    try:
        return [data.clone() for data in rollouts_of(env)]
    finally:
        env.close()


@pytest.fixture(scope="module")
def wanted_data() -> Any:
    """What TorchRL's serial env returns. It keeps its shared memory for a while."""
    found = {env_id: serial_data(env_id) for env_id in ("CartPole-v1", "Pendulum-v1")}
    return {**found, "rollouts": serial_rollouts()}


def rollouts_of(env: Any) -> list[Any]:
    env.set_seed(SEED)
    torch.manual_seed(0)
    return [env.rollout(40, break_when_any_done=False), env.rollout(40)]


@pytest.mark.parametrize("way", PLAIN)
def test_rollouts_equal_those_of_the_serial_env(way: str, pools: Any, wanted_data: Any) -> None:
    pools.append(AsyncEnvPool(["CartPole-v1"] * 2, **WAYS[way]))
    for wanted, mine in zip(wanted_data["rollouts"], rollouts_of(pools[0]), strict=True):
        assert_same(mine.exclude("env_index", ("next", "env_index")), wanted)


@pytest.mark.parametrize("break_when_any_done", [True, False, "both"])
@pytest.mark.parametrize("way", MAIN)
def test_the_specs_are_true(way: str, break_when_any_done: Any, open_pool: Any) -> None:
    pool = open_pool(way, env={"length": 4, "tame": True})
    check_env_specs(pool, break_when_any_done=break_when_any_done)
    around = TransformedEnv(pool, RewardSum())
    check_env_specs(around, break_when_any_done=break_when_any_done)


@pytest.mark.parametrize("way", MAIN)
def test_transforms_around_a_pool(way: str, open_pool: Any) -> None:
    env = TransformedEnv(open_pool(way, env={"length": 3}), RewardSum())
    data = env.rollout(7, lambda td: td.update(acts(1, 2, 3)), break_when_any_done=False)
    assert data["next", "episode_reward"][..., 0].tolist() == [
        [n * k for k in (1, 2, 3, 1, 2, 3, 1)] for n in (1, 2, 3)
    ]
    assert data["next", "observation"][..., 2].tolist() == [[1, 2, 3, 1, 2, 3, 1]] * 3
    env.close()
    assert env.base_env.is_closed


# --- synchronous verbs ---------------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
def test_public_verbs_say_whose_it_is(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    root = pool.reset()
    stepped = pool.step(root.update(acts(1, 2, 3)))
    pair = pool.step_and_maybe_reset(pool.step_mdp(stepped).update(acts(1, 2, 3)))
    assert [index_of(td) for td in (root, stepped, *pair)] == [[0, 1, 2]] * 4
    assert "env_index" not in stepped["next"].keys()  # noqa: SIM118
    assert "env_index" not in pool._step(acts(1, 2, 3)).keys()  # noqa: SIM118
    pool.async_step_send(pair[1].update(acts(4, 5, 6)))
    assert pool.async_step_recv(min_get=3)["next", "reward"].flatten().tolist() == [4, 5, 6]


@pytest.mark.parametrize("way", MAIN)
def test_a_partial_reset_touches_only_those_in_the_mask(way: str, open_pool: Any) -> None:
    pool = open_pool(way, 4)
    pool.reset()
    stepped = pool.step(acts(*[1] * 4))
    root = pool.step_mdp(stepped).set("_reset", torch.tensor([[True], [False], [False], [True]]))
    # One that the mask does not name may even be busy.
    pool.async_step_send(act(5), env_index=2)
    root = pool.reset(root, options={"count": 40})
    assert seen(root) == [[0, 2, 40], [1, 1, 1], [2, 1, 1], [3, 2, 40]]
    assert seen(pool.async_step_recv(env_index=2)["next"]) == [2, 1, 2]
    none = TensorDict({"_reset": torch.zeros(4, 1, dtype=torch.bool)}, [4])
    pool.reset(none)
    pool.async_step_send(acts(*[1] * 4, ids=range(4)))
    after = pool.async_step_recv(min_get=4)["next"]
    assert seen(after) == [[0, 2, 41], [1, 1, 2], [2, 1, 3], [3, 2, 41]]


@pytest.mark.parametrize("way", MAIN)
def test_reset_arguments_and_errors_of_all(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    assert seen(pool.reset(options={"count": 3})) == [[i, 1, 3] for i in range(3)]
    listed = [{"options": {"count": i}} for i in range(3)]
    assert seen(pool.reset(list_of_kwargs=listed)) == [[i, 2, i] for i in range(3)]
    with pytest.raises(EnvError, match="no reset of 1"):
        pool.reset(list_of_kwargs=[{}, {"options": {"fail": True}}, {}])
    with pytest.raises(EnvError, match="no step of 2"):
        pool.step(acts(1, 1, 90))
    assert seen(pool.reset()) == [[0, 4, 0], [1, 3, 0], [2, 4, 0]]


@pytest.mark.parametrize("way", APART)
def test_synchronous_verbs_wait_for_their_own_only(way: str, open_pool: Any, gate: Any) -> None:
    """While one env is busy, the others are reset, called and looked at."""
    pool = open_pool(way, env={"gate": gate})
    pool.reset()
    pool.async_step_send(act(WAIT), env_index=1)
    gate.wait_reached(timeout=SOON)
    receiver = Thread(lambda: pool.async_step_recv(env_index=1))
    wait_until_waiting(pool)
    mask = TensorDict({"_reset": torch.tensor([[True], [False], [True]])}, [3])
    for _ in range(3):
        pool.reset(mask.clone())
    assert pool._call("add", 5, env_ids=[0, 2]) == [5, 7]
    gate.open()
    assert seen(receiver.result()["next"]) == [1, 1, 1]
    assert pool.map(_resets) == [4, 1, 4]


def _resets(env: Any) -> int:
    return getattr(env, "env", env).resets


@pytest.mark.parametrize("way", ["threads", "processes-2"])
def test_a_reset_that_times_out_holds_up_no_other(way: str, open_pool: Any, gate: Any) -> None:
    pool = open_pool(way, env={"gate": gate}, timeout=0.2)
    pool.reset()
    pool.async_step_send(acts(7), env_index=[0])
    mask = torch.tensor([[False], [False], [True]])
    with pytest.raises(TimeoutError, match="envs 2 to reset"):
        pool.reset(TensorDict({"_reset": mask}, [3]), options={"wait": True})
    assert seen(pool.async_step_recv(env_index=[0], timeout=SOON)["next"]) == [[0, 1, 1]]
    with pytest.raises(PendingCallError, match="reset is still under way"):
        pool.async_step_send(acts(1), env_index=[1])
    gate.open()
    while True:
        try:
            pool.reset()  # drops the one that is late
            break
        except TimeoutError:
            continue
    assert seen(pool.step(acts(1, 1, 1))["next"]) == [[0, 2, 1], [1, 2, 1], [2, 3, 1]]


# --- seeds, state, dispatch ----------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
def test_seeds_follow_the_chain(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    reference = open_reference(3, "CartPole-v1")
    try:
        assert pool.set_seed(5) == reference.set_seed(5)
        assert pool.set_seed(5, static_seed=True) == 5
        assert pool.set_seed(None) is None
    finally:
        reference.close()


@pytest.mark.parametrize("way", PLAIN)
def test_the_state_travels(way: str) -> None:
    makers = [functools.partial(_make_summed, i) for i in range(2)]
    pool, twin = AsyncEnvPool(makers, **WAYS[way]), AsyncEnvPool(makers, **WAYS[way])
    try:
        pool.rollout(3)
        state = pool.state_dict()
        assert list(state) == ["worker0", "worker1"]
        twin.reset()
        twin.load_state_dict(state)
        assert str(twin.state_dict()) == str(state)
        pool.async_step_send(pool.reset().update(pool.full_action_spec.zero()))
        with pytest.raises(PendingCallError):
            pool.state_dict()
        pool.async_step_recv(min_get=2)
    finally:
        pool.close()
        twin.close()


def _make_summed(_: int) -> Any:
    from torchrl.envs import ObservationNorm

    return TransformedEnv(
        GymEnv("Pendulum-v1"), ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"])
    )


@pytest.mark.parametrize("way", MAIN)
def test_attributes_and_methods_of_the_envs(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    pool.reset()
    assert list(pool.name) == [0, 1, 2]
    assert pool.add(10, b=5) == [15, 16, 17]
    with pytest.raises(AttributeError, match="nonsense"):
        pool.nonsense  # noqa: B018
    assert not hasattr(pool, "nonsense")


def test_views_of_a_pool(open_pool: Any) -> None:
    pool = open_pool("threads", 4)
    pool.reset()
    view = pool[[3, 1]]
    assert seen(view.reset()) == [[3, 2, 0], [1, 2, 0]]
    assert seen(view.step(acts(5, 6))["next"]) == [[3, 2, 1], [1, 2, 1]]
    for verb in (view.async_reset_send, view.async_step_recv):
        with pytest.raises(UsageError, match="name the envs with env_index"):
            verb()
    pool.async_step_send(acts(1, ids=[3]))
    with pytest.raises(PendingCallError):
        view.step(acts(1, 1))
    assert seen(pool.async_step_recv()["next"]) == [[3, 2, 2]]
    view.close()
    assert not pool.is_closed


# --- what envs there may be ----------------------------------------------------------


@pytest.mark.parametrize("way", ["serial", "threads", "processes-2"])
@pytest.mark.parametrize("stack", ["maybe_dense", "lazy"])
def test_ids_that_differ(way: str, stack: str, pools: Any) -> None:
    ids = ["CartPole-v1", "Acrobot-v1", "CartPole-v1"]
    if way == "serial":
        with pytest.raises(RuntimeError, match="stack='dense'"):
            AsyncEnvPool(ids, **WAYS[way])
    pools.append(AsyncEnvPool(ids, stack=stack, **WAYS[way]))
    [pool] = pools
    root = pool.reset()
    assert isinstance(root, LazyStackedTensorDict)
    assert [len(row["observation"]) for row in root.unbind(0)] == [4, 6, 4]
    pool.async_step_and_maybe_reset_send(
        root[[0, 2]].update(TensorDict({"action": torch.tensor([0, 1])}, [2]))
    )
    stepped, after = pool.async_step_and_maybe_reset_recv(min_get=2)
    assert isinstance(stepped, LazyStackedTensorDict) == (stack == "lazy")
    assert stepped["next", "observation"].shape == after["observation"].shape == (2, 4)
    assert index_of(stepped) == index_of(after) == [0, 2]


@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("stack", ["dense", "lazy"])
def test_leaves_without_a_fixed_shape(way: str, stack: str, pools: Any) -> None:
    makers = [functools.partial(Talker, i) for i in range(3)]
    pools.append(AsyncEnvPool(makers, stack=stack, **WAYS[way]))
    [pool] = pools
    root = pool.reset()
    assert list(root["said"]) == ["0", "1", "2"]
    for step, chosen in enumerate([[2, 0], [1], [0, 1, 2]]):
        texts = [f"{step} to {i}" for i in chosen]
        sent = TensorDict({}, [len(chosen)]).set("action", _texts(texts))
        pool.async_step_send(sent, env_index=chosen)
        stepped = pool.async_step_recv(env_index=chosen)
        assert list(stepped["next", "heard"]) == [f"{step} to {i}" for i in sorted(chosen)]
        assert list(stepped["next", "said"]) == [f"{i}" for i in sorted(chosen)]


def _texts(texts: list[str]) -> Any:
    from tensordict import NonTensorStack

    return NonTensorStack(*texts)


@pytest.mark.parametrize("way", PLAIN)
def test_keyword_arguments_of_the_makers(way: str, pools: Any) -> None:
    kwargs = [{"name": 7}, {"name": 8}]
    pools.append(AsyncEnvPool([Named] * 2, create_env_kwargs=kwargs, **WAYS[way]))
    assert named(pools[0].reset()) == [7, 8]
    pools.append(AsyncEnvPool([Named] * 2, create_env_kwargs={"name": 3}, **WAYS[way]))
    assert named(pools[1].reset()) == [3, 3]
    with pytest.raises(ValueError, match="3 entries for 2 envs"):
        AsyncEnvPool([Named] * 2, create_env_kwargs=[{}] * 3, **WAYS[way])


def test_wrong_constructor_arguments() -> None:
    with pytest.raises(NotImplementedError, match=r"asyncio, .*multiprocessing, serial, threading"):
        AsyncEnvPool([Named], backend="ray")
    with pytest.raises(NotImplementedError, match="dense, maybe_dense, lazy"):
        AsyncEnvPool([Named], stack="sparse")
    with pytest.raises(ValueError, match="exchange"):
        AsyncEnvPool([Named], exchange="carrier pigeon")
    with pytest.raises(ValueError, match="at least one env"):
        AsyncEnvPool([])
    with pytest.raises(ValueError, match="envs_per_worker is an integer >= 1, not 0"):
        AsyncEnvPool([Named], backend="multiprocessing", envs_per_worker=0)
    with pytest.raises(ValueError, match="for backend='multiprocessing'"):
        AsyncEnvPool([Named], envs_per_worker=2)
    with pytest.raises(ValueError, match="has backend 'threading' only"):
        ThreadingAsyncEnvPool([Named], backend="multiprocessing")
    with pytest.raises(TypeError, match="names a plain one"):
        AsyncEnvPool(["CartPole-v1"], backend="asyncio")
    with pytest.raises(Exception, match=r"reset and step are plain.*async def"):
        AsyncEnvPool([Named], backend="asyncio")
    with pytest.raises(ValueError, match="give functions that make envs"):
        AsyncEnvPool([Named()], lazy_start=True)
    with pytest.raises(TypeError, match="spam"):
        AsyncEnvPool([Named], spam=1)


def test_subclasses(pools: Any) -> None:
    class Mine(AsyncEnvPool):
        def hello(self) -> str:
            return f"hello from {self.num_envs}"

    class Threaded(ThreadingAsyncEnvPool):
        pass

    pools += [Mine([Named] * 2), Mine([Named], backend="serial"), Threaded([Named])]
    assert [isinstance(pool, Mine) for pool in pools] == [True, True, False]
    assert isinstance(pools[0], ThreadingAsyncEnvPool)
    assert isinstance(pools[1], SerialAsyncEnvPool)
    assert pools[0].hello() == "hello from 2"
    assert all(len(pool.reset()) == pool.num_envs for pool in pools)


def test_the_class_for_each_backend(open_pool: Any) -> None:
    classes = {
        "serial": SerialAsyncEnvPool,
        "threads": ThreadingAsyncEnvPool,
        "processes": ProcessorAsyncEnvPool,
        "coroutines": AsyncioAsyncEnvPool,
    }
    for way, kind in classes.items():
        assert type(open_pool(way, 1)) is kind


# --- start and end -------------------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
def test_a_pool_that_starts_lazily(way: str, open_pool: Any) -> None:
    pool = open_pool(way, lazy_start=True)
    assert pool.is_closed
    assert pool.batch_size == (3,)
    for verb in (pool.async_step_recv, pool.async_reset_recv):
        with pytest.raises(ClosedError, match="do not run"):
            verb()
    with pytest.raises(ClosedError, match="reset them first"):
        pool.async_step_send(acts(1, 2, 3, ids=range(3)))
    assert pool.is_closed
    pool.async_reset_send()
    assert not pool.is_closed
    assert seen(pool.async_reset_recv(min_get=3)) == [[i, 1, 0] for i in range(3)]


def test_two_threads_start_it_once(open_pool: Any) -> None:
    pool = open_pool("threads", 8, lazy_start=True)
    before = threading.active_count()
    barrier = threading.Barrier(4)

    def start(env_id: int) -> Any:
        barrier.wait(SOON)
        pool.async_reset_send(env_index=env_id)
        return pool.async_reset_recv(env_index=env_id)

    threads = [Thread(functools.partial(start, i)) for i in range(4)]
    assert [seen(thread.result()) for thread in threads] == [[i, 1, 0] for i in range(4)]
    assert threading.active_count() - before == 8


@pytest.mark.parametrize("way", WAYS)
def test_close_and_start_again(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    assert not pool.is_closed
    pool.reset()
    pool.async_step_send(acts(1, 2, ids=[0, 1]))
    pool.close()
    assert pool.is_closed
    with pytest.raises(RuntimeError, match="closed already"):
        pool.close()
    pool.close(raise_if_closed=False)
    pool.shutdown()
    with pytest.raises(ClosedError):
        pool.async_step_recv()
    assert pool.is_closed  # asking did not start it
    assert seen(pool.reset()) == [[i, 1, 0] for i in range(3)]
    with pytest.raises(NoPendingCallError):
        pool.async_step_recv()
    pool.async_step_send(acts(1, 2, ids=[0, 1]))
    assert len(pool.async_step_recv(min_get=2)) == 2


def test_envs_are_closed_where_they_lived() -> None:
    envs = [Named(i) for i in range(3)]
    pool = AsyncEnvPool([functools.partial(_given, env) for env in envs], backend="threading")
    pool.reset()
    assert [env.closed for env in envs] == [0, 0, 0]
    pool.close()
    assert [env.closed for env in envs] == [1, 1, 1]


def _given(env: Any) -> Any:
    return env


@pytest.mark.parametrize("way", ["serial", "threads"])
def test_instances_cannot_start_again(way: str) -> None:
    pool = AsyncEnvPool([CountingEnv(), CountingEnv(start=100)], **WAYS[way])
    assert pool.reset()["observation"].flatten().tolist() == [100, 200]
    pool.close()
    with pytest.raises(Exception, match="give it a function that makes the env"):
        pool.reset()
    assert pool.is_closed


@pytest.mark.parametrize("way", MAIN)
def test_a_forgotten_pool_leaves_nothing(way: str) -> None:
    pool = open_named(way, 2)
    pool.async_reset_send()
    del pool
    gc.collect()  # the leak check sees what is left


@pytest.mark.parametrize("way", PLAIN)
def test_pickling(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    pool.reset()
    pool.close()
    twin = pickle.loads(pickle.dumps(pool))
    assert twin.is_closed
    try:
        assert named(twin.reset()) == [0, 1, 2]
        twin.async_step_send(acts(1, 2, 3, ids=range(3)))
        assert len(twin.async_step_recv(min_get=3)) == 3
    finally:
        twin.close(raise_if_closed=False)


@pytest.mark.parametrize("way", ["threads", "processes-2"])
def test_a_collector_over_a_pool_closes_it(way: str) -> None:
    pool = open_named(way, 3, env={"length": 4, "tame": True})
    collector = Collector(pool, frames_per_batch=30, total_frames=60)
    try:
        batches = [data.clone() for data in collector]
    finally:
        collector.shutdown()
    assert pool.is_closed
    assert [data.shape for data in batches] == [(3, 10)] * 2
    counts = torch.cat([data["next", "observation"][..., 2] for data in batches], -1)
    assert counts.tolist() == [[1 + t % 4 for t in range(20)]] * 3


def test_a_collector_that_ends_early_closes_it() -> None:
    pool = open_named("threads", 2, env={"tame": True})
    collector = Collector(pool, frames_per_batch=10, total_frames=-1)
    next(iter(collector))
    collector.shutdown()
    assert pool.is_closed


def test_devices(open_pool: Any) -> None:
    pool = open_pool("threads", device="cpu")
    root = pool.reset()
    assert root.device == torch.device("cpu")
    pool.async_step_and_maybe_reset_send(root.update(acts(1, 2, 3)))
    for td in pool.async_step_and_maybe_reset_recv(min_get=3):
        assert td.device == torch.device("cpu")
    pool.async_step_send(acts(1, ids=[2]))
    assert pool.async_step_recv(env_index=2).device == torch.device("cpu")


# --- whose it is ---------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["dense", "maybe_dense", "lazy"])
@pytest.mark.parametrize("way", MAIN)
def test_results_can_be_locked_and_changed_apart(way: str, stack: str, open_pool: Any) -> None:
    pool = open_pool(way, stack=stack, env={"reuse": way != "coroutines"})
    kept = [pool.reset()]
    for _ in range(3):
        pool.async_step_and_maybe_reset_send(kept[-1].copy().update(acts(1, 2, 3)))
        kept += pool.async_step_and_maybe_reset_recv(min_get=3)
    copies = [td.clone() for td in kept]
    for td in kept:
        td.lock_()
    for td, copied in zip(kept, copies, strict=True):
        td.unlock_()
        assert index_of(td) == [0, 1, 2]
        assert (td.exclude("env_index") == copied.exclude("env_index")).all()
        key = ("next", "observation") if "next" in td.keys() else "observation"  # noqa: SIM118
        for row in td.unbind(0):
            row[key].fill_(-5)
            row.get("env_index").data = 77
    pool.async_step_send(acts(4, 5, 6, ids=range(3)))
    assert seen(pool.async_step_recv(min_get=3)["next"]) == [[i, 1, 4] for i in range(3)]


def test_large_arrays_and_gradients(pools: Any) -> None:
    pools.append(AsyncEnvPool([functools.partial(Bulky, 1000)] * 2))
    [pool] = pools
    pool.reset()
    action = torch.full((2, 1000), 3, dtype=torch.uint8)
    sent = TensorDict({"action": action, "w": torch.ones(2, 1, requires_grad=True)}, [2])
    pool.async_step_send(sent, env_index=[0, 1])
    action.fill_(9)
    stepped = pool.async_step_recv(min_get=2)
    assert np.unique(stepped["next", "observation"]).tolist() == [4]
    assert np.unique(stepped["action"]).tolist() == [3]


def test_async_envs_of_a_class_of_its_own(pools: Any) -> None:
    pools.append(AsyncEnvPool([AsyncNamed] * 2, backend="asyncio", create_env_kwargs={"name": 4}))
    assert named(pools[0].reset()) == [4, 4]
    assert makers_for("coroutines", 1)[0].func is AsyncNamed
