"""PARITY 1.2: the arguments of the constructors."""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cases import BOTH, acting, column
from parity_envs import Counter
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import TensorSpec
from torchrl.envs import EnvCreator
from torchrl.testing.mocking_classes import (
    AutoResettingCountingEnv,
    CountingEnv,
    EnvWithDynamicSpec,
)

import shoal
from shoal import ParallelEnv, SerialEnv

CLASSES = [SerialEnv, ParallelEnv]


def never() -> Counter:
    raise AssertionError("nothing may be built")


def mapped_files() -> list[str]:
    """Returns the shared mappings of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if line.split()[1][3] == "s"]


@contextlib.contextmanager
def threads_kept() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cls", CLASSES)
def test_item_010_two_positional_arguments(cls: Any) -> None:
    kinds = [p.kind for p in list(inspect.signature(cls.__init__).parameters.values())[1:]]
    assert kinds[:2] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
    assert inspect.Parameter.POSITIONAL_OR_KEYWORD not in kinds[2:]
    assert cls(num_workers=2, create_env_fn=Counter).num_workers == 2
    with pytest.raises(TypeError):
        cls(2, Counter, {"start": 1})


@pytest.mark.parametrize("cls", CLASSES)
def test_item_010_unknown_arguments_are_refused(cls: Any) -> None:
    with pytest.raises(TypeError, match="colour"):
        cls(2, Counter, colour="red")


@pytest.mark.parametrize("cls", CLASSES)
def test_item_011_one_callable_for_all(cls: Any) -> None:
    env = cls(3, Counter)
    assert len(env.create_env_fn) == 3
    assert all(maker is Counter for maker in env.create_env_fn)


@pytest.mark.parametrize("cls", CLASSES)
def test_item_012_length_of_the_list_of_functions(cls: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)2.*3"):
        cls(3, [never, never])


@pytest.mark.parametrize("cls", CLASSES)
def test_item_013_single_task(cls: Any) -> None:
    assert cls(3, Counter)._single_task
    assert cls(3, [Counter] * 3)._single_task
    assert not cls(3, [lambda: Counter(), lambda: Counter(), lambda: Counter()])._single_task
    assert not cls(2, [EnvCreator(Counter), EnvCreator(Counter)])._single_task


@pytest.mark.parametrize("cls", CLASSES)
def test_item_014_kwargs_are_copied(cls: Any) -> None:
    assert cls(2, Counter).create_env_kwargs == [{}, {}]
    given = {"start": 4, "table": [1]}
    env = cls(2, Counter, create_env_kwargs=given)
    given["table"].append(2)  # type: ignore[attr-defined]
    given["start"] = 5
    env.create_env_kwargs[0]["table"].append(3)
    assert env.create_env_kwargs == [{"start": 4, "table": [1, 3]}, {"start": 4, "table": [1]}]


@pytest.mark.parametrize("cls", CLASSES)
def test_item_014_length_of_the_list_of_kwargs(cls: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)2.*3"):
        cls(3, never, create_env_kwargs=[{}, {}])


@pytest.mark.parametrize("kind", BOTH)
def test_item_014_each_worker_gets_its_own_kwargs(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter, create_env_kwargs=[{"start": n} for n in (5, 10, 20)])
    assert column(env.reset()) == [5, 10, 20]


@pytest.mark.parametrize("kind", BOTH)
def test_item_015a_single_task_is_dense_unless_asked(kind: str, make: Any) -> None:
    dense = make(kind, 2, Counter)
    assert dense.share_individual_td is False
    assert type(dense.reset()) is TensorDict
    lazy = make(kind, 2, Counter, share_individual_td=True)
    assert lazy.share_individual_td is True
    root = lazy.reset()
    assert isinstance(root, LazyStackedTensorDict)
    stepped = lazy.step(root.update(acting(lazy, 1.0)))
    assert isinstance(stepped["next"], LazyStackedTensorDict)
    assert column(stepped["next"]) == [1, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_015c_several_tasks_are_stacked_where_they_can_be(kind: str, make: Any) -> None:
    alike = [lambda: Counter(start=1), lambda: Counter(start=2)]
    env = make(kind, 2, alike)
    assert env.share_individual_td is False
    assert type(env.reset()) is TensorDict
    assert make(kind, 2, alike, share_individual_td=True).share_individual_td is True
    assert make(kind, 2, alike, share_individual_td=False).share_individual_td is False
    unlike = [lambda: Counter(size=1), lambda: Counter(size=2)]
    env = make(kind, 2, unlike)
    assert env.share_individual_td is True
    assert isinstance(env.reset(), LazyStackedTensorDict)
    with pytest.raises(ValueError, match="share_individual_td"):
        make(kind, 2, unlike, share_individual_td=False)


@pytest.mark.parametrize("cls", CLASSES)
def test_item_016_shared_memory_or_memmap(cls: Any) -> None:
    with pytest.raises(RuntimeError, match=r"memmap.*shared_memory"):
        cls(2, Counter, memmap=True, shared_memory=True)
    with pytest.raises(RuntimeError, match=r"memmap.*shared_memory"):
        cls(2, Counter, memmap=True)  # shared memory is the default
    cls(2, Counter, memmap=False, shared_memory=False)


def test_item_017_memmap_puts_the_rows_on_disk(make: Any) -> None:
    before = mapped_files()
    env = make("parallel", 2, Counter, memmap=True, shared_memory=False)
    assert column(env.reset()) == [0, 0]
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]
    new = [name for name in mapped_files() if name not in before]
    assert any(name.startswith(tempfile.gettempdir()) for name in new)
    assert not any("memfd" in name for name in new)


def test_item_017_a_failure_is_a_runtime_error(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env = make("parallel", 2, Counter, memmap=True, shared_memory=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises((RuntimeError, OSError), match=r"memmap|nowhere"):
        env.reset()
    assert env.is_closed
    monkeypatch.undo()
    assert column(env.reset()) == [0, 0]


def test_item_018_a_serial_env_shares_nothing(make: Any) -> None:
    before = mapped_files()
    env = make("serial", 2, Counter)
    env.rollout(2)
    assert mapped_files() == before


@pytest.mark.parametrize("cls", CLASSES)
def test_item_019_policy_proof_is_kept(cls: Any) -> None:
    proof = object()
    assert cls(2, Counter, policy_proof=proof).policy_proof is proof
    assert cls(2, Counter).policy_proof is None


@pytest.mark.parametrize("cls", CLASSES)
def test_item_020_device(cls: Any) -> None:
    assert cls(2, Counter).device is None
    assert cls(2, lambda: Counter(device="cpu")).device == torch.device("cpu")
    for given in ("cpu", torch.device("cpu")):
        env = cls(2, Counter, device=given)
        assert env.device == torch.device("cpu")
        assert env.observation_spec.device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("given", [0, "cuda", torch.device("cuda")])
def test_item_020_device_gets_its_number(given: Any) -> None:
    assert SerialEnv(2, Counter, device=given).device == torch.device("cuda:0")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("item", ["021 pin_memory", "022 allow_step_when_done"])
def test_item_021_and_022_what_is_gone(cls: Any, item: str) -> None:
    name = item.split()[1]
    cls(2, Counter, **{name: False})
    with pytest.raises(ValueError, match=name):
        cls(2, Counter, **{name: True})


def test_item_023_num_threads(make: Any) -> None:
    with threads_kept():
        env = make("parallel", 2, Counter, num_threads=3)
        assert torch.get_num_threads() == 4
        env.start()
        assert torch.get_num_threads() == 3
        env.close()
        assert torch.get_num_threads() == 4
        serial = make("serial", 2, Counter, num_threads=3)
        serial.start()
        assert torch.get_num_threads() == 4


def test_item_024_num_sub_threads(make: Any) -> None:
    with threads_kept():
        default = make("parallel", 2, Counter)
        default.start()
        assert default.map(lambda child: torch.get_num_threads()) == [1, 1]
        env = make("parallel", 2, Counter, num_sub_threads=2)
        env.start()
        assert env.map(lambda child: torch.get_num_threads()) == [2, 2]
        assert list(env.threads_at_start) == [2, 2]
        serial = make("serial", 2, Counter, num_sub_threads=2)
        serial.start()
        assert torch.get_num_threads() == 4


@pytest.mark.parametrize("first", [0, 1])
def test_item_025_threads_of_several_envs(make: Any, first: int) -> None:
    with threads_kept():
        envs = [make("parallel", 1, Counter, num_threads=n) for n in (3, 2)]
        for env in envs:
            env.start()
        assert torch.get_num_threads() == 2
        envs.pop(first).close()
        envs.pop().close()
        assert torch.get_num_threads() == 4


def test_item_025_threads_are_left_alone_unless_asked(make: Any) -> None:
    with threads_kept():
        env = make("parallel", 2, Counter)
        env.start()
        assert torch.get_num_threads() == 4
        env.close()
        assert torch.get_num_threads() == 4


def test_item_026_serial_for_single() -> None:
    env = ParallelEnv(1, Counter, serial_for_single=True)
    assert type(env) is SerialEnv
    assert env.batch_size == (1,)
    assert type(ParallelEnv(num_workers=1, create_env_fn=Counter, serial_for_single=True)) is (
        SerialEnv
    )
    assert type(ParallelEnv(1, Counter)) is ParallelEnv
    several = ParallelEnv(2, Counter, serial_for_single=True, mp_start_method="spawn")
    assert type(several) is ParallelEnv
    assert several._mp_start_method == "spawn"
    assert type(SerialEnv(1, Counter, serial_for_single=True)) is SerialEnv


@pytest.mark.parametrize("cls", CLASSES)
def test_item_027_non_blocking(cls: Any) -> None:
    assert cls(2, Counter).non_blocking is True
    assert cls(2, Counter, non_blocking=None).non_blocking is True
    assert cls(2, Counter, non_blocking=True).non_blocking is True
    assert cls(2, Counter, non_blocking=False).non_blocking is False


def test_item_028_start_method() -> None:
    for given in ("spawn", "fork", "forkserver", None):
        env = ParallelEnv(2, Counter, mp_start_method=given)
        assert env._mp_start_method == given
        with contextlib.nullcontext() if given is None else pytest.raises(TypeError):
            SerialEnv(2, Counter, mp_start_method=given)
        alone = ParallelEnv(1, Counter, serial_for_single=True, mp_start_method=given)
        assert type(alone) is SerialEnv


def test_item_028_an_unknown_start_method_is_named(make: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match="teleport"):
        make("parallel", 2, Counter, mp_start_method="teleport").start()


@pytest.mark.parametrize("cls", CLASSES)
def test_item_029_use_buffers(cls: Any) -> None:
    assert cls(2, Counter)._use_buffers is True
    assert cls(2, EnvWithDynamicSpec)._use_buffers is False
    assert cls(2, Counter, use_buffers=False)._use_buffers is False
    several = [lambda: Counter(), lambda: Counter()]
    assert cls(2, several, use_buffers=False)._use_buffers is False
    with pytest.warns(UserWarning, match="use_buffers"):
        env = cls(2, EnvWithDynamicSpec, use_buffers=True)
    assert env._use_buffers is False


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("consolidate", [False, True])
def test_item_030_consolidate_changes_no_result(kind: str, consolidate: bool, make: Any) -> None:
    env = make(kind, 2, Counter, use_buffers=False, consolidate=consolidate)
    assert env.rollout(3)["next", "observation"][..., 0].tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize("cls", CLASSES)
def test_item_031_keywords_of_envbase(cls: Any) -> None:
    def locked(env: Any) -> list[bool]:
        return [env.input_spec.is_locked, env.output_spec.is_locked]

    assert locked(cls(2, Counter)) == [True, True]
    assert locked(cls(2, Counter, spec_locked=False)) == [False, False]
    assert isinstance(cls(2, Counter).observation_spec, TensorSpec)


@pytest.mark.parametrize("kind", BOTH)
def test_item_031_auto_reset_of_envbase(kind: str, make: Any) -> None:
    env = make(kind, 2, AutoResettingCountingEnv, auto_reset=True, auto_reset_replace=True)
    assert type(env) is not type(make(kind, 2, CountingEnv))  # it was wrapped
    policy = lambda td: td.update(env.full_action_spec.one())  # noqa: E731
    data = env.rollout(8, policy, break_when_any_done=False)
    assert data["next", "done"].any()
    assert (data[:, 1:]["observation"][~data[:, :-1]["next", "done"]] > 0).all()


def test_item_031_import_is_cheap_and_names_are_public() -> None:
    assert {"SerialEnv", "ParallelEnv"} <= set(dir(shoal))
