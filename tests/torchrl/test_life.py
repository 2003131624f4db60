"""Opening, closing, copying and breaking the batched envs."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import re
import signal
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from batched_cases import WAYS, assert_same, open_env
from scripted_envs import CountingEnv, FaultyEnv, SlowEnv, SuicidalEnv, counting_from_a_table
from tensordict import TensorDict
from torchrl.envs import EnvBase, RewardSum, TransformedEnv, check_env_specs
from torchrl.envs import ParallelEnv as TorchRLParallelEnv
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from shoal.errors import (
    BrokenError,
    EnvError,
    PendingCallError,
    RecvTimeout,
    StartError,
    UsageError,
    WorkerDied,
)
from shoal.torchrl import BatchedEnv, ParallelEnv, SerialEnv

ONE = torch.ones(3, dtype=torch.int64)
LONG = functools.partial(CountingEnv, length=10**6)


def values(td: Any) -> list[int]:
    return td["observation"].squeeze(-1).tolist()  # type: ignore[no-any-return]


def acting(action: Any) -> TensorDict:
    return TensorDict({"action": torch.as_tensor(action)}, [len(action)])


# --- open and closed -----------------------------------------------------------------


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_from_closed_to_open_and_back(way: str) -> None:
    env = open_env(way, 3, LONG)
    assert env.is_closed
    with pytest.raises(RuntimeError, match="closed already"):
        env.close()
    env.close(raise_if_closed=False)
    env.start()
    assert not env.is_closed
    with pytest.raises(RuntimeError, match="started already"):
        env.start()
    assert values(env.reset()) == [100] * 3
    env.close()
    assert env.is_closed
    with pytest.raises(RuntimeError, match="closed already"):
        env.close()
    # New envs, which know nothing of the old ones.
    assert values(env.reset()) == [100] * 3
    assert not env.is_closed
    env.close()
    assert env.set_seed(3) is not None
    assert not env.is_closed
    env.close(raise_if_closed=False)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_context_manager(way: str) -> None:
    with open_env(way, 3, LONG) as env:
        assert isinstance(env, EnvBase)
        env.reset()
    assert env.is_closed
    with pytest.raises(ZeroDivisionError), env:
        values(env.reset())[1 // 0]
    assert env.is_closed


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_a_forgotten_env_leaves_nothing_behind(way: str) -> None:
    env = open_env(way, 3, LONG)
    env.reset()
    del env  # the check after each test sees what stays


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_closing_through_a_transform(way: str) -> None:
    base = open_env(way, 3, LONG)
    env = TransformedEnv(base, RewardSum())
    assert base.is_closed
    env.rollout(3)
    assert not base.is_closed
    env.close()
    assert base.is_closed
    assert env.is_closed
    env.rollout(3)
    base.is_closed = True
    assert base.is_closed
    base.is_closed = True


def test_envs_are_closed_in_the_end() -> None:
    kept: list[CountingEnv] = []

    def make() -> CountingEnv:
        kept.append(CountingEnv())
        return kept[-1]

    env = SerialEnv(2, make)
    assert [one.is_closed for one in kept] == [True]  # it told the spaces
    env.reset()
    env.close()
    assert [one.is_closed for one in kept] == [True] * 3


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_repr_and_names(way: str) -> None:
    env = open_env(way, 3, "CartPole-v1")
    assert type(env).__name__ in repr(env)
    assert "CartPole-v1" in repr(env)
    assert "batch_size=torch.Size([3])" in repr(env)
    assert "CountingEnv" in repr(open_env(way, 3, LONG))
    assert env.num_workers == 3
    assert env.batch_size == (3,)
    assert env.device is None
    assert not env.is_spec_locked or env.is_closed


def test_what_collectors_ask_for() -> None:
    serial, parallel = SerialEnv(2, LONG), ParallelEnv(2, LONG)
    assert isinstance(serial, BatchedEnvBase)
    assert isinstance(serial, TorchRLSerialEnv)
    assert not isinstance(serial, TorchRLParallelEnv)
    assert isinstance(parallel, BatchedEnvBase)
    assert isinstance(parallel, TorchRLParallelEnv)
    assert not isinstance(parallel, TorchRLSerialEnv)
    assert isinstance(parallel, BatchedEnv)
    assert issubclass(ParallelEnv, BatchedEnv)
    with pytest.raises(NotImplementedError, match="EnvBase"):
        serial(TensorDict({}, [2]))


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("state", ["never started", "started", "closed"])
@pytest.mark.parametrize("how", ["pickle", "cloudpickle", "deepcopy"])
def test_copies_are_closed_and_work(way: str, state: str, how: str) -> None:
    env = open_env(way, 3, LONG, create_env_kwargs=[{"start": 100 * i} for i in range(3)])
    if state != "never started":
        env.reset()
    if state == "closed":
        env.close()
    if how == "deepcopy":
        copied = copy.deepcopy(env)
    else:
        module: Any = pickle if how == "pickle" else cloudpickle
        copied = pickle.loads(module.dumps(env))
    assert env.is_closed == (state != "started")
    assert copied.is_closed
    with copied:
        assert values(copied.reset()) == [100, 200, 300]
        assert values(copied.rand_step(copied.reset())["next"]) == [201, 301, 401]
    if state == "started":
        assert values(env.reset()) == [200, 300, 400]
    env.close(raise_if_closed=False)


# --- devices -------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_on_the_cpu_by_name(way: str) -> None:
    env = open_env(way, 3, "CartPole-v1", device="cpu")
    cpu = torch.device("cpu")
    assert env.device == cpu
    with env:
        for spec in (env.observation_spec, env.full_action_spec, env.full_done_spec):
            assert spec.device == cpu
        assert env.reward_spec.device == cpu
        assert env.action_spec.device == cpu
        td = env.reset()
        assert td.device == cpu
        td, root = env.step_and_maybe_reset(env.rand_action(td))
        assert td["next"].device == cpu
        assert root.device == cpu
        assert env.rollout(3, break_when_any_done=False).device == cpu
        assert env.rand_step(root)["next"].device == cpu
        check_env_specs(env)
    without = open_env(way, 3, "CartPole-v1")
    with without, env:
        for one in (without, env):
            one.set_seed(0)
        torch.manual_seed(0)
        left = without.rollout(30, break_when_any_done=False)
        torch.manual_seed(0)
        right = env.rollout(30, break_when_any_done=False)
        assert_same(left.to("cpu"), right)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_to_another_device(way: str) -> None:
    with open_env(way, 3, "CartPole-v1") as env:
        env.reset()
        assert env.to("cpu") is env
        assert env.device == torch.device("cpu")
        assert env.to("cpu") is env
        assert env.reset().device == torch.device("cpu")
        check_env_specs(env)
        env.close()
        assert env.reset().device == torch.device("cpu")


# --- makers and their arguments ------------------------------------------------------


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_create_env_kwargs(way: str) -> None:
    shared = {"start": 100}
    env = open_env(way, 3, LONG, create_env_kwargs=shared)
    shared["start"] = 900
    env.create_env_kwargs[0]["start"] = 300
    assert env.create_env_kwargs == [{"start": 300}, {"start": 100}, {"start": 100}]
    with env:
        assert values(env.reset()) == [400, 200, 200]
        env.update_kwargs([{"start": 0}, {"start": 500}, {}])
        assert values(env.reset()) == [500, 300, 300]  # only at the next start
        env.close()
        assert values(env.reset()) == [100, 600, 200]
        env.close()
        env.update_kwargs({"start": 700})
        assert values(env.reset()) == [800] * 3
    with pytest.raises(RuntimeError, match="num_workers mismatch: 2 dicts for 3"):
        env.update_kwargs([{}, {}])
    with pytest.raises(RuntimeError, match="num_workers mismatch: 2 dicts for 3"):
        open_env(way, 3, LONG, create_env_kwargs=[{}, {}])


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_lists_of_makers(way: str) -> None:
    env = open_env(way, 3, [LONG] * 3)
    assert env._single_task
    assert env.create_env_fn == [LONG] * 3
    makers = [functools.partial(CountingEnv, start=100 * i) for i in range(3)]
    with open_env(way, 3, makers) as env:
        assert not env._single_task
        assert values(env.reset()) == [100, 200, 300]
    with pytest.raises(RuntimeError, match="num_workers mismatch: 2 functions for 3"):
        open_env(way, 3, makers[:2])
    with open_env(way, 2, ["CartPole-v1", functools.partial(gymnasium.make, "CartPole-v1")]) as env:
        assert env.rollout(3).batch_size == (2, 3)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_lambdas_closures_and_specs(way: str) -> None:
    start = 300
    with open_env(way, 2, lambda: CountingEnv(start)) as env:
        assert values(env.reset()) == [400, 400]
    with open_env(way, 2, lambda start: CountingEnv(start), create_env_kwargs={"start": 0}) as env:
        assert values(env.reset()) == [100, 100]
    with open_env(way, 2, gymnasium.spec("CartPole-v1")) as env:
        assert env.reset()["observation"].shape == (2, 4)
    with open_env(way, num_envs=1, maker="CartPole-v1", auto_wrap_envs=False) as env:
        assert env.reset()["observation"].shape == (1, 4)


def test_a_parallel_env_of_one_may_be_serial() -> None:
    options: dict[str, Any] = {"serial_for_single": True, "mp_start_method": "spawn"}
    single = ParallelEnv(1, LONG, num_processes=1, **options)
    assert type(single) is SerialEnv
    assert single.batch_size == (1,)
    assert type(ParallelEnv(num_workers=1, create_env_fn=LONG, **options)) is SerialEnv
    double = ParallelEnv(2, LONG, **options)
    assert type(double) is ParallelEnv
    assert double._mp_start_method == "spawn"
    assert type(SerialEnv(2, LONG, serial_for_single=True)) is SerialEnv


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"pin_memory": True}, ValueError, "pin_memory"),
        ({"allow_step_when_done": True}, ValueError, "allow_step_when_done"),
        ({"memmap": True, "shared_memory": True}, RuntimeError, "mutually exclusive"),
        ({"memmap": True}, RuntimeError, "mutually exclusive"),
        ({"nonsense": 1}, TypeError, "nonsense"),
    ],
)
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_options_that_are_refused(kind: Any, options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        kind(2, "CartPole-v1", **options)


def test_serial_envs_have_no_start_method() -> None:
    with pytest.raises(TypeError, match="mp_start_method"):
        SerialEnv(2, "CartPole-v1", mp_start_method="spawn")
    SerialEnv(2, "CartPole-v1", mp_start_method=None)


def test_options_that_change_nothing() -> None:
    env = ParallelEnv(
        2,
        "CartPole-v1",
        share_individual_td=True,
        policy_proof=object(),
        num_threads=1,
        num_sub_threads=2,
        non_blocking=True,
        use_buffers=False,
        consolidate=False,
        daemon=True,
        shared_memory=True,
    )
    assert env.share_individual_td is True
    with env:
        assert type(env.reset()) is TensorDict


@pytest.mark.parametrize("num_workers", [0, -1, 1.5, "2", True, None])
def test_numbers_of_workers_that_are_refused(num_workers: Any) -> None:
    with pytest.raises(UsageError, match="num_workers is an integer >= 1"):
        SerialEnv(num_workers, "CartPole-v1")


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
@pytest.mark.parametrize(
    ("maker", "error", "words"),
    [
        (gymnasium.make("CartPole-v1"), TypeError, "pass a function"),
        (functools.partial(gymnasium.make_vec, "CartPole-v1", 2), TypeError, "vector"),
        (lambda: None, TypeError, "gymnasium.Env"),
        ("NoSuchEnv-v0", gymnasium.error.NameNotFound, "NoSuchEnv"),
        (3, TypeError, "create_env_fn is"),
        (functools.partial(FaultyEnv, "build"), ValueError, "cannot be built"),
    ],
    ids=["env", "vector env", "nothing", "unknown id", "number", "raises"],
)
def test_makers_that_make_no_env(kind: Any, maker: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        kind(2, maker)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_an_env_that_cannot_be_built_at_the_start(way: str) -> None:
    env = open_env(way, 2, FaultyEnv, create_env_kwargs=[{}, {"fails_in": "build"}])
    with pytest.raises(StartError, match="cannot be built") as caught:
        env.reset()
    assert caught.value.env_id == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert env.is_closed
    env.update_kwargs({"fails_in": ""})
    with env:
        assert values(env.reset()) == [100, 100]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_start_methods(method: str) -> None:
    start = 300
    with (
        ParallelEnv(2, lambda: CountingEnv(start), mp_start_method=method, num_processes=1) as env,
        pytest.MonkeyPatch.context() as patch,
    ):
        if method == "fork":
            # Python warns of threads in the parent, which are torch's.
            patch.setattr("warnings.filters", [])
        assert values(env.reset()) == [400, 400]
        assert values(env.rand_step(env.reset())["next"]) == [501, 501]


def test_memmap() -> None:
    with ParallelEnv(2, LONG, memmap=True, shared_memory=False) as env:
        td = env.rand_step(env.reset())
        assert values(td["next"]) == [101, 101]
        assert not td.is_memmap()
        check_env_specs(env)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_spaces_may_come_from_a_worker(way: str) -> None:
    with open_env(way, 2, "CartPole-v1", metadata_from_workers=True) as env:
        assert not env.is_closed
        assert "CartPole-v1" in repr(env)
        check_env_specs(env)
    with open_env(way, 2, LONG, metadata_from_workers=True) as env:
        assert values(env.reset()) == [100, 100]
        env.close()
        assert values(env.reset()) == [100, 100]
        assert "CountingEnv" in repr(env)


def test_truncated_keys_are_there() -> None:
    env = SerialEnv(2, LONG)
    with pytest.raises(RuntimeError, match="add_truncated_keys on them"):
        env.add_truncated_keys()
    assert set(env.done_keys) == {"done", "terminated", "truncated"}


# --- when something goes wrong -------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["step", "step_and_maybe_reset", "_step"])
def test_an_env_that_raises_in_a_step(way: str, name: str) -> None:
    with open_env(way, 3, FaultyEnv) as env:
        env.reset()
        with pytest.raises(EnvError, match="no step today") as caught:
            getattr(env, name)(acting([1, 9, 1]))
        assert caught.value.env_id == 1
        assert caught.value.during == "step"
        assert isinstance(caught.value.__cause__, ValueError)
        # The others have stepped. All can go on, also without a reset.
        assert values(env._step(acting([1, 1, 1]))) == [102, 101, 102]
        assert values(env.reset()) == [200, 200, 200]


@pytest.mark.parametrize("way", WAYS)
def test_an_env_that_raises_in_a_reset(way: str) -> None:
    with open_env(way, 3, FaultyEnv) as env:
        env.reset()
        listed: list[dict[str, Any]] = [{}, {}, {"options": {"fail": True}}]
        with pytest.raises(EnvError, match="no reset today") as caught:
            env.reset(list_of_kwargs=listed)
        assert caught.value.env_id == 2
        assert caught.value.during == "reset"
        assert values(env.reset()) == [300, 300, 200]


def test_an_env_that_raises_in_a_rollout() -> None:
    with ParallelEnv(3, FaultyEnv, num_processes=2) as env:
        actions = [torch.tensor([1, 1, 1]), torch.tensor([1, 9, 9]), torch.tensor([1, 1, 1])]
        for keywords in ({"actions": actions}, {"policy": _following(actions)}):
            with pytest.raises(EnvError, match="no step today") as caught:
                env.rollout(3, break_when_any_done=False, **keywords)
            assert [failure.env_id for failure in caught.value.failures] == [1, 2]
        assert env.rollout(3, _following([ONE] * 3), break_when_any_done=False).shape == (3, 3)


def _following(actions: Any) -> Any:
    left = iter(actions)
    return lambda td: td.set("action", next(left))


@pytest.mark.crash
def test_a_worker_that_dies() -> None:
    env = ParallelEnv(3, SuicidalEnv, num_processes=2)
    env.reset()
    with pytest.raises(WorkerDied, match="SIGKILL"):
        env.step(acting([0, 0, 1]))
    for call in (env.reset, lambda: env.step(acting([0, 0, 0])), lambda: env.set_seed(1)):
        with pytest.raises(BrokenError):
            call()
    assert not env.is_closed
    env.close()
    assert env.is_closed
    with env:
        assert values(env.reset()) == [100] * 3


@pytest.mark.crash
def test_a_worker_that_dies_while_nothing_happens() -> None:
    with ParallelEnv(3, LONG, num_processes=2) as env:
        env.reset()
        os.kill(env._engine.worker_pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            env.rollout(100, break_when_any_done=False)


@pytest.mark.parametrize("name", ["step", "step_and_maybe_reset"])
def test_after_a_timeout_the_same_call_gets_the_answer(name: str, tmp_path: Any) -> None:
    path = tmp_path / "go"
    env = ParallelEnv(
        2, SlowEnv, create_env_kwargs={"path": str(path)}, num_processes=2, timeout=0.2
    )
    with env:
        td = env.reset().set("action", torch.tensor([0, 1]))
        with pytest.raises(RecvTimeout, match="envs 1 to step"):
            getattr(env, name)(td)
        with pytest.raises(TimeoutError):
            getattr(env, name)(td)
        assert "next" not in td.keys()  # noqa: SIM118
        with pytest.raises(PendingCallError):
            env._step(acting([0, 0]))
        path.touch()
        result = _until_answered(lambda: getattr(env, name)(td))
        result = result[0] if isinstance(result, tuple) else result
        assert values(result["next"]) == [101, 101]
        assert values(env._step(acting([0, 0]))) == [102, 102]


def _until_answered(call: Any) -> Any:
    while True:
        try:
            return call()
        except RecvTimeout:
            continue


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_kwargs_may_hold_arrays(way: str) -> None:
    kwargs = {"table": np.array([100, 200])}
    with open_env(way, 3, counting_from_a_table, create_env_kwargs=kwargs) as env:
        assert values(env.reset()) == [400] * 3
