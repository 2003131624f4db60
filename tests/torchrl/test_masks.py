"""Partial resets and partial steps: which rows move, and what the others show."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from batched_cases import (
    SEED,
    WAYS,
    Log,
    assert_same,
    assert_same_logs,
    open_env,
    open_reference,
    play,
    play_reference,
)
from gymnasium import spaces
from scripted_envs import CountingEnv, Echo, SpaceEnv
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict
from torchrl.envs import StepCounter, TransformedEnv, step_mdp

from shoal.errors import SpecError

ONE = torch.ones(3, dtype=torch.int64)


def counting(way: str, length: int = 3) -> Any:
    return open_env(way, 3, functools.partial(CountingEnv, length=length))


def mask_of(*rows: bool) -> torch.Tensor:
    return torch.tensor(rows).unsqueeze(-1)


def values(td: Any) -> list[int]:
    return td["observation"].squeeze(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
def test_rows_outside_a_mask_keep_their_present_values(way: str) -> None:
    with counting(way) as env:
        root = env.reset()
        for _ in range(3):
            root = step_mdp(env.step(root.set("action", ONE)))
        assert values(root) == [103, 103, 103]
        # Only the mask: what the others show comes from the envs, done flags included.
        td = env.reset(TensorDict({"_reset": mask_of(True, False, False)}, [3]))
        assert values(td) == [200, 103, 103]
        assert td["done"].squeeze(-1).tolist() == [False, True, True]
        assert td["terminated"].squeeze(-1).tolist() == [False, True, True]
        assert "_reset" not in td.keys()  # noqa: SIM118
        td = env.reset(td.set("_reset", mask_of(False, False, True)))
        assert values(td) == [200, 103, 200]


@pytest.mark.parametrize("way", WAYS)
def test_rows_outside_a_mask_keep_what_the_caller_has(way: str) -> None:
    with counting(way) as env:
        root = env.reset()
        root["observation"] = torch.tensor([[7], [8], [9]])
        root["mine"] = torch.tensor([1, 2, 3])
        root["_reset"] = mask_of(False, True, False)
        td = env.reset(root)
        assert td is root
        assert values(td) == [7, 200, 9]
        assert td["mine"].tolist() == [1, 0, 3]


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_nobody_resets_nobody(way: str) -> None:
    with counting(way) as env:
        root = env.reset()
        root = step_mdp(env.step(root.set("action", ONE)))
        td = env.reset(root.set("_reset", mask_of(False, False, False)))
        assert values(td) == [101, 101, 101]
        assert values(env._reset(TensorDict({"_reset": mask_of(*[False] * 3)}, [3]))) == [101] * 3
        assert values(env.step(td.set("action", ONE))["next"]) == [102, 102, 102]


def test_a_mask_of_nobody_before_anything_else_starts_the_envs() -> None:
    with counting("serial") as env:
        td = env.reset(TensorDict({"_reset": mask_of(*[False] * 3)}, [3]))
        assert td.batch_size == (3,)
        assert not td["done"].any()


@pytest.mark.parametrize("way", WAYS)
def test_the_mask_may_change_right_after_the_call(way: str) -> None:
    with counting(way) as env:
        mask = mask_of(True, False, True)
        root = env.reset().set("_reset", mask)
        td = env.reset(root)
        mask.fill_(True)
        assert values(td) == [200, 100, 200]
        step = mask_of(True, False, False)
        td = env.step(td.set("action", ONE).set("_step", step))
        step.fill_(True)
        assert values(td["next"]) == [201, 100, 200]


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([1, 0, 1]),
        torch.tensor([[True], [False]]),
        torch.tensor(True),
    ],
    ids=["integers", "two rows", "no rows"],
)
def test_masks_that_do_not_fit(way: str, mask: torch.Tensor) -> None:
    with counting(way) as env:
        env.reset()
        td = TensorDict({"_reset": torch.ones(3, 1, dtype=torch.bool)}, [3])
        td._tensordict["_reset"] = mask
        with pytest.raises(SpecError, match="_reset should be bool of shape"):
            env._reset(td)
        assert values(env.reset()) == [200, 200, 200]


def test_a_mask_without_the_trailing_dimension_is_taken() -> None:
    with counting("serial") as env:
        root = env.reset()
        fresh = env._reset(TensorDict({"_reset": torch.tensor([True, False, False])}, [3]))
        assert values(fresh) == [200, 100, 100]
        assert values(root) == [100, 100, 100]


# --- partial steps -------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_do_not_step_repeat_what_the_caller_has(way: str) -> None:
    with counting(way) as env:
        root = env.reset()
        td = env.step(root.set("action", ONE).set("_step", mask_of(True, False, True)))
        assert values(td["next"]) == [101, 100, 101]
        assert td["next", "reward"].squeeze(-1).tolist() == [1, 0, 1]
        root = step_mdp(td).exclude("_step")
        assert values(env.step(root.set("action", ONE))["next"]) == [102, 101, 102]
        # An action alone: nothing to repeat, so there are zeros.
        action = TensorDict({"action": ONE, "_step": mask_of(False, True, False)}, [3])
        assert values(env.step(action)["next"]) == [0, 102, 0]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_nobody(way: str) -> None:
    with counting(way) as env:
        root = env.reset().set("action", ONE)
        td = env.step(root.clone().set("_step", mask_of(*[False] * 3)))
        assert values(td["next"]) == [100, 100, 100]
        direct = env._step(root.clone().set("_step", mask_of(*[False] * 3)))
        assert values(direct) == [100, 100, 100]
        assert not direct["reward"].any()
        assert values(env.step(root)["next"]) == [101, 101, 101]


def partial_steps(env: Any, log: Log) -> None:
    env.set_seed(SEED)
    root = env.reset()
    masks = [(True, False, True), (False, False, True), (True, True, True), (False, False, False)]
    for t in range(24):
        root = env.rand_action(root)
        td = env.step(root.set("_step", mask_of(*masks[t % 4])))
        root = env.maybe_reset(step_mdp(td.exclude("_step")))
        log.add("next", td["next"])
        log.add("root", root)
    for t in range(24):
        root = env.rand_action(root)
        td, root = env.step_and_maybe_reset(root.set("_step", mask_of(*masks[t % 4])))
        log.add("next", td["next"])
        root = log.add("root", root.exclude("_step"))


@pytest.fixture(scope="module")
def reference_of_partial_steps() -> Log:
    return play_reference(open_reference(3, "CartPole-v1"), partial_steps)


@pytest.mark.parametrize("way", WAYS)
def test_partial_steps_are_as_in_torchrl(way: str, reference_of_partial_steps: Log) -> None:
    log = play(open_env(way, 3, "CartPole-v1"), partial_steps)
    assert_same_logs(log, reference_of_partial_steps)


@pytest.mark.parametrize("way", WAYS)
def test_partial_steps_below_a_transform(way: str) -> None:
    with counting(way) as base:
        env = TransformedEnv(base, StepCounter())
        root = env.reset().set("action", ONE)
        td = env.step(root.set("_step", mask_of(True, False, True)))
        assert values(td["next"]) == [101, 100, 101]
        root = step_mdp(td.exclude("_step")).set("action", ONE)
        td = env.step(root.set("_step", mask_of(False, False, False)))
        assert values(td["next"]) == [101, 100, 101]


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_partial_steps_and_resets_of_what_is_no_tensor(way: str) -> None:
    space = spaces.Dict({"text": spaces.Text(9), "wide": spaces.Box(0, 9, (2,), np_uint16())})
    space.seed(0)
    with open_env(way, 3, functools.partial(SpaceEnv, space, length=99)) as env:
        root = env.reset(seed=0)
        texts = root.get("text").tolist()
        wide = root["wide"].clone()
        td = env.step(root.clone().set("action", ONE).set("_step", mask_of(True, False, False)))
        stepped = td["next"].get("text").tolist()
        assert stepped[1:] == texts[1:]
        assert stepped[0] != texts[0]
        assert (td["next", "wide"][1:] == wide[1:]).all()
        root = step_mdp(td.exclude("_step"))
        td = env.reset(root.clone().set("_reset", mask_of(False, True, False)))
        assert td.get("text").tolist()[::2] == stepped[::2]
        assert td.get("text").tolist()[1] != stepped[1]
        _, root = env.step_and_maybe_reset(
            td.set("action", ONE).set("_step", mask_of(False, False, True))
        )
        assert root.get("text").tolist()[:2] == td.get("text").tolist()[:2]
        alone = TensorDict({"action": ONE, "_step": mask_of(False, True, False)}, [3])
        assert len(env.step(alone)["next"].get("text").tolist()) == 3


def np_uint16() -> Any:
    import numpy as np

    return np.uint16


# --- forms of input ------------------------------------------------------------------


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_a_step_returns_the_input_with_next_in_it(way: str) -> None:
    with counting(way) as env:
        root = env.reset()
        root["mine"] = torch.arange(3)
        root["action"] = ONE
        td = env.step(root)
        assert td is root
        assert td["mine"].tolist() == [0, 1, 2]
        only = TensorDict({"action": ONE}, [3])
        td, root = env.step_and_maybe_reset(only)
        assert td is only
        assert set(td.keys()) == {"action", "next"}
        assert set(root.keys()) == {"action", "observation", "done", "terminated", "truncated"}
        td, root = env.step_and_maybe_reset(root.set("mine", torch.arange(3)))
        assert root["mine"].tolist() == [0, 1, 2]
        assert not root.is_locked


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_presets_in_next_prevail_only_where_the_env_is_silent(way: str) -> None:
    with counting(way) as env:
        for step in (env.step, lambda td: env.step_and_maybe_reset(td)[0]):
            root = env.reset().set("action", ONE)
            root["next", "hidden"] = torch.arange(3)
            root["next", "observation"] = torch.zeros(3, 1, dtype=torch.int64)
            td = step(root)
            assert td["next", "hidden"].tolist() == [0, 1, 2]
            assert (td["next", "observation"] > 100).all()


def lazily_stacked(td: Any) -> Any:
    return LazyStackedTensorDict.lazy_stack(list(td.unbind(0)), 0)


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_lazily_stacked_inputs(way: str) -> None:
    with counting(way) as env, counting("serial") as plain:
        roots = [env.reset(), plain.reset()]
        for _ in range(5):
            ours = lazily_stacked(roots[0].select("observation", "done").set("action", ONE))
            td, roots[0] = env.step_and_maybe_reset(ours)
            theirs = roots[1].select("observation", "done").set("action", ONE)
            wanted, roots[1] = plain.step_and_maybe_reset(theirs)
            assert_same(td["next"].contiguous(), wanted["next"])
            assert_same(roots[0].contiguous(), roots[1])
        masked = lazily_stacked(env.reset().set("_reset", mask_of(True, False, True)))
        before = values(masked)
        assert values(env.reset(masked))[1] == before[1]


@pytest.mark.parametrize("way", ["serial", "2 processes"])
def test_locked_inputs_are_refused_as_by_torchrl(way: str) -> None:
    errors = []
    for env in (counting(way), open_reference(3, "CartPole-v1")):
        for name in ("step", "step_and_maybe_reset"):
            root = env.reset().set("action", ONE).lock_()
            with pytest.raises(RuntimeError, match="locked") as caught:
                getattr(env, name)(root)
            errors.append(type(caught.value))
        env.close()
    assert errors[:2] == errors[2:]


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("name", ["step", "step_and_maybe_reset", "reset"])
def test_another_batch_size_is_refused(way: str, name: str) -> None:
    with counting(way) as env:
        env.reset()
        for size in ([2], [], [4], [3, 1]):
            td = TensorDict({"action": torch.ones(size, dtype=torch.int64)}, size)
            with pytest.raises(RuntimeError, match="batch"):
                getattr(env, name)(td)
        assert values(env.rand_step(env.reset())["next"]) == [201, 201, 201]


@pytest.mark.parametrize("way", ["serial", "2 processes"])
@pytest.mark.parametrize("name", ["step", "step_and_maybe_reset", "_step"])
def test_actions_that_do_not_fit_are_refused_and_nothing_moves(way: str, name: str) -> None:
    with counting(way) as env:
        env.reset()
        for action in (ONE + 1, ONE.float(), ONE.unsqueeze(-1), None):
            td = TensorDict({} if action is None else {"action": action}, [3])
            with pytest.raises(SpecError, match="action should be"):
                getattr(env, name)(td)
        td = TensorDict({"action": ONE}, [3])
        assert values(env._step(td)) == [101, 101, 101]


def test_names_of_dimensions_are_kept() -> None:
    for env in (open_reference(3, "CartPole-v1"), counting("serial")):
        for name in ("step", "step_and_maybe_reset"):
            root = env.reset().set("action", ONE)
            root.names = ["envs"]
            result = getattr(env, name)(root)
            found = [td.names for td in (result if isinstance(result, tuple) else [result])]
            assert found == [["envs"]] * len(found)
        env.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_partial_step_takes_actions_that_are_objects(way: str) -> None:
    with open_env(way, 3, Echo) as env:
        root = env.reset()
        root.set("action", NonTensorStack(*[NonTensorData(text) for text in "abc"]))
        root.set("_step", torch.tensor([True, False, True]))
        assert env.step(root)["next"].get("observation").tolist() == ["a", "start", "c"]
