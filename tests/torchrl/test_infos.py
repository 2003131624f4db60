"""Entries of info dicts as observations, as TorchRL's readers give them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from batched_cases import WAYS, Log, assert_same_logs, open_env, play, play_reference
from scripted_envs import InfoEnv, PlainInfoEnv
from torchrl.data import Composite, Unbounded
from torchrl.envs import GymWrapper, RewardSum, TransformedEnv, check_env_specs
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl.envs.gym_like import BaseInfoDictReader, default_info_dict_reader

from shoal.errors import UsageError

N = 3
SPEC = {
    "count": Unbounded((), dtype=torch.int64),
    "vector": Unbounded((3,), dtype=torch.float32),
}


class Doubling(BaseInfoDictReader):
    """Has a way of its own, so it has to see the whole dict."""

    def __call__(self, info_dict: dict[str, Any], tensordict: Any) -> Any:
        tensordict.set("twice", torch.tensor([2.0 * int(info_dict["count"])]))
        return tensordict

    @property
    def info_spec(self) -> Any:
        return {"twice": Unbounded((1,))}


READERS: dict[str, Any] = {
    "names and specs": lambda: default_info_dict_reader(["count", "vector"], spec=SPEC),
    "a name": lambda: default_info_dict_reader(["count"]),
    "one of them": lambda: default_info_dict_reader(["vector"], spec=[SPEC["vector"]]),
    "its own": Doubling,
}


def reference_env(reader: Any) -> Any:
    def make() -> Any:
        return GymWrapper(InfoEnv(), categorical_action_encoding=True).set_info_dict_reader(
            reader()
        )

    return TorchRLSerialEnv(N, functools.partial(make))


def script(env: Any, log: Log) -> None:
    log.add("spec", set(env.observation_spec.keys()))
    root = log.add("reset", env.reset())
    for _ in range(7):
        td, root = env.step_and_maybe_reset(env.rand_action(root))
        log.add("td", td)
        log.add("root", root)
    log.add("rollout", env.rollout(9, break_when_any_done=False))
    log.add("any", env.rollout(9))
    root = env.reset().set("_reset", torch.tensor([[True], [False], [True]]))
    log.add("mask", env.reset(root))
    log.add("transformed", TransformedEnv(env, RewardSum()).rollout(9, break_when_any_done=False))


@pytest.fixture(scope="module")
def reference(request: Any) -> tuple[Any, Log]:
    reader = READERS[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return reader, play_reference(reference_env(reader), script)


@pytest.mark.parametrize("reference", READERS, indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_as_in_torchrl(way: str, reference: Any) -> None:
    reader, wanted = reference
    env = open_env(way, N, InfoEnv)
    assert env.set_info_dict_reader(reader()) is env
    assert_same_logs(play(env, script), wanted)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("name", READERS)
def test_specs_hold(way: str, name: str) -> None:
    with open_env(way, N, InfoEnv, info_dict_reader=READERS[name]()) as env:
        check_env_specs(env)
        with open_env(way, N, InfoEnv, info_dict_reader=[READERS[name]()]) as listed:
            assert listed.observation_spec == env.observation_spec


def test_pythons_own_numbers_are_taken_too() -> None:
    with open_env("serial", N, PlainInfoEnv) as env:
        env.set_info_dict_reader(READERS["names and specs"]())
        td = env.rand_step(env.reset())
        assert td["next", "count"].tolist() == [1] * N


@pytest.mark.parametrize("way", WAYS)
def test_there_are_no_infos_unless_asked_for(way: str) -> None:
    with open_env(way, N, InfoEnv) as env:
        assert set(env.reset().keys()) == {"observation", "done", "terminated", "truncated"}


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_a_reader_may_learn_what_there_is(way: str) -> None:
    env = open_env(way, N, functools.partial(InfoEnv, length=10**6))
    with env.set_info_dict_reader() as env:
        spec = env.observation_spec
        # What is no number is left out.
        assert set(spec.keys()) == {"observation", "count", "vector", "flag", "only in steps"}
        root = env.reset()
        for t in range(1, 4):
            td, root = env.step_and_maybe_reset(env.rand_action(root))
            for data in (td["next"], root):
                assert data["count"].reshape(N).tolist() == [t] * N
                assert data["vector"].shape == (N, 3)
                assert (data["vector"] == t + 0.5).all()
                assert data["flag"].reshape(N).tolist() == [t % 2 == 0] * N
        for key in ("count", "vector", "flag"):
            assert root[key].dtype == spec[key].dtype
            assert root[key].shape == spec[key].shape
        check_env_specs(env)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_entries_that_come_and_go_are_zero_where_they_are_missing(way: str) -> None:
    reader = default_info_dict_reader(
        ["only in steps"], spec={"only in steps": Unbounded((), dtype=torch.float64)}
    )
    with open_env(way, N, InfoEnv, info_dict_reader=reader) as env:
        root = env.reset()
        assert root["only in steps"].tolist() == [0.0] * N
        td, root = env.step_and_maybe_reset(env.rand_action(root))
        assert td["next", "only in steps"].tolist() == [1.0] * N
        assert root["only in steps"].tolist() == [1.0] * N


def test_readers_come_before_the_start() -> None:
    with open_env("serial", N, InfoEnv) as env:
        env.reset()
        with pytest.raises(RuntimeError, match="before the env starts"):
            env.set_info_dict_reader()
        env.close()
        env.set_info_dict_reader(READERS["names and specs"]())
        assert env.reset()["count"].tolist() == [0] * N


def test_a_reader_without_specs_is_refused() -> None:
    with pytest.raises(UsageError, match="has no info_spec"):
        open_env("serial", N, InfoEnv, info_dict_reader=lambda info, td: td)


def test_specs_of_infos_come_under_a_transform() -> None:
    base = open_env("serial", N, InfoEnv)
    env = TransformedEnv(base, RewardSum())
    env.set_info_dict_reader(READERS["names and specs"]())
    assert isinstance(env.observation_spec, Composite)
    assert "count" in base.observation_spec.keys()  # noqa: SIM118
    base.close(raise_if_closed=False)
