"""PARITY 1.5: from construction to the end."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import signal
import warnings
import weakref
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import pytest
import torch
import torchrl
from parity_cases import BOTH, acting, column, diary_of
from parity_envs import (
    PARENT_PID_VARIABLE,
    Counter,
    Markov,
    Rendezvous,
    Stubborn,
    Waiting,
)
from tensordict import TensorDict

from shoal import ParallelEnv, RecvTimeout, SerialEnv, WorkerDied

# Items 73 and 75 are about messages between TorchRL's processes that no user can provoke;
# 76 is about their printing.

CLASSES = [SerialEnv, ParallelEnv]


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update(map(int, (task / "children").read_text().split()))
    return found


@pytest.mark.parametrize("kind", BOTH)
def test_item_059_construction_starts_nothing(kind: str, make: Any) -> None:
    before = children()
    env = make(kind, 2, Counter)
    assert env.is_closed
    assert children() == before


STARTERS = {
    "reset": lambda env: env.reset(),
    "step": lambda env: env.step(acting(env, 1.0)),
    "set_seed": lambda env: env.set_seed(1),
    "state_dict": lambda env: env.state_dict(),
    "load_state_dict": lambda env: env.load_state_dict({}),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("verb", list(STARTERS))
def test_item_060_lazy_start(kind: str, verb: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    STARTERS[verb](env)
    assert not env.is_closed


@pytest.mark.parametrize("kind", BOTH)
def test_item_061_to_063_start_close_start(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.start()
    assert not env.is_closed
    with pytest.raises(RuntimeError, match="started"):
        env.start()
    env.set_seed(5)
    env.reset()
    env.step(acting(env, 1.0))
    env.close()
    assert env.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        env.close()
    env.close(raise_if_closed=False)
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]  # children are new
    assert env.map(lambda child: child.seeds) == [[], []]  # seeds are not applied again
    assert column(env.reset()) == [0, 0]
    env.close()
    assert env.is_closed


@pytest.mark.parametrize("kind", BOTH)
def test_item_064_every_child_is_closed_where_it_lives(
    kind: str, make: Any, tmp_path: Path
) -> None:
    diary = tmp_path / "diary"
    env = make(kind, 3, lambda: Counter(diary=str(diary)))
    before = children()
    diary.unlink()
    env.reset()
    pids = list(env.pid())
    env.close()
    notes = diary_of(diary)
    assert sorted(pid for what, pid in notes if what == "closed") == sorted(pids)
    assert sorted(pid for what, pid in notes if what == "built") == sorted(pids)
    assert (os.getpid() in pids) is (kind == "serial")
    assert children() == before


def test_item_065_a_dead_worker_is_named(make: Any) -> None:
    env = make("parallel", 2, Counter)
    others = children()
    env.reset()
    server = children() - others
    assert server
    pids = list(env.pid())
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"(?s)Worker 1.*SIGKILL") as caught:
        env.step(acting(env, 1.0))
    assert isinstance(caught.value, WorkerDied)
    assert caught.value.exitcode == -signal.SIGKILL
    env.close()
    assert not children() & server
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert column(env.reset()) == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_066_deleting_closes(kind: str, tmp_path: Path) -> None:
    before = children()
    cls, more = (SerialEnv, {}) if kind == "serial" else (ParallelEnv, {"mp_start_method": "fork"})
    env = cls(2, Counter, **more)
    env.reset()
    assert (children() != before) is (kind == "parallel")
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None  # the leak check waits for the workers


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("is_open", [False, True])
def test_item_067_pickling(kind: str, is_open: bool, make: Any) -> None:
    env = make(kind, 2, Counter, create_env_kwargs={"start": 3})
    if is_open:
        env.reset()
    copied = pickle.loads(pickle.dumps(env))
    try:
        assert copied.is_closed
        assert column(copied.reset()) == [3, 3]
        assert column(env.step(acting(env, 1.0))["next"]) == [4, 4]  # the original goes on
    finally:
        copied.close(raise_if_closed=False)


def test_item_067_with_functions_that_only_cloudpickle_knows(make: Any) -> None:
    env = make("serial", 2, lambda: Counter(start=4))
    copied = pickle.loads(cloudpickle.dumps(env))
    assert column(copied.reset()) == [4, 4]
    copied.close()


def test_item_068_serial_children_live_here(make: Any) -> None:
    env = make("serial", 2, Counter)
    env.start()
    living = [weakref.ref(child) for child in env.map(lambda child: child)]
    assert all(isinstance(child(), Counter) for child in living)
    assert env.pid() == [os.getpid()] * 2
    env.close()
    gc.collect()
    assert [child() for child in living] == [None, None]


def test_item_069_the_same_object_twice_is_copied(make: Any) -> None:
    only = Counter()
    env = make("serial", 2, lambda: only)
    env.reset()
    env[0].step(acting(env[0], 1.0))
    assert env.map(lambda child: child.count.item()) == [1, 0]


def test_item_069_or_there_is_a_warning(make: Any) -> None:
    only = Stubborn()
    env = make("serial", 2, lambda: only)
    with pytest.warns(UserWarning, match="same Stubborn"):
        env.reset()
    env[0].step(acting(env[0], 1.0))
    assert env.map(lambda child: child.count.item()) == [1, 1]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("kwargs", [{}, {"start": 1}])
def test_item_070_instances_are_no_constructors(cls: Any, kwargs: Any) -> None:
    with pytest.raises(
        (RuntimeError, NotImplementedError, TypeError), match=r"constructor|function"
    ):
        cls(2, Counter(), create_env_kwargs=kwargs)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_item_071_lambdas_and_closures_travel(method: str, make: Any) -> None:
    name = "CartPole-v1"
    seen = []

    def maker() -> Any:
        seen.append(name)
        return gymnasium.make(name)

    env = make("parallel", 2, maker, mp_start_method=method)
    assert env.reset()["observation"].shape == (2, 4)
    several = [lambda: gymnasium.make(name), lambda: gymnasium.make(name)]
    env = make("parallel", 2, several, mp_start_method=method)
    assert env.reset()["observation"].shape == (2, 4)


def test_item_071_a_closure_over_a_torchrl_env(make: Any) -> None:
    class Local(Counter):
        pass

    env = make("parallel", 2, lambda: Local(start=6), mp_start_method="forkserver")
    assert column(env.reset()) == [6, 6]


def test_item_072_workers_start_together(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PARENT_PID_VARIABLE, str(os.getpid()))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    kwargs = [{"fifo": str(fifo), "is_first": first} for first in (True, False)]
    env = make("parallel", 2, Rendezvous, create_env_kwargs=kwargs, timeout=60)
    assert column(env.reset()) == [0, 0]


def test_item_074_a_worker_that_ends_in_a_call_is_named(make: Any) -> None:
    env = make("parallel", 2, Counter)
    env.reset()
    with pytest.raises(RuntimeError, match=r"(?s)Worker 0.*exit code 7.*step"):
        env.step(acting(env, -2.0, 1.0))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_item_077_workers_know_nothing_of_mpi(
    method: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "KEPT"):
        monkeypatch.setenv(name, "0")

    def variables(child: Any) -> list[str]:
        return [name for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "KEPT") if name in os.environ]

    env = make("parallel", 2, lambda: gymnasium.make("CartPole-v1"), mp_start_method=method)
    env.start()
    assert env.map(variables) == [["KEPT"]] * 2
    assert os.environ["PMI_RANK"] == "0"


@pytest.mark.parametrize("shown", [False, True])
def test_item_078_warnings_of_workers(
    shown: bool, make: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Warner(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            warnings.warn("a step was done", UserWarning, stacklevel=1)
            return super().step(action)

    monkeypatch.setattr(torchrl, "filter_warnings_subprocess", not shown)
    env = make(
        "parallel", 2, lambda: Warner(gymnasium.make("CartPole-v1")), mp_start_method="forkserver"
    )
    env.rollout(2)
    env.close()
    assert ("a step was done" in capfd.readouterr().err) is shown


def test_item_079_parallel_envs_have_no_gradients(make: Any) -> None:
    env = make("parallel", 2, Markov)
    env.reset()
    step = TensorDict({"action": torch.ones(2, 2, requires_grad=True)}, [2])
    stepped = env.step(step)
    assert not stepped["next", "observation"].requires_grad
    assert column(stepped["next"]) == [2.0, 2.0]


def test_item_079_serial_envs_have_them_on_request(make: Any) -> None:
    env = make("serial", 2, Markov, share_individual_td=True)
    root = env.reset()
    action = torch.full((2, 2), 3.0, requires_grad=True)
    root = env.step_mdp(env.step(root.update({"action": action})))
    stepped = env.step(root.update({"action": 2 * action}))
    stepped["next", "reward"].sum().backward()
    assert (action.grad == 3.0).all()


def test_item_079_or_they_say_how(make: Any) -> None:
    env = make("serial", 2, Markov)
    env.reset()
    step = TensorDict({"action": torch.ones(2, 2, requires_grad=True)}, [2])
    with pytest.raises(RuntimeError, match="share_individual_td"):
        env.step(step.copy())
    with torch.no_grad():
        env.step(step.copy())


def test_item_080_an_answer_that_does_not_come(make: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    maker = functools.partial(Waiting, fifo=str(fifo))
    env = make("parallel", 2, maker, timeout=0.2)
    env.reset()
    action = acting(env, 1.0, 5.0)
    with pytest.raises(RecvTimeout, match="env") as caught:
        env.step(action.copy())
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.waiting_for == (1,)
    os.close(os.open(fifo, os.O_WRONLY))  # waits until the child reads: it may go on now
    for _ in range(100):
        with contextlib.suppress(RecvTimeout):
            stepped = env.step(action.copy())
            break
    assert column(stepped["next"]) == [1, 1]


def nested(outer: str, inner: str) -> Any:
    kinds = {
        "serial": SerialEnv,
        "parallel": functools.partial(ParallelEnv, mp_start_method="fork", num_processes=2),
    }
    made = kinds[inner]
    return kinds[outer](
        2,
        made,
        create_env_kwargs={"num_workers": 2, "create_env_fn": functools.partial(Counter, length=2)},
    )


@pytest.mark.parametrize("inner", BOTH)
@pytest.mark.parametrize("outer", BOTH)
def test_item_081_nesting(outer: str, inner: str) -> None:
    env = nested(outer, inner)
    try:
        assert env.batch_size == (2, 2)
        root = env.reset()
        assert root.batch_size == (2, 2)
        action = env.full_action_spec.one()
        stepped, root = env.step_and_maybe_reset(root.update(action))
        assert (stepped["next", "observation"] == 1).all()
        stepped, root = env.step_and_maybe_reset(root.update(action))
        assert (stepped["next", "observation"] == 2).all()
        assert (stepped["next", "done"]).all()
        assert (root["observation"] == 0).all()
        assert env.rollout(5, break_when_any_done=False).batch_size == (2, 2, 5)
    finally:
        env.close()
