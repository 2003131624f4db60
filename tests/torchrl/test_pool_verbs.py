"""Envs of a pool are sent and received one by one, by number or by what is ready."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from pool_cases import (
    APART,
    MAIN,
    SOON,
    WAYS,
    Thread,
    act,
    acts,
    index_of,
    makers_for,
    named,
    seen,
    wait_until_waiting,
)
from pool_envs import DIE, RAISE, WAIT
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from shoal import (
    AsyncEnvPool,
    EnvError,
    NoPendingCallError,
    PendingCallError,
    RecvTimeout,
    SpecError,
    UsageError,
    WorkerDied,
)

# --- whose it is ---------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_three_verbs(way: str, open_pool: Any) -> None:
    pool = open_pool(way, env={"length": 2})
    pool.async_reset_send()
    root = pool.async_reset_recv(min_get=3)
    assert seen(root) == [[i, 1, 0] for i in range(3)]
    assert index_of(root) == [0, 1, 2]
    pool.async_step_send(root.update(acts(5, 6, 7)))
    stepped = pool.async_step_recv(min_get=3)
    assert seen(stepped) == [[i, 1, 0] for i in range(3)]
    assert seen(stepped["next"]) == [[i, 1, 1] for i in range(3)]
    assert stepped["next", "reward"].tolist() == [[5], [6], [7]]
    assert stepped["action"].tolist() == [5, 6, 7]
    assert index_of(stepped) == [0, 1, 2]
    pool.async_step_and_maybe_reset_send(acts(1, 2, 3, ids=[0, 1, 2]))
    stepped, root = pool.async_step_and_maybe_reset_recv(min_get=3)
    assert seen(stepped["next"]) == [[i, 1, 2] for i in range(3)]
    assert stepped["next", "done"].all()
    assert seen(root) == [[i, 2, 0] for i in range(3)]
    assert not root["done"].any()
    assert index_of(stepped) == index_of(root) == [0, 1, 2]


_FORMS: dict[str, Any] = {
    "list": [2, 0],
    "tuple": (2, 0),
    "tensor": torch.tensor([2, 0]),
    "column": torch.tensor([[2], [0]]),
    "array": np.array([2, 0], np.int32),
    "list of numpy": [np.int64(2), np.int8(0)],
    "nested": [[2], [0]],
}


@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
@pytest.mark.parametrize("way", ["serial", "threads"])
def test_who_is_meant_as_an_argument(way: str, form: Any, open_pool: Any) -> None:
    pool = open_pool(way)
    pool.async_reset_send(env_index=form)
    assert named(pool.async_reset_recv(min_get=2)) == [0, 2]
    pool.async_step_send(acts(20, 0), env_index=form)
    stepped = pool.async_step_recv(env_index=form)
    assert index_of(stepped) == named(stepped["next"]) == [0, 2]
    assert stepped["next", "reward"].tolist() == [[0], [20]]


@pytest.mark.parametrize(
    "entry",
    [
        torch.tensor([2, 0]),
        torch.tensor([[2], [0]]),
        NonTensorStack(2, 0),
        NonTensorData([2, 0], batch_size=[2]),
    ],
    ids=["tensor", "column", "stack", "data"],
)
def test_who_is_meant_as_an_entry(entry: Any, open_pool: Any) -> None:
    pool = open_pool("threads")
    pool.reset()
    pool.async_step_send(acts(20, 0).set("env_index", entry))
    stepped = pool.async_step_recv(min_get=2)
    assert index_of(stepped) == [0, 2]
    assert stepped["next", "reward"].tolist() == [[0], [20]]


@pytest.mark.parametrize("env_index", [1, np.int32(1), torch.tensor(1), np.array(1)], ids=type)
@pytest.mark.parametrize("way", ["serial", "threads"])
def test_one_env_by_its_number(way: str, env_index: Any, open_pool: Any) -> None:
    pool = open_pool(way)
    pool.async_reset_send(env_index=env_index)
    root = pool.async_reset_recv(env_index=env_index)
    assert root.shape == ()
    assert index_of(root) == 1
    pool.async_step_and_maybe_reset_send(root.set("action", torch.tensor(4)), env_index=env_index)
    stepped, root = pool.async_step_and_maybe_reset_recv(env_index=env_index)
    assert stepped.shape == root.shape == ()
    assert seen(stepped["next"]) == seen(root) == [1, 1, 1]
    assert index_of(stepped) == index_of(root) == 1
    # A single row that says itself whose it is.
    pool.async_step_send(act(5).set("env_index", 2))
    stepped = pool.async_step_recv(min_get=1)
    assert stepped.shape == (1,)
    assert named(stepped["next"]) == [2]
    # A batch of one for one number.
    pool.async_step_send(acts(5), env_index=env_index)
    assert pool.async_step_recv(env_index=[1]).shape == (1,)


def test_what_was_sent_by_number_is_received_by_number(open_pool: Any) -> None:
    pool = open_pool("threads")
    pool.reset()
    pool.async_step_send(act(1), env_index=1)
    with pytest.raises(NoPendingCallError, match=r"Envs \[1\] were sent by number"):
        pool.async_step_recv(min_get=1)
    pool.async_step_send(acts(3, 4, ids=[0, 2]))
    assert named(pool.async_step_recv(min_get=2)["next"]) == [0, 2]
    assert seen(pool.async_step_recv(env_index=1)["next"]) == [1, 1, 1]


@pytest.mark.parametrize(
    ("env_index", "words"),
    [
        ([0, 3], "0 to 2"),
        (-1, "0 to 2"),
        ([], "at least one"),
        ([1, 1], "twice"),
        ("0", "a number|number or a list"),
        ([0.5], "number or a list"),
        ([None], "number or a list"),
        ([[0, 1]], "number or a list"),
        (torch.tensor([0.0]), "number or a list"),
    ],
)
def test_indices_that_name_no_env(env_index: Any, words: str, open_pool: Any) -> None:
    pool = open_pool("serial")
    pool.reset()
    count = len(env_index) if hasattr(env_index, "__len__") else 1
    with pytest.raises((UsageError, SpecError), match=words):
        pool.async_step_send(acts(*[0] * count), env_index=env_index)
    with pytest.raises(UsageError, match=words):
        pool.async_reset_send(env_index=env_index)
    pool.async_reset_send()
    if words != "twice":
        with pytest.raises(UsageError, match=words):
            pool.async_reset_recv(env_index=env_index)
    assert len(pool.async_reset_recv(min_get=3)) == 3


def test_rows_that_do_not_fit_the_index(open_pool: Any) -> None:
    pool = open_pool("threads")
    pool.reset()
    for td, env_index in [(acts(1), [0, 1]), (acts(1, 2), 0), (act(1), [0])]:
        with pytest.raises(SpecError, match="env_index should be a TensorDict of shape"):
            pool.async_step_send(td, env_index=env_index)
    with pytest.raises(UsageError, match="no 'env_index' entry"):
        pool.async_step_send(acts(1, 2))
    with pytest.raises(SpecError, match="action"):
        pool.async_step_send(TensorDict({}, [1]), env_index=[0])
    with pytest.raises(SpecError, match="action"):
        pool.async_step_send(TensorDict({"action": torch.zeros(1, 2)}, [1]), env_index=[0])
    pool.async_step_send(acts(1, 2, 3, ids=[0, 1, 2]))  # nobody is busy


def test_what_the_caller_has_in_his_tensordict_comes_back(open_pool: Any) -> None:
    pool = open_pool("threads")
    pool.reset()
    sent = acts(1, 2, ids=[2, 1]).set("value", torch.tensor([[0.2], [0.1]])).set("text", "x")
    copied = sent.clone()
    pool.async_step_and_maybe_reset_send(sent)
    sent["value"].fill_(-1)
    stepped, root = pool.async_step_and_maybe_reset_recv(min_get=2)
    assert index_of(stepped) == [1, 2]
    assert stepped["value"].tolist() == root["value"].tolist() == copied["value"].flip(0).tolist()
    assert list(stepped["text"]) == list(root["text"]) == ["x", "x"]
    assert "reward" not in root.keys()  # noqa: SIM118


def test_lazy_stacks_may_be_sent(open_pool: Any) -> None:
    pool = open_pool("processes")
    pool.reset()
    rows = [act(n).set("extra", torch.zeros(n)) for n in (1, 2, 3)]
    pool.async_step_send(lazy_stack(rows), env_index=[2, 0, 1])
    stepped = pool.async_step_recv(min_get=3)
    assert stepped["next", "reward"].flatten().tolist() == [2, 3, 1]
    assert [len(row["extra"]) for row in stepped.unbind(0)] == [2, 3, 1]


# --- how many, and how long ----------------------------------------------------------


@pytest.mark.parametrize("way", APART)
def test_min_get_and_max_get(way: str, open_pool: Any, make_gate: Any) -> None:
    gate = make_gate()
    pool = open_pool(way, 4, env={"gate": gate})
    pool.reset()
    pool.async_step_send(acts(1, WAIT, 3, 4, ids=range(4)))
    gate.wait_reached(timeout=SOON)
    got = pool.async_step_recv(min_get=2, max_get=2)
    assert len(got) == 2
    got = named(got["next"]) + named(pool.async_step_recv(min_get=1)["next"])
    assert sorted(got) == [0, 2, 3]
    with pytest.raises(NoPendingCallError, match="cannot await 2 envs for step: 1 are in flight"):
        pool.async_step_recv(min_get=2)
    with pytest.raises(RecvTimeout, match=r"No answer from envs 1 to step within 0 s"):
        pool.async_step_recv(timeout=0)
    gate.open()
    assert seen(pool.async_step_recv()["next"]) == [[1, 1, 1]]


def test_a_timeout_waits_for_more_than_min_get(open_pool: Any, make_gate: Any) -> None:
    gate = make_gate()
    pool = open_pool("threads", env={"gate": gate})
    pool.reset()
    pool.async_step_send(acts(WAIT, 1, 2, ids=range(3)))
    receiver = Thread(lambda: pool.async_step_recv(min_get=1, timeout=SOON))
    gate.wait_reached(timeout=SOON)
    wait_until_waiting(pool)
    gate.open()
    assert named(receiver.result()["next"]) == [0, 1, 2]
    pool.async_step_send(acts(WAIT, 1, 2, ids=range(3)))
    gate.wait_reached(timeout=SOON)
    assert named(pool.async_step_recv(min_get=1, max_get=2, timeout=SOON)["next"]) == [1, 2]
    gate.open()
    assert len(pool.async_step_recv(timeout=SOON)) == 1


@pytest.mark.parametrize("way", APART)
def test_a_timeout_loses_nothing(way: str, open_pool: Any, make_gate: Any) -> None:
    gate = make_gate()
    pool = open_pool(way, env={"gate": gate})
    pool.reset()
    pool.async_step_send(acts(1, WAIT, 3, ids=range(3)))
    gate.wait_reached(timeout=SOON)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError) as caught:
            pool.async_step_recv(min_get=3, timeout=timeout)
        assert isinstance(caught.value, RecvTimeout)
    with pytest.raises(TimeoutError, match="envs 1 to step"):
        pool.async_step_recv(env_index=1, timeout=0.01)
    gate.open()
    stepped = pool.async_step_recv(min_get=3)
    assert seen(stepped["next"]) == [[i, 1, 1] for i in range(3)]


@pytest.mark.parametrize(
    "numbers",
    [
        {"min_get": 0},
        {"min_get": -1},
        {"min_get": True},
        {"min_get": 1.5},
        {"min_get": 2, "max_get": 1},
        {"max_get": 0},
        {"max_get": 1.5},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"timeout": "1"},
        {"env_index": 0, "timeout": -1},
    ],
    ids=str,
)
def test_numbers_that_make_no_sense(numbers: dict[str, Any], open_pool: Any) -> None:
    pool = open_pool("serial")
    pool.async_reset_send()
    with pytest.raises(ValueError, match=r"min_get|max_get|timeout"):
        pool.async_reset_recv(**numbers)
    assert len(pool.async_reset_recv(min_get=np.int64(3), max_get=np.int64(3))) == 3


def test_min_get_of_the_pool(open_pool: Any) -> None:
    pool = open_pool("threads")
    assert pool.min_get == 1
    pool.min_get = 3
    pool.async_reset_send()
    assert len(pool.async_reset_recv()) == 3


# --- busy ----------------------------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
def test_a_busy_env_is_not_sent_to(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    root = pool.reset()
    pool.async_step_send(acts(1, 2, ids=[0, 2]))
    with pytest.raises(PendingCallError, match=r"to envs \[1, 2\]: envs \[0, 2\] are busy"):
        pool.async_step_send(acts(8, 9, ids=[1, 2]))
    with pytest.raises(RuntimeError, match=r"envs \[0, 2\]"):
        pool.async_reset_send(env_index=0)
    sent = root.update(acts(1, 1, 1))
    keys = set(sent.keys())
    for verb in (pool.step, pool.step_and_maybe_reset, pool.reset, pool.set_seed, pool.map):
        with pytest.raises(PendingCallError, match=r"\[0, 2\]"):
            verb(3 if verb == pool.set_seed else (seen if verb == pool.map else sent))
    assert set(sent.keys()) == keys
    with pytest.raises(NoPendingCallError, match="env 1 is idle; async_step_send comes first"):
        pool.async_step_recv(env_index=1)
    with pytest.raises(NoPendingCallError, match="env 2 is in flight for step"):
        pool.async_reset_recv(env_index=2)
    with pytest.raises(NoPendingCallError, match="0 are in flight"):
        pool.async_reset_recv()
    pool.async_step_send(acts(3, ids=[1]))  # nothing was sent before
    stepped = pool.async_step_recv(min_get=3)
    assert stepped["next", "reward"].flatten().tolist() == [1, 3, 2]
    assert seen(pool.step(acts(1, 1, 1))["next"]) == [[i, 1, 2] for i in range(3)]


# --- errors --------------------------------------------------------------------------


@pytest.mark.parametrize("way", MAIN)
@pytest.mark.parametrize("verb", ["step", "step_and_maybe_reset"])
def test_an_env_that_raises_is_free_again(way: str, verb: str, open_pool: Any) -> None:
    pool = open_pool(way)
    pool.reset()
    send = getattr(pool, f"async_{verb}_send")
    recv = getattr(pool, f"async_{verb}_recv")
    send(acts(1, RAISE, 3, ids=range(3)))
    with pytest.raises(EnvError, match="Env 1 raised during step: ValueError: no step of 1") as e:
        recv(min_get=3)
    assert isinstance(e.value.__cause__, ValueError)
    assert "pool_envs.py" in e.value.worker_traceback
    # The others are still to be had; this one is not.
    with pytest.raises(NoPendingCallError, match="2 are in flight"):
        recv(min_get=3)
    found = recv(min_get=2)
    stepped = found if verb == "step" else found[0]
    assert named(stepped["next"]) == [0, 2]
    send(acts(4, ids=[1]))
    found = recv(env_index=1)
    assert seen((found if verb == "step" else found[0])["next"]) == [1, 1, 1]


@pytest.mark.parametrize("way", MAIN)
def test_a_reset_that_raises(way: str, open_pool: Any) -> None:
    pool = open_pool(way)
    pool.async_reset_send(env_index=[0, 1], options={"fail": True})
    pool.async_reset_send(env_index=[2])
    with pytest.raises(EnvError) as caught:
        pool.async_reset_recv(env_index=[0, 1])
    assert [failure.env_id for failure in caught.value.failures] == [0, 1]
    assert caught.value.during == "reset"
    assert named(pool.async_reset_recv()) == [2]
    pool.async_reset_send(env_index=[0, 1], options={"count": 7})
    assert seen(pool.async_reset_recv(min_get=2)) == [[0, 1, 7], [1, 1, 7]]


@pytest.mark.crash
@pytest.mark.parametrize("way", ["processes", "processes-2"])
def test_results_of_others_outlive_a_worker(way: str, open_pool: Any, make_gate: Any) -> None:
    gate = make_gate()
    pool = open_pool(way, 4, env={"gate": gate})
    pool.reset()
    pool.async_step_send(acts(1, 2, ids=[0, 1]))
    pool.async_step_send(act(WAIT), env_index=3)
    gate.wait_reached(timeout=SOON)
    while pool._engine.rows.status[:2].all() == 0:
        pass
    receiver = Thread(lambda: pool.async_step_recv(env_index=3))
    wait_until_waiting(pool)
    os.kill(pool._engine.worker_pids[-1], signal.SIGKILL)
    assert isinstance(receiver.result(), WorkerDied)
    stepped = pool.async_step_recv(min_get=2)
    assert seen(stepped["next"]) == [[0, 1, 1], [1, 1, 1]]
    with pytest.raises(WorkerDied, match="SIGKILL"):
        pool.async_step_recv(env_index=3)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        pool.async_step_send(acts(1), env_index=[0])
    pool.close()
    assert len(pool.reset()) == 4  # starts anew


@pytest.mark.crash
def test_an_env_that_kills_its_worker(open_pool: Any) -> None:
    pool = open_pool("processes")
    pool.reset()
    pool.async_step_send(acts(1, DIE, 3, ids=range(3)))
    with pytest.raises(WorkerDied, match=r"envs 1\) was killed by SIGKILL during step"):
        pool.async_step_recv(min_get=3)
    assert named(pool.async_step_recv(min_get=2)["next"]) == [0, 2]


# --- several threads -----------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_thread_per_env(way: str, open_pool: Any) -> None:
    """Each sends and receives its own by number."""
    num_envs, num_steps = 6, 25
    pool = open_pool(way, num_envs, env={"length": 7})

    def live(env_id: int) -> list[Any]:
        pool.async_reset_send(env_index=env_id)
        pool.async_reset_recv(env_index=env_id)
        found = []
        for step in range(num_steps):
            pool.async_step_and_maybe_reset_send(act(step), env_index=env_id)
            stepped, root = pool.async_step_and_maybe_reset_recv(env_index=env_id)
            found.append((seen(stepped["next"]), stepped["next", "reward"].item(), seen(root)))
        return found

    threads = [Thread(functools.partial(live, i)) for i in range(num_envs)]
    for i, thread in enumerate(threads):
        for step, (after, reward, root) in enumerate(thread.result()):
            episode, count = divmod(step, 7)
            assert after == [i, 1 + episode, 1 + count]
            assert reward == step
            assert root == ([i, 2 + episode, 0] if count == 6 else after)


@pytest.mark.parametrize("way", APART)
def test_one_sends_and_another_receives(way: str, open_pool: Any, make_gate: Any) -> None:
    """Who waits keeps nobody from sending, and hears of what was sent later."""
    gate = make_gate()
    pool = open_pool(way, env={"gate": gate})
    pool.reset()
    pool.async_step_send(act(WAIT), env_index=0)
    waiting = [Thread(lambda: pool.async_step_recv(env_index=0))]
    gate.wait_reached(timeout=SOON)
    wait_until_waiting(pool)
    for step in range(1, 5):
        pool.async_step_send(acts(1, 2, ids=[1, 2]))
        waiting.append(Thread(lambda: pool.async_step_recv(min_get=2)))
        assert seen(waiting[-1].result()["next"]) == [[1, 1, step], [2, 1, step]]
    gate.open()
    assert seen(waiting[0].result()["next"]) == [0, 1, 1]


def test_receivers_share_what_comes(open_pool: Any) -> None:
    """Nothing is given to two of them, and none of it to nobody."""
    num_envs, rounds = 8, 60
    pool = open_pool("threads", num_envs)
    pool.reset()
    total = num_envs * rounds

    def work() -> list[list[int]]:
        mine: list[list[int]] = []
        while len(taken) < total:
            try:
                stepped = pool.async_step_recv(max_get=3, timeout=0.02)
            except (RecvTimeout, NoPendingCallError):
                continue
            rows = seen(stepped["next"])
            mine += rows
            taken.extend(rows)
            again = [row[0] for row in rows if row[2] < rounds]
            if again:
                pool.async_step_send(acts(*[1] * len(again), ids=again))
        return mine

    taken: list[Any] = []
    pool.async_step_send(acts(*[1] * num_envs, ids=range(num_envs)))
    parts = [thread.result() for thread in [Thread(work) for _ in range(3)]]
    rows = sorted(row for part in parts for row in part)
    assert rows == [[i, 1, n] for i in range(num_envs) for n in range(1, rounds + 1)]


# --- resets --------------------------------------------------------------------------


def test_resets_take_their_arguments(open_pool: Any) -> None:
    pool = open_pool("processes-2")
    pool.async_reset_send(env_index=[2, 1], options={"count": 4})
    assert seen(pool.async_reset_recv(min_get=2)) == [[1, 1, 4], [2, 1, 4]]
    pool.async_reset_send(
        env_index=[2, 1], list_of_kwargs=[{"options": {"count": 20}}, {"options": {"count": 10}}]
    )
    assert seen(pool.async_reset_recv(min_get=2)) == [[1, 2, 10], [2, 2, 20]]
    assert pool.map(lambda env: env.resets) == [0, 2, 2]


def test_a_reset_mask_may_not_leave_out_who_is_sent(open_pool: Any) -> None:
    pool = open_pool("threads")
    td = TensorDict({"_reset": torch.tensor([[True], [False]])}, [2])
    with pytest.raises(UsageError, match="_reset mask"):
        pool.async_reset_send(td, env_index=[0, 1])
    td["_reset"] = torch.ones(2, 1, dtype=torch.bool)
    pool.async_reset_send(td, env_index=[0, 2])
    assert named(pool.async_reset_recv(min_get=2)) == [0, 2]


def test_a_prepared_reset_wakes_who_waits(pools: Any, make_gate: Any) -> None:
    """It is answered from memory: no worker makes a noise for it."""
    gate = make_gate()
    pools.append(AsyncEnvPool(makers_for("threads", 2, gate=gate, length=1), backend="threading"))
    [pool] = pools
    root = pool.reset()
    for _ in range(9):  # the resets after these steps are foreseen at last
        stepped = pool._step(acts(1, 1))
        root = pool._reset(TensorDict({"_reset": stepped["done"]}, [2]))
    pool._step(acts(1, 1))
    assert pool._engine._driver._prepared.all()
    pool.async_reset_send(env_index=[0], options={"wait": True})
    gate.wait_reached(timeout=SOON)
    receiver = Thread(lambda: pool.async_reset_recv(min_get=1))
    wait_until_waiting(pool)
    pool.async_reset_send(env_index=[1])
    assert seen(receiver.result()) == [[1, root["observation"][1, 1].item() + 1, 0]]
    gate.open()
    assert named(pool.async_reset_recv()) == [0]
