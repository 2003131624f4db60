"""PARITY 1.14: torchrl's EnvCreator under the batched envs."""

from __future__ import annotations

import functools
import multiprocessing
from typing import TYPE_CHECKING, Any

import pytest
import torch
from parity_cases import BOTH, acting, column, diary_of
from parity_envs import Counter, Sharing
from tensordict import TensorDict
from torchrl.envs import (
    EnvCreator,
    TrajCounter,
    TransformedEnv,
    VecNorm,
    env_creator,
    get_env_metadata,
)
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:VecNorm wasn't initialized")

METHODS = ["serial", "fork", "forkserver"]


@pytest.fixture(scope="module", autouse=True)
def _arena() -> Any:
    """Keeps multiprocessing's arena for shared numbers, which it never gives back."""
    return multiprocessing.get_context("fork").Value("i", 0)


def open_by(make: Any, method: str, num_workers: int, maker: Any, **options: Any) -> Any:
    if method == "serial":
        return make("serial", num_workers, maker, **options)
    return make("parallel", num_workers, maker, mp_start_method=method, **options)


@pytest.mark.parametrize("kind", BOTH)
def test_item_134_kwargs_of_the_creator(kind: str, make: Any) -> None:
    creator = EnvCreator(Counter, {"start": 5}, start=1, length=9)
    assert creator.create_env_kwargs == {"start": 5, "length": 9}
    env = make(kind, 2, creator)
    assert column(env.reset()) == [5, 5]
    assert list(env.length) == [9, 9]


@pytest.mark.parametrize("kind", BOTH)
def test_item_134_closures(kind: str, make: Any) -> None:
    start = 7
    env = make(kind, 2, EnvCreator(lambda: Counter(start=start)))
    assert column(env.reset()) == [7, 7]


def test_item_135_the_shadow_env(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    creator = EnvCreator(lambda: Counter(diary=str(diary)))
    assert [what for what, _ in diary_of(diary)] == ["built", "closed"]
    assert creator.env_type is Counter
    assert creator.meta_data.batch_size == ()


@pytest.mark.parametrize("method", METHODS)
def test_item_135_numbers_that_all_processes_share(method: str, make: Any) -> None:
    creator = EnvCreator(lambda: TransformedEnv(Counter(length=2), TrajCounter()))
    env = open_by(make, method, 3, creator)
    counts = torch.cat(
        [
            env.rollout(4, break_when_any_done=False)["next", "traj_count"].flatten()
            for _ in range(2)
        ]
    )
    assert len(set(counts.tolist())) == 12  # no trajectory of three envs has another's number


@pytest.mark.parametrize("method", METHODS)
def test_item_136_statistics_that_all_processes_share(method: str, make: Any) -> None:
    def maker() -> Any:
        return TransformedEnv(ContinuousActionVecMockEnv(), VecNorm(in_keys=["observation"]))

    creator = EnvCreator(maker)
    env = open_by(make, method, 2, creator)
    env.rollout(5)
    first, second = (state["_extra_state"] for state in env.state_dict().values())
    for key in first:
        assert torch.equal(first[key], second[key])
    key = next(key for key in first if key.endswith("count"))
    shared = creator.state_dict()["_extra_state"]
    assert torch.equal(torch.as_tensor(shared[key]), first[key])


@pytest.mark.parametrize("kind", BOTH)
def test_item_137_the_creators_kwargs_win(kind: str, make: Any) -> None:
    creator = EnvCreator(Counter, start=5)
    assert creator(start=1, length=4).start == 5
    assert creator(length=4).length == 4
    env = make(kind, 2, creator)
    env.update_kwargs({"start": 1, "length": 4})
    assert column(env.reset()) == [5, 5]
    assert list(env.length) == [4, 4]


def test_item_137_and_138_before_initialisation() -> None:
    creator = EnvCreator.__new__(EnvCreator)
    creator.initialized, creator._meta_data = False, None
    with pytest.raises(RuntimeError, match="initialized"):
        creator()
    with pytest.raises(RuntimeError, match="meta_data"):
        creator.meta_data  # noqa: B018
    creator.meta_data = get_env_metadata(Counter)
    assert creator.meta_data.batch_size == ()


@pytest.mark.parametrize("kind", BOTH)
def test_item_138_metadata_of_the_creator_count(kind: str, make: Any) -> None:
    creator = EnvCreator(Counter)
    creator.meta_data = get_env_metadata(functools.partial(Counter, size=3))
    assert make(kind, 2, creator).observation_spec["observation"].shape == (2, 3)


@pytest.mark.parametrize("method", METHODS)
def test_item_139_loading_reaches_all_processes(method: str, make: Any) -> None:
    creator = EnvCreator(Sharing)
    env = open_by(make, method, 2, creator)
    env.reset()
    assert env.map(lambda child: child.shared["number"].item()) == [0.0, 0.0]
    creator.load_state_dict({"_extra_state": TensorDict({"number": torch.full((1,), 77.0)})})
    assert creator.state_dict()["_extra_state"]["number"].item() == 77.0
    assert env.map(lambda child: child.shared["number"].item()) == [77.0, 77.0]


@pytest.mark.parametrize("method", METHODS)
def test_item_136_what_a_child_writes_is_seen_by_all(method: str, make: Any) -> None:
    creator = EnvCreator(Sharing)
    env = open_by(make, method, 2, creator)
    env.reset()
    env.map(lambda child: child.shared["number"].add_(1.0))
    assert env.map(lambda child: child.shared["number"].item()) == [2.0, 2.0]
    assert creator.state_dict()["_extra_state"]["number"].item() == 2.0


@pytest.mark.parametrize("kind", BOTH)
def test_item_140_env_creator(kind: str, make: Any) -> None:
    creator = env_creator(Counter)
    assert isinstance(creator, EnvCreator)
    env = make(kind, 2, creator)
    env.reset()
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_141_kwargs_that_contradict_the_creators(kind: str, make: Any) -> None:
    creator = EnvCreator(Counter, start=5)
    with pytest.raises(RuntimeError, match="kwargs"):
        make(kind, 2, creator, create_env_kwargs={"start": 1})
    assert column(make(kind, 2, creator, create_env_kwargs={"start": 5}).reset()) == [5, 5]


def test_item_141_metadata_of_batched_envs(make: Any) -> None:
    for kind in BOTH:
        env = make(kind, 2, Counter)
        assert get_env_metadata(env).batch_size == (2,)
        assert env.is_closed  # reading it has started nothing
        found = get_env_metadata(type(env), {"num_workers": 3, "create_env_fn": Counter})
        assert found.batch_size == (3,)
