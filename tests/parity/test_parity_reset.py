"""PARITY 1.6: resets of all or of some."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from parity_cases import BOTH, acting, column, mask
from parity_envs import Counter, OnlyDone, Writer
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.testing.mocking_classes import EnvWithDynamicSpec, MultiKeyCountingEnv


def stepped_on(env: Any, times: int) -> Any:
    """Returns the root after some steps."""
    env.reset()
    for _ in range(times):
        root = env.step_mdp(env.step(acting(env, 1.0)))
    return root


@pytest.mark.parametrize("kind", BOTH)
def test_item_082_reset_without_arguments(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    stepped_on(env, 2)
    assert column(env.reset()) == [0, 0, 0]
    assert env.map(lambda child: child.num_resets) == [2, 2, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_item_083_reset_without_a_mask(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    root = stepped_on(env, 2)
    given = root.set("extra", torch.arange(3))
    made = env.reset(given)
    assert made is given
    assert column(made) == [0, 0, 0]
    assert made["extra"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_item_083_masks_of_some_groups_only(kind: str, make: Any) -> None:
    env = make(kind, 2, MultiKeyCountingEnv)
    env.reset()
    env.step(env.full_action_spec.one())
    given = TensorDict({}, [2])
    given["nested_1", "_reset"] = torch.ones(env.full_done_spec["nested_1", "done"].shape).bool()
    with pytest.raises(ValueError, match=r"(?i)reset"):
        env.reset(given)


@pytest.mark.parametrize("kind", BOTH)
def test_item_084_any_element_resets_a_worker(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter, create_env_kwargs={"batch_size": (2,)})
    stepped_on(env, 2)
    flags = torch.tensor([[0, 0], [0, 1], [1, 1]]).bool().unsqueeze(-1)
    made = env.reset(TensorDict({"_reset": flags}, [3, 2]))
    assert made["observation"][..., 0].tolist() == [[2, 2], [2, 0], [0, 0]]
    assert env.map(lambda child: child.num_resets) == [1, 2, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_item_084_a_mask_of_the_wrong_size(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter, create_env_kwargs={"batch_size": (2,)})
    stepped_on(env, 2)
    with pytest.raises(RuntimeError, match="shape"):
        env.reset(TensorDict({"_reset": torch.ones(4, 2, 1).bool()}, [4, 2]))
    with pytest.raises(RuntimeError, match="_reset"):
        env.reset(TensorDict({"_reset": torch.ones(3, 2, 1)}, [3, 2]))
    assert env.map(lambda child: child.num_resets) == [1, 1, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_item_085_other_rows_keep_their_data(kind: str, make: Any) -> None:
    env = make(kind, 3, functools.partial(Counter, length=2))
    env.reset()
    env.step(acting(env, 1.0))
    root = env.step_mdp(env.step(acting(env, 1.0)))
    assert column(root, "done") == [True] * 3
    made = env.reset(root.set("_reset", mask(True, False, True)))
    assert column(made) == [0, 2, 0]
    assert column(made, "done") == [False, True, False]
    assert column(made, "terminated") == [False, True, False]


@pytest.mark.parametrize("kind", BOTH)
def test_item_085_also_if_the_caller_gives_none(kind: str, make: Any) -> None:
    env = make(kind, 3, functools.partial(Counter, length=2))
    env.reset()
    env.step(acting(env, 1.0))
    env.step(acting(env, 1.0))
    made = env.reset(TensorDict({"_reset": mask(False, True, False)}, [3]))
    assert column(made) == [2, 0, 2]
    assert column(made, "done") == [True, False, True]


@pytest.mark.parametrize("kind", BOTH)
def test_item_085_what_the_caller_passes_wins(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    root = stepped_on(env, 2)
    root["observation"] = torch.tensor([[70], [71]])
    root["mine"] = torch.tensor([5.0, 6.0])
    made = env.reset(root.set("_reset", mask(True, False)))
    assert column(made) == [0, 71]
    assert made["mine"][1] == 6.0


@pytest.mark.parametrize("kind", BOTH)
def test_item_086_the_mask_is_gone(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    root = stepped_on(env, 1)
    made = env.reset(root.set("_reset", mask(True, False)))
    assert not any("_reset" in key for key in made.keys(True, True))
    nested = make(kind, 2, MultiKeyCountingEnv)
    root = nested.reset()
    for key in nested.reset_keys:
        group = key[:-1] if isinstance(key, tuple) else ()
        root[key] = torch.ones(nested.full_done_spec[(*group, "done")].shape).bool()
    made = nested.reset(root)
    assert not any("_reset" in key for key in made.keys(True, True))


@pytest.mark.parametrize("kind", BOTH)
def test_item_087_no_empty_tensordicts(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset(TensorDict({}, [2]))
    assert env.map(lambda child: child.reset_keys_seen) == [None, None]


@pytest.mark.parametrize("kind", BOTH)
def test_item_088_entries_reach_the_children(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    made = env.reset(TensorDict({"begin_at": torch.tensor([[30], [40]])}, [2]))
    assert column(made) == [30, 40]
    assert env.map(lambda child: child.reset_keys_seen) == [["begin_at"]] * 2
    made = env.reset(
        TensorDict({"begin_at": torch.tensor([[50], [60]]), "_reset": mask(False, True)}, [2])
    )
    assert column(made) == [30, 60]


@pytest.mark.parametrize("kind", BOTH)
def test_item_089_kwargs_reach_every_child(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    assert column(env.reset(offset=5, colour="red")) == [5, 5]
    assert env.map(lambda child: child.reset_kwargs) == [{"offset": 5, "colour": "red"}] * 2
    assert column(env.reset()) == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_090_kwargs_of_their_own(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    listed = [{"offset": n, "own": n} for n in (1, 2, 3)]
    assert column(env.reset(list_of_kwargs=listed)) == [1, 2, 3]
    made = env.reset(
        TensorDict({"_reset": mask(True, False, True)}, [3]), list_of_kwargs=listed, offset=7
    )
    assert column(made) == [7, 2, 7]
    assert env.map(lambda child: child.reset_kwargs) == [
        {"offset": 7, "own": 1},
        {"offset": 2, "own": 2},
        {"offset": 7, "own": 3},
    ]
    assert listed == [{"offset": n, "own": n} for n in (1, 2, 3)]
    with pytest.raises(RuntimeError, match=r"(?s)list_of_kwargs.*2.*3"):
        env.reset(list_of_kwargs=listed[:2])


class EndsAtOnce(EnvBase):
    """Is done when it is reset."""

    def __init__(self, allowed: bool) -> None:
        super().__init__(allow_done_after_reset=allowed)
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Binary(1, shape=(1,), dtype=torch.bool)

    def _reset(self, tensordict: Any = None, **kwargs: Any) -> TensorDict:
        return TensorDict({"observation": torch.zeros(1), "done": torch.ones(1).bool()})

    def _step(self, tensordict: Any) -> TensorDict:
        done = torch.ones(1).bool()
        return TensorDict({"observation": torch.ones(1), "reward": torch.ones(1), "done": done})

    def _set_seed(self, seed: int | None) -> None:
        pass


@pytest.mark.parametrize("kind", BOTH)
def test_item_091_checks_are_up_to_the_child(kind: str, make: Any) -> None:
    env = make(kind, 2, functools.partial(EndsAtOnce, True))
    assert column(env.reset(), "done") == [True, True]
    strict = make(kind, 2, functools.partial(EndsAtOnce, False))
    with pytest.raises(RuntimeError, match="done"):
        strict.reset()


@pytest.mark.parametrize("kind", BOTH)
def test_item_091_the_child_completes_its_dones(kind: str, make: Any) -> None:
    env = make(kind, 2, OnlyDone)
    root = env.reset()
    assert column(root, "done") == column(root, "terminated") == [False, False]


@pytest.mark.parametrize("kind", BOTH)
def test_item_092_lazy_results_into_a_dense_input(kind: str, make: Any) -> None:
    env = make(kind, 2, EnvWithDynamicSpec)
    env.reset()
    step = TensorDict({"action": torch.zeros(2, 2)}, [2])
    root = env.step_mdp(env.step(step))
    assert type(root) is TensorDict
    made = env.reset(root.set("_reset", mask(True, False)))
    assert isinstance(made, LazyStackedTensorDict)
    assert [row["observation"].shape for row in made.unbind(0)] == [(3, 1, 2), (3, 2, 2)]


@pytest.mark.parametrize("kind", BOTH)
def test_item_093_non_tensor_values(kind: str, make: Any) -> None:
    env = make(kind, 3, Writer, create_env_kwargs=[{"letter": letter} for letter in "agx"])
    root = stepped_on(env, 1)
    assert root["text"] == ["b", "h", "y"]
    made = env.reset(root.set("_reset", mask(False, True, False)))
    assert made["text"] == ["b", "g", "y"]
    made = env.reset(TensorDict({"_reset": mask(True, False, False)}, [3]))
    assert made["text"] == ["a", "g", "y"]
