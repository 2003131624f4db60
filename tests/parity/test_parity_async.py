"""PARITY 1.16, 2.2 (21 to 28) and D17 to D20: envs that are sent and received one by one."""

from __future__ import annotations

import functools
import os
import resource
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import gymnasium
import pytest
import torch
from parity_cases import acting, column, diary_of
from parity_envs import Counter, Dice, Locked, Waiting
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict
from torchrl.envs import RewardSum, SerialEnv, TransformedEnv, check_env_specs
from torchrl.envs.async_envs import AsyncEnvPool as TorchRLPool
from torchrl.testing.mocking_classes import CountingEnv

from shoal import AsyncEnvPool, EnvError, ProcessorAsyncEnvPool, ThreadingAsyncEnvPool
from shoal.testing import Gate

if TYPE_CHECKING:
    from collections.abc import Iterator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector

P = functools.partial
# A fork of this process has torch already.
KINDS: dict[str, dict[str, Any]] = {
    "threading": {"backend": "threading"},
    "multiprocessing": {"backend": "multiprocessing", "mp_start_method": "fork"},
}
# Where it is not about processes, one of them is enough.
ONE = {"threading": {}, "multiprocessing": {"envs_per_worker": 3}}
BOTH = list(KINDS)
STARTS = [P(Counter, 10 * i) for i in range(3)]


@pytest.fixture
def make() -> Iterator[Any]:
    """Makes pools that are closed at the end of the test."""
    pools = []

    def make_one(kind: str, makers: Any, **options: Any) -> Any:
        pools.append(AsyncEnvPool(makers, **{**KINDS[kind], **options}))
        return pools[-1]

    yield make_one
    for pool in reversed(pools):
        pool.close(raise_if_closed=False)
    pools.clear()  # pytest keeps this function until after the leak check


def index_of(td: Any) -> list[int]:
    return td.get("env_index").tolist()  # type: ignore[no-any-return]


def ones(*ids: int) -> TensorDict:
    td = TensorDict({"action": torch.ones(len(ids), 1)}, [len(ids)])
    return td.set("env_index", torch.tensor(ids))


# --- 152 to 158: construction --------------------------------------------------------


def test_item_152_the_backend_chooses_the_class(make: Any) -> None:
    threaded, forked = make("threading", [Counter]), make("multiprocessing", [Counter])
    assert type(threaded) is ThreadingAsyncEnvPool
    assert type(forked) is ProcessorAsyncEnvPool
    assert isinstance(threaded, TorchRLPool)
    default = AsyncEnvPool([Counter])
    assert type(default) is ThreadingAsyncEnvPool
    default.close()
    direct = ProcessorAsyncEnvPool([Counter], mp_start_method="fork")
    assert direct.backend == "multiprocessing"
    direct.close()
    with pytest.raises(NotImplementedError, match="unknown"):
        AsyncEnvPool([Counter], backend="unknown")


@pytest.mark.parametrize("kind", BOTH)
def test_item_153_env_makers(kind: str, make: Any) -> None:
    assert make(kind, Counter).batch_size == (1,)
    assert make(kind, [Counter, P(Counter, 5)]).batch_size == (2,)
    assert make(kind, Counter(start=3)).batch_size == (1,)
    mixed = make(kind, [CountingEnv(), CountingEnv])
    assert column(mixed.reset()) == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_154_create_env_kwargs(kind: str, make: Any) -> None:
    assert column(make(kind, [Counter] * 2).reset()) == [0, 0]
    assert column(make(kind, [Counter] * 2, create_env_kwargs={"start": 4}).reset()) == [4, 4]
    each = [{"start": 1}, {"start": 2}]
    pool = make(kind, [Counter] * 2, create_env_kwargs=each)
    assert column(pool.reset()) == [1, 2]
    assert pool.create_env_kwargs == each
    with pytest.raises(ValueError, match="3 entries for 2 envs"):
        make(kind, [Counter] * 2, create_env_kwargs=[{}] * 3)


def test_item_155_stack(make: Any) -> None:
    unlike = [P(Counter, size=1), P(Counter, size=2)]
    for stack, makers, is_lazy in [
        ("dense", [Counter] * 2, False),
        ("maybe_dense", [Counter] * 2, False),
        ("maybe_dense", unlike, True),
        ("lazy", [Counter] * 2, True),
        ("lazy", unlike, True),
    ]:
        pool = make("threading", makers, stack=stack)
        pool.async_reset_send()
        root = pool.async_reset_recv(min_get=2)
        assert isinstance(root, LazyStackedTensorDict) == is_lazy
        assert [row["observation"].numel() for row in root.unbind(0)] == (
            [1, 2] if makers is unlike else [1, 1]
        )
    with pytest.raises(RuntimeError, match="dense"):
        make("threading", unlike)
    with pytest.raises(NotImplementedError, match="sparse"):
        make("threading", [Counter], stack="sparse")


@pytest.mark.parametrize("kind", BOTH)
def test_item_156_everything_starts_at_construction(kind: str, make: Any, tmp_path: Any) -> None:
    diary = tmp_path / "diary"
    pool = make(kind, [P(Counter, diary=str(diary))] * 2)
    assert not pool.is_closed
    built = [pid for what, pid in diary_of(diary) if what == "built"]
    assert len(built) == 2
    assert len({*built} - {os.getpid()}) == (2 if kind == "multiprocessing" else 0)


@pytest.mark.parametrize("kind", BOTH)
def test_item_157_batch_size_and_specs(kind: str, make: Any) -> None:
    pool = make(kind, [P(Counter, batch_size=[2])] * 3, **ONE[kind])
    child = Counter(batch_size=[2])
    assert pool.batch_size == (3, 2)
    for name in ("observation_spec", "action_spec", "reward_spec", "full_done_spec"):
        spec, one = getattr(pool, name), getattr(child, name)
        assert spec == torch.stack([one] * 3, 0), name
    assert "env_index" in pool.full_state_spec.keys()  # noqa: SIM118
    assert pool.full_state_spec["env_index"].shape == (3, 2)


@pytest.mark.parametrize("kind", BOTH)
def test_item_158_attributes(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, create_env_kwargs={"length": 5}, stack="maybe_dense")
    assert (pool.min_get, pool.num_envs) == (1, 3)
    assert (pool.backend, pool.stack) == (kind, "maybe_dense")
    assert list(pool.env_makers) == STARTS
    assert list(pool.create_env_kwargs) == [{"length": 5}] * 3
    assert pool.env_batch_sizes == [torch.Size([])] * 3


# --- 159 to 166: verbs ---------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_item_159_verbs(kind: str, make: Any) -> None:
    pool = make(kind, [P(Counter, 10 * i, 2) for i in range(3)], **ONE[kind])
    pool.async_reset_send(env_index=[0, 1, 2])
    assert column(pool.async_reset_recv(min_get=3)) == [0, 10, 20]
    pool.async_step_send(ones(0, 1, 2))
    assert column(pool.async_step_recv(min_get=3)["next"]) == [1, 11, 21]
    pool.async_step_and_maybe_reset_send(ones(0, 1, 2))
    stepped, root = pool.async_step_and_maybe_reset_recv(min_get=3)
    assert column(stepped["next"]) == [2, 12, 22]
    assert column(stepped["next"], "done") == [True] * 3
    assert column(root) == [0, 10, 20]


@pytest.mark.parametrize("kind", BOTH)
def test_item_160_where_the_index_comes_from(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    pool.reset()
    action = TensorDict({"action": torch.ones(2, 1)}, [2])
    for entry in (torch.tensor([2, 0]), NonTensorStack(2, 0)):
        pool.async_step_send(action.copy().set("env_index", entry))
        assert index_of(pool.async_step_recv(min_get=2)) == [0, 2]
    pool.async_step_send(action, env_index=[2, 0])
    assert index_of(pool.async_step_recv(min_get=2)) == [0, 2]
    pool.async_step_send(action[0], env_index=1)
    assert pool.async_step_recv(env_index=1)["env_index"] == 1
    pool.async_step_send(action[:1].set("env_index", torch.tensor([1])))
    assert index_of(pool.async_step_recv()) == [1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_161_a_reset_without_a_tensordict(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    pool.async_reset_send(env_index=[2, 1])
    assert column(pool.async_reset_recv(min_get=2)) == [10, 20]
    pool.async_reset_send(env_index=0)
    assert pool.async_reset_recv(env_index=0)["observation"].tolist() == [0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_162_busy_envs_are_listed(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    pool.reset()
    pool.async_step_send(ones(0, 2))
    with pytest.raises(RuntimeError, match=r"to envs \[1, 2\]: envs \[0, 2\] are busy"):
        pool.async_step_send(ones(1, 2))
    assert len(pool.async_step_recv(min_get=2)) == 2
    pool.async_step_send(ones(1, 2))
    assert len(pool.async_step_recv(min_get=2)) == 2


@pytest.mark.parametrize("kind", BOTH)
def test_items_163_and_164_min_get(kind: str, make: Any, tmp_path: Any) -> None:
    """What is ready comes; nobody waits for the slow one."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pool = make(kind, [P(Waiting, fifo=str(fifo))] * 3)
    pool.reset()
    actions = acting(pool, 5.0, 1.0, 1.0)
    pool.async_step_send(actions, env_index=[0, 1, 2])
    got = index_of(pool.async_step_recv(min_get=2))
    assert got == [1, 2]
    with pytest.raises(RuntimeError, match="cannot await 2 envs"):
        pool.async_step_recv(min_get=2)
    pool.min_get = 2
    with pytest.raises(RuntimeError, match="cannot await 2 envs"):
        pool.async_step_recv()
    os.close(os.open(fifo, os.O_WRONLY))
    assert index_of(pool.async_step_recv(min_get=1)) == [0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_165_results_are_sorted(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    pool.async_reset_send(env_index=[2, 0, 1])
    root = pool.async_reset_recv(min_get=3)
    assert (index_of(root), column(root)) == ([0, 1, 2], [0, 10, 20])
    pool.async_step_and_maybe_reset_send(ones(2, 1))
    for td in pool.async_step_and_maybe_reset_recv(min_get=2):
        assert index_of(td) == [1, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_item_166_children_with_a_batch_of_one(kind: str, make: Any) -> None:
    pool = make(kind, [P(Counter, 10 * i, batch_size=[1]) for i in range(2)], **ONE[kind])
    root = pool.reset()
    assert root.shape == (2, 1)
    root.update(acting(pool, 1.0))
    pool.async_step_send(root)
    stepped = pool.async_step_recv(min_get=2)
    assert stepped.shape == (2, 1)
    assert column(stepped["next"]) == [1, 11]
    pool.async_step_send(stepped[[1]].exclude("next"))
    assert column(pool.async_step_recv()["next"]) == [12]


# --- 167 to 173: synchronous verbs and the end ---------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_item_167_synchronous_verbs(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    root = pool.reset()
    stepped = pool.step(root.update(acting(pool, 1.0)))
    both = pool.step_and_maybe_reset(pool.step_mdp(stepped).update(acting(pool, 1.0)))
    assert column(both[0]["next"]) == [2, 12, 22]
    assert [index_of(td) for td in (root, stepped, *both)] == [[0, 1, 2]] * 4
    pool.async_step_send(ones(1))
    for verb in (pool.step, pool.reset, pool.step_and_maybe_reset):
        with pytest.raises(RuntimeError, match=r"envs \[1\]"):
            verb(both[1].update(acting(pool, 1.0)))
    pool.async_step_recv()
    pool.reset()


@pytest.mark.parametrize("kind", BOTH)
def test_item_168_private_verbs(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    root = pool._reset()
    assert column(root) == [0, 10, 20]
    stepped = pool._step(root.update(acting(pool, 1.0)))
    assert column(stepped) == [1, 11, 21]
    assert "env_index" not in stepped.keys()  # noqa: SIM118
    # The children's own private methods: they are not asked for a `next` of their own.
    assert all("next" not in keys for keys in pool.map(lambda child: child.step_keys))


@pytest.mark.parametrize("break_when_any_done", [True, False])
@pytest.mark.parametrize("kind", BOTH)
def test_item_169_check_env_specs(kind: str, break_when_any_done: bool, make: Any) -> None:
    pool = make(kind, [CountingEnv] * 2, **ONE[kind])
    check_env_specs(pool, break_when_any_done=break_when_any_done)
    around = TransformedEnv(pool, RewardSum())
    check_env_specs(around, break_when_any_done=break_when_any_done)


@pytest.mark.parametrize("kind", BOTH)
def test_item_170_set_seed_is_the_chain(kind: str, make: Any) -> None:
    pool, serial = make(kind, [Dice] * 3, **ONE[kind]), SerialEnv(3, Dice)
    try:
        assert pool.set_seed(11) == serial.set_seed(11)
        assert column(pool.reset()) == column(serial.reset().clone())
    finally:
        serial.close()


@pytest.mark.parametrize("kind", BOTH)
def test_item_171_shutdown_and_close(kind: str, make: Any, tmp_path: Any) -> None:
    diary = tmp_path / "diary"
    pool = make(kind, [P(Counter, diary=str(diary))] * 2)
    pool.reset()
    pool.shutdown()
    assert pool.is_closed
    assert [what for what, _ in diary_of(diary)].count("closed") == 2
    with pytest.raises(RuntimeError, match="closed"):
        pool.close()
    pool.close(raise_if_closed=False)
    pool.shutdown()
    pool._maybe_shutdown()
    forgotten = AsyncEnvPool([Counter], **KINDS[kind])
    del forgotten  # silently; the leak check sees what is left


@pytest.mark.parametrize("kind", BOTH)
def test_item_172_what_the_envs_do_not_have(kind: str, make: Any) -> None:
    """There are no messages to get wrong: a call by name says what is missing."""
    pool = make(kind, STARTS, **ONE[kind])
    pool.reset()
    with pytest.raises(AttributeError, match="no_such_message"):
        pool.no_such_message()
    assert len(pool.reset()) == 3


@pytest.mark.parametrize("kind", BOTH)
def test_item_173_transforms_go_inside(kind: str, make: Any) -> None:
    around = TransformedEnv(make(kind, STARTS, **ONE[kind]), RewardSum())
    assert column(around.reset()) == [0, 10, 20]
    pool = make(kind, [P(_with_sum, i) for i in range(2)], **ONE[kind])
    pool.reset()
    for turn in (1, 2):
        pool.async_step_send(ones(0, 1))
        stepped = pool.async_step_recv(min_get=2)
        assert column(stepped["next"], "episode_reward") == [turn, turn]
        assert column(stepped["next"]) == [turn, 1 + turn]


def _with_sum(start: int) -> Any:
    return TransformedEnv(Counter(start), RewardSum())


# --- 21 to 28: what TorchRL has got since --------------------------------------------


def test_addition_21_exchange(make: Any) -> None:
    for exchange in (None, "queue", "shm", "auto"):
        kind = "multiprocessing" if exchange == "shm" else "threading"
        pool = make(kind, Counter, exchange=exchange)
        assert column(pool.reset()) == [0]
        assert pool.exchange == (exchange or "auto")
    with pytest.raises(ValueError, match="exchange is 'queue', 'shm' or 'auto'"):
        make("multiprocessing", [Counter], exchange="pigeon")


def test_addition_22_resolved_exchange_keys_and_stats(make: Any) -> None:
    pool = make("multiprocessing", [Counter] * 2, exchange="shm")
    assert pool.resolved_exchange == "shm"
    assert pool.exchange_keys == ("action",)
    threaded = make("threading", [Counter])
    assert (threaded.resolved_exchange, threaded.exchange_keys) == ("queue", ())
    pool.async_reset_send(env_index=[0, 1])
    pool.async_reset_recv(min_get=2)
    found = pool.stats(reset=True)
    assert (found["batches"], found["items"], found["batch_fill_ratio"]) == (1, 2, 1.0)
    assert pool.stats()["batches"] == 0


@pytest.mark.parametrize("envs_per_worker", [1, 2, 3])
def test_addition_23_envs_per_worker(envs_per_worker: int, make: Any) -> None:
    pool = make("multiprocessing", STARTS, envs_per_worker=envs_per_worker)
    assert column(pool.reset()) == [0, 10, 20]
    pids = pool.map(lambda child: os.getpid())
    assert len(set(pids)) == -(-3 // envs_per_worker)
    threads = pool.map(lambda child: (os.getpid(), threading.get_ident()))
    assert len(set(threads)) == 3  # those of a worker have a thread each
    with pytest.raises(ValueError, match="envs_per_worker"):
        make("multiprocessing", STARTS, envs_per_worker=0)


def test_addition_24_worker_affinity(make: Any) -> None:
    core = min(os.sched_getaffinity(0))
    for affinity in ([[core], [core]], lambda worker: [core]):
        pool = make("multiprocessing", [Counter] * 2, worker_affinity=affinity)
        pool.reset()
        assert pool.map(lambda child: sorted(os.sched_getaffinity(0))) == [[core]] * 2
    for wrong in ([[core]], [[], []], [[-1], [core]], [[core], [10**6]]):
        with pytest.raises(ValueError, match="affinity"):
            make("multiprocessing", [Counter] * 2, worker_affinity=wrong)


@pytest.mark.parametrize("kind", BOTH)
def test_addition_25_max_get_and_timeout(kind: str, make: Any, tmp_path: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pool = make(kind, [P(Waiting, fifo=str(fifo))] * 3, **ONE[kind])
    pool.reset()
    pool.async_step_send(acting(pool, 1.0, 1.0, 5.0), env_index=[0, 1, 2])
    assert len(pool.async_step_recv(min_get=1, max_get=1)) == 1
    with pytest.raises(TimeoutError):
        pool.async_step_recv(min_get=2, timeout=0.05)
    assert len(pool.async_step_recv(min_get=1, timeout=0.05)) == 1
    with pytest.raises(TimeoutError):
        pool.async_step_recv(timeout=0)
    os.close(os.open(fifo, os.O_WRONLY))
    assert index_of(pool.async_step_recv()) == [2]
    pool.async_reset_send()
    for wrong in ({"min_get": 0}, {"min_get": 2, "max_get": 1}, {"timeout": -1}):
        with pytest.raises(ValueError, match=r"min_get|timeout"):
            pool.async_reset_recv(**wrong)


@pytest.mark.parametrize("kind", BOTH)
def test_addition_26_receives_of_one_env(kind: str, make: Any) -> None:
    pool = make(kind, [P(Counter, 100 * i) for i in range(4)])
    pool.reset()

    def live(env_id: int) -> list[int]:
        found = []
        for _ in range(10):
            pool.async_step_and_maybe_reset_send(ones(env_id)[0], env_index=env_id)
            stepped, root = pool.async_step_and_maybe_reset_recv(env_index=env_id)
            assert stepped.shape == root.shape == ()
            found.append(stepped["next", "observation"].item())
        return found

    with ThreadPoolExecutor(4) as threads:
        for env_id, found in enumerate(threads.map(live, range(4), timeout=60)):
            assert found == [100 * env_id + n for n in range(1, 11)]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_27_errors_and_a_bounded_end(kind: str, make: Any) -> None:
    pool = make(kind, STARTS)
    pool.reset()
    actions = acting(pool, 1.0, -1.0, 1.0)
    pool.async_step_send(actions, env_index=[0, 1, 2])
    with pytest.raises(EnvError) as caught:
        pool.async_step_recv(min_get=3)
    assert caught.value.env_id == 1
    assert "parity_envs.py" in caught.value.worker_traceback
    assert index_of(pool.async_step_recv(min_get=2)) == [0, 2]
    pool.async_step_send(ones(0, 1, 2))  # never received
    pool.close()


@pytest.mark.parametrize("kind", BOTH)
def test_addition_28_public_verbs_honour_min_get(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    pool.async_reset_send(env_index=[0, 1, 2])
    got = 0
    while got < 3:
        td = pool.async_reset_recv(min_get=1, max_get=1)
        assert len(td) == 1
        got += 1
    pool.async_step_and_maybe_reset_send(ones(0, 1, 2))
    stepped, _ = pool.async_step_and_maybe_reset_recv(min_get=1, max_get=2)
    assert 1 <= len(stepped) <= 2


# --- defects -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D17_a_collector_closes_the_pool(kind: str, make: Any, tmp_path: Any) -> None:
    diary = tmp_path / "diary"
    pool = make(kind, [P(Counter, diary=str(diary))] * 2)
    assert not pool.is_closed
    collector = Collector(pool, frames_per_batch=4, total_frames=-1)
    next(iter(collector))
    assert not pool.is_closed
    collector.shutdown()
    assert pool.is_closed
    assert [what for what, _ in diary_of(diary)].count("closed") == 2


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D18_a_partial_reset_touches_no_other(kind: str, make: Any) -> None:
    pool = make(kind, STARTS, **ONE[kind])
    root = pool.step_mdp(pool.step(pool.reset().update(acting(pool, 1.0))))
    root.set("_reset", torch.tensor([[False], [True], [False]]))
    root = pool.reset(root, colour="red")
    assert column(root) == [1, 10, 21]
    assert pool.map(lambda child: child.num_resets) == [1, 2, 1]
    assert pool.map(lambda child: child.reset_kwargs) == [{}, {"colour": "red"}, {}]
    assert column(pool.step(root.update(acting(pool, 1.0)))["next"]) == [2, 11, 22]


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D19_what_the_other_batched_envs_have(kind: str, make: Any) -> None:
    pool = make(kind, [Locked] * 2, **ONE[kind], lazy_start=True)
    assert pool.is_closed
    assert pool.set_seed(1) is not None
    pool.reset()
    pool.step(acting(pool, 1.0))
    state = pool.state_dict()
    assert list(state) == ["worker0", "worker1"]
    pool.step(acting(pool, 1.0))
    pool.load_state_dict(state)
    assert column(pool.step(acting(pool, 1.0))["next"]) == [2, 2]
    assert list(pool.num_resets) == [1, 1]
    pool.close()
    assert column(pool.reset()) == [0, 0]  # starts again
    assert pool.observation_spec is pool.observation_spec  # stacked once


@pytest.mark.parametrize("verb", ["step", "reset", "step_and_maybe_reset"])
def test_defect_D19_messages_name_the_right_count(verb: str, make: Any) -> None:
    pool = make("threading", STARTS)
    pool.reset()
    pool.async_step_send(ones(0, 1))
    count = 2 if verb == "step" else 0
    with pytest.raises(RuntimeError, match=f"cannot await 3 envs for {verb}: {count} are in"):
        getattr(pool, f"async_{verb}_recv")(min_get=3)
    assert len(pool.async_step_recv(min_get=2)) == 2


@pytest.mark.parametrize("stack", ["dense", "maybe_dense", "lazy"])
def test_defect_D20_results_never_change(stack: str, make: Any) -> None:
    makers = [P(Counter, length=2)] * 2
    pool = make("multiprocessing", makers, stack=stack, exchange="shm", envs_per_worker=2)
    root, kept = pool.reset(), []
    for _ in range(6):
        pool.async_step_and_maybe_reset_send(root.update(acting(pool, 1.0)))
        stepped, root = pool.async_step_and_maybe_reset_recv(min_get=2)
        kept += [(td, td.clone()) for td in (stepped, root.copy())]
    for td, copied in kept:
        assert (td.exclude("env_index") == copied.exclude("env_index")).all()


# --- beyond PARITY -------------------------------------------------------------------


def test_waiting_costs_no_processor(make: Any, tmp_path: Any) -> None:
    """As for addition 3: a receive that waits sleeps."""
    with Gate(tmp_path) as gate:
        pool = make("multiprocessing", [P(AtGate, gate)])
        pool.reset()
        pool.async_step_send(TensorDict({"action": torch.tensor([1])}, [1]), env_index=[0])
        gate.wait_reached(timeout=30)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        with pytest.raises(TimeoutError):
            pool.async_step_recv(timeout=1.0)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5
        gate.open()
        pool.async_step_recv()


class AtGate(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.gate.enter()
        return 1, 0.0, False, False, {}
