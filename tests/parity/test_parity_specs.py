"""PARITY 1.3: what is known of the children before they run."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from parity_cases import BOTH, acting, column, diary_of
from parity_envs import Counter, EmptyPart, Unprintable
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvCreator, RemoveEmptySpecs, TransformedEnv, get_env_metadata
from torchrl.testing.mocking_classes import (
    CountingEnv,
    EnvWithDynamicSpec,
    HeterogeneousCountingEnv,
    MockBatchedLockedEnv,
    MockBatchedUnLockedEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

from shoal import ParallelEnv, SerialEnv

if TYPE_CHECKING:
    from pathlib import Path

CLASSES = [SerialEnv, ParallelEnv]


def tasks(*options: dict[str, Any]) -> list[Any]:
    """Returns one function per env, all different objects."""
    return [functools.partial(Counter, **each) for each in options]


@pytest.mark.parametrize("cls", CLASSES)
def test_item_032_one_env_is_read_and_closed(cls: Any, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    cls(3, lambda: Counter(diary=str(diary)))
    assert [what for what, _ in diary_of(diary)] == ["built", "closed"]


@pytest.mark.parametrize("cls", CLASSES)
def test_item_032_of_several_tasks_one_each(cls: Any, tmp_path: Path) -> None:
    diaries = [tmp_path / name for name in "abc"]
    cls(3, tasks(*[{"diary": str(diary)} for diary in diaries]))
    for diary in diaries:
        notes = [what for what, _ in diary_of(diary)]
        assert notes.count("built") == notes.count("closed") >= 1


@pytest.mark.parametrize("cls", CLASSES)
def test_item_033_a_creator_brings_its_metadata(cls: Any, tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    creator = EnvCreator(lambda: Counter(diary=str(diary)))
    before = diary_of(diary)
    env = cls(3, creator)
    assert env.batch_size == (3,)
    assert diary_of(diary) == before


@pytest.mark.parametrize("child", [CountingEnv, NestedCountingEnv, EnvWithDynamicSpec])
def test_item_034_metadata(child: Any) -> None:
    one = get_env_metadata(child)
    found = get_env_metadata(SerialEnv(2, child))
    assert found.batch_size == (2,)
    assert found.batch_locked is one.batch_locked
    assert found.device == one.device
    assert "SerialEnv" in found.env_str
    assert found.has_dynamic_specs is one.has_dynamic_specs is (child is EnvWithDynamicSpec)
    if child is EnvWithDynamicSpec:
        return
    assert found.tensordict.batch_size == (2,)
    leaves = set(found.tensordict.keys(True, True))
    assert leaves == set(one.tensordict.keys(True, True))
    assert any("_reset" in key for key in leaves)
    for key in leaves:
        assert found.tensordict[key].shape == (2, *one.tensordict[key].shape)
    assert found.specs == found.clone().specs
    assert found.expand(3, 2).batch_size == (3, 2)
    assert found[0].batch_size == ()
    assert found.to("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("cls", CLASSES)
def test_item_035_a_child_without_words(cls: Any) -> None:
    assert "Unprintable" in repr(cls(2, Unprintable))


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("child", [CountingEnv, NestedCountingEnv, MultiKeyCountingEnv])
def test_item_036_specs_are_those_of_the_child_expanded(cls: Any, child: Any) -> None:
    env, one = cls(3, child), child()
    for name in ("action", "state", "observation", "reward", "done"):
        spec = getattr(one, f"full_{name}_spec")
        assert getattr(env, f"full_{name}_spec") == spec.expand(3, *spec.shape)
    assert env.action_keys == one.action_keys
    assert env.reward_keys == one.reward_keys
    assert env.done_keys == one.done_keys
    assert env.reset_keys == one.reset_keys


@pytest.mark.parametrize("cls", CLASSES)
def test_item_037_specs_of_several_tasks_are_stacked(cls: Any) -> None:
    env = cls(2, tasks({"key": "left"}, {"key": "right"}))
    spec = env.observation_spec
    assert spec.shape == (2,)
    assert set(spec[0].keys()) == {"left"}
    assert set(spec[1].keys()) == {"right"}
    assert set(spec.keys()) == set()  # none is common to both
    alike = cls(2, tasks({"start": 1}, {"start": 2})).observation_spec
    assert alike["observation"] == Unbounded((2, 1), dtype=torch.int64)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("where", ["state", "action", "done", "reward", "observation"])
def test_item_038_empty_parts_are_refused(cls: Any, where: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)hollow.*RemoveEmptySpecs"):
        cls(2, lambda: EmptyPart(where))


def test_item_038_the_advice_helps(make: Any) -> None:
    env = make("serial", 2, lambda: TransformedEnv(EmptyPart("observation"), RemoveEmptySpecs()))
    assert column(env.reset()) == [0, 0]


@pytest.mark.parametrize("cls", CLASSES)
def test_item_039_device_of_the_children(cls: Any) -> None:
    assert cls(2, lambda: Counter(device="cpu")).device == torch.device("cpu")
    same = tasks({"device": "cpu"}, {"device": "cpu"})
    assert cls(2, same).device == torch.device("cpu")
    mixed = tasks({"device": "cpu"}, {"device": None})
    with pytest.raises(ValueError, match="device"):
        cls(2, mixed)
    assert cls(2, mixed, device="cpu").device == torch.device("cpu")


@pytest.mark.parametrize("kind", BOTH)
def test_item_039_mixed_devices_meet_on_the_given_one(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks({"device": "cpu"}, {"device": None}), device="cpu")
    root = env.reset()
    assert root.device == torch.device("cpu")
    stepped = env.step(root.update(acting(env, 1.0).to("cpu")))
    assert column(stepped["next"]) == [1, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_040_without_a_device(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    assert env.device is None
    root = env.reset()
    assert root.device is None
    assert root["observation"].device == torch.device("cpu")


class HalfOnCuda(Counter):
    """Has no device; its observation lives on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(
            observation=Unbounded((1,), dtype=torch.int64, device="cuda")
        )

    def _result(self, **more: Any) -> Any:
        made = super()._result(**more)
        made["observation"] = made["observation"].cuda()
        return made


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_item_040_and_057_leaves_stay_where_the_child_puts_them(make: Any) -> None:
    for kind, more in (("serial", {}), ("parallel", {"mp_start_method": "forkserver"})):
        env = make(kind, 2, HalfOnCuda, **more)
        root = env.reset()
        assert root["observation"].device.type == "cuda"
        assert root["done"].device.type == "cpu"
        stepped = env.step(root.update(acting(env, 1.0)))
        assert column(stepped["next"]) == [1, 1]


@pytest.mark.parametrize("cls", CLASSES)
def test_item_041_batch_lock(cls: Any) -> None:
    # Of a batch the size is fixed, whatever its children allow: with an unlocked one EnvBase
    # would cut the rows of a partial step out before the batched env sees them.
    assert cls(2, MockBatchedLockedEnv).batch_locked is True
    assert cls(2, MockBatchedUnLockedEnv).batch_locked is True


@pytest.mark.parametrize("kind", BOTH)
def test_item_042_specs_of_a_closed_env(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    before = [env.batch_size, env.device, env.input_spec.clone(), env.output_spec.clone()]
    env.reset()
    env.close()
    assert [env.batch_size, env.device, env.input_spec, env.output_spec] == before
    assert env.is_closed  # asking has started nothing


@pytest.mark.parametrize("cls", CLASSES)
def test_item_043_spec_setters(cls: Any) -> None:
    env = cls(2, Counter)
    env.reward_spec = Unbounded((2, 5))
    assert isinstance(env.full_reward_spec, Composite)
    assert env.full_reward_spec["reward"].shape == (2, 5)
    env.observation_spec = Composite(other=Unbounded((2, 3)), shape=(2,))
    assert set(env.observation_spec.keys()) == {"other"}
    with pytest.raises(ValueError, match="shape"):
        env.observation_spec = Composite(other=Unbounded((3, 3)), shape=(3,))
    with pytest.raises(ValueError, match="shape"):
        env.reward_spec = Unbounded((3, 1))


@pytest.mark.parametrize("kind", BOTH)
def test_item_044_specs_are_locked_when_it_runs(kind: str, make: Any) -> None:
    env = make(kind, 2, functools.partial(CountingEnv, spec_locked=False))
    env.start()
    assert env.input_spec.is_locked
    assert env.output_spec.is_locked
    locked = env.map(lambda child: (child.input_spec.is_locked, child.output_spec.is_locked))
    assert locked == [(True, True)] * 2


@pytest.mark.parametrize("kind", BOTH)
def test_item_044_specs_stay_locked_after_to(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnv)
    env.start()
    env.to("cpu")
    assert env.input_spec.is_locked
    assert env.output_spec.is_locked


@pytest.mark.parametrize("cls", CLASSES)
def test_item_045_add_truncated_keys(cls: Any) -> None:
    with pytest.raises(RuntimeError, match="envs"):
        cls(2, CountingEnv).add_truncated_keys()


@pytest.mark.parametrize("kind", BOTH)
def test_item_046_repr(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    closed = repr(env)
    for word in (type(env).__name__, "Counter()", "[2]"):
        assert word in closed
    env.reset()
    assert repr(env) == closed


@pytest.mark.parametrize("cls", CLASSES)
def test_item_047_dynamic_specs(cls: Any) -> None:
    for child, more in ((Counter, {}), (EnvWithDynamicSpec, {}), (Counter, {"use_buffers": False})):
        env = cls(2, child, **more)
        assert env._has_dynamic_specs is not env._use_buffers
    assert cls(2, Counter)._has_dynamic_specs is False


@pytest.mark.parametrize("cls", CLASSES)
def test_item_048_lazy_inputs(cls: Any) -> None:
    assert cls(2, Counter).has_lazy_inputs is False
    unlike = tasks({"action_size": 1}, {"action_size": 2})
    assert cls(2, unlike).has_lazy_inputs is True
    assert cls(2, HeterogeneousCountingEnv).has_lazy_inputs is True


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("child", [Counter, NestedCountingEnv, MultiKeyCountingEnv])
def test_item_049_keys_of_results(kind: str, child: Any, make: Any) -> None:
    env = make(kind, 2, child)

    def keys(*names: str) -> set[Any]:
        specs = [getattr(env, f"full_{name}_spec") for name in names]
        return {key for spec in specs for key in spec.keys(True, True)}

    root = env.reset()
    assert set(root.keys(True, True)) == keys("observation", "done")
    stepped = env._step(root.update(env.full_action_spec.one()))
    assert set(stepped.keys(True, True)) == keys("observation", "reward", "done")
    order = list(env.reset().keys(True, True))
    assert order == list(env.reset().keys(True, True))
    tops = list(env.reset().keys())
    assert tops == sorted(tops)


@pytest.mark.parametrize("kind", BOTH)
def test_item_049_keys_of_several_tasks(kind: str, make: Any) -> None:
    env = make(kind, 2, tasks({"key": "left"}, {"key": "right"}))
    root = env.reset()
    assert set(root[0].keys()) == {"left", "done", "terminated", "truncated"}
    assert set(root[1].keys()) == {"right", "done", "terminated", "truncated"}
