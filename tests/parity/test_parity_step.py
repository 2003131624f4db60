"""PARITY 1.7 and 1.8: steps and seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parity_cases import BOTH, acting, column
from parity_envs import Counter, Recurrent, Writer
from tensordict import TensorDict
from torchrl.envs import GymEnv
from torchrl.envs import SerialEnv as TorchRLSerialEnv


def next_seed(seed: int) -> int:
    """Returns the seed that follows, by the rule of a plain env."""
    drawn = np.random.default_rng(seed).bytes(8)
    return int.from_bytes(drawn, "big") % (2**32 - 1)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("size", [3, 1])
def test_item_094_wrong_batch_size(kind: str, size: int, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset()
    wrong = TensorDict({"action": torch.ones(size, 1)}, [size])
    for verb in (env.step, env.step_and_maybe_reset):
        with pytest.raises(RuntimeError, match=r"(?i)batch|shape"):
            verb(wrong.copy())
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("inside", "outside"), [(None, "cpu"), ("cpu", None), ("cpu", "cpu")])
def test_item_095_children_get_data_on_their_device(
    kind: str, inside: Any, outside: Any, make: Any
) -> None:
    class Nosy(Counter):
        def _step(self, tensordict: Any) -> Any:
            self.seen = str(tensordict.device)
            return super()._step(tensordict)

    env = make(kind, 2, lambda: Nosy(device=inside), device=outside)
    device = torch.device("cpu") if outside or inside else None
    assert env.device == device
    root = env.reset()
    assert root.device == device
    stepped = env.step(root.update(acting(env, 1.0)))
    assert stepped["next"].device == device
    assert env.map(lambda child: child.seen) == [str(inside)] * 2


@pytest.mark.parametrize("kind", BOTH)
def test_item_096_what_a_step_returns(kind: str, make: Any) -> None:
    env = make(kind, 2, Writer)
    root = env.reset().update(acting(env, 1.0))
    inner = env._step(root.copy())
    assert set(inner.keys()) == {
        "observation", "text", "reward", "done", "terminated", "truncated",
    }  # fmt: skip
    given = root.copy()
    stepped = env.step(given)
    assert stepped is given
    assert set(stepped["next"].keys()) == set(inner.keys())
    assert set(stepped.keys()) == set(root.keys()) | {"next"}
    assert column(stepped) == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_097_entries_of_next_that_the_policy_wrote(kind: str, make: Any) -> None:
    env = make(kind, 2, Recurrent)
    root = env.reset().update(acting(env, 1.0))
    root["next", "hidden"] = torch.tensor([[1.0] * 3, [2.0] * 3])
    root["next", "others"] = torch.tensor([7.0, 8.0])
    stepped = env.step(root)
    assert column(stepped["next"]) == [1, 1]
    assert column(stepped["next"], "seen") == [3.0, 6.0]
    assert column(stepped["next"], "hidden") == [1.0, 2.0]
    assert stepped["next", "others"].tolist() == [7.0, 8.0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_097_in_step_and_maybe_reset(kind: str, make: Any) -> None:
    env = make(kind, 2, Recurrent)
    root = env.reset().update(acting(env, 1.0))
    root["next", "hidden"] = torch.tensor([[1.0] * 3, [2.0] * 3])
    stepped, following = env.step_and_maybe_reset(root)
    assert column(stepped["next"], "seen") == [3.0, 6.0]
    assert column(following, "hidden") == [1.0, 2.0]
    # The next step has no preset of its own.
    assert column(env.step(following.update(acting(env, 1.0)))["next"], "seen") == [0.0, 0.0]


@pytest.mark.parametrize("kind", BOTH)
def test_item_098_large_payloads(kind: str, make: Any) -> None:
    size = 5_000_000
    env = make(kind, 2, Writer, create_env_kwargs={"text_length": size})
    root = env.reset()
    assert [len(text) for text in root["text"]] == [size, size]
    stepped, following = env.step_and_maybe_reset(root.update(acting(env, 1.0)))
    assert [text[-1] for text in stepped["next", "text"]] == ["b", "b"]
    assert [len(text) for text in following["text"]] == [size, size]


@pytest.mark.parametrize("kind", BOTH)
def test_item_099_seeds_make_a_chain(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    assert env.is_closed
    following = env.set_seed(42)
    assert not env.is_closed
    chain = [42]
    while len(chain) < 4:
        chain.append(next_seed(chain[-1]))
    assert following == chain[3]
    assert env.map(lambda child: child.seeds) == [[seed] for seed in chain[:3]]


@pytest.mark.parametrize("kind", BOTH)
def test_item_099_a_child_with_a_rule_of_its_own(kind: str, make: Any) -> None:
    class Adding(Counter):
        def set_seed(self, seed: Any = None, static_seed: bool = False) -> Any:
            super().set_seed(seed, static_seed)
            return seed if static_seed else seed + 1

    env = make(kind, 3, Adding)
    assert env.set_seed(5) == 8
    assert [seeds[-1] for seeds in env.map(lambda child: child.seeds)] == [5, 6, 7]
    reference = TorchRLSerialEnv(3, Adding, shared_memory=False)
    assert reference.set_seed(5) == 8
    reference.close()


@pytest.mark.parametrize("kind", BOTH)
def test_item_100_static_seed(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    assert env.set_seed(11, static_seed=True) == 11
    assert env.map(lambda child: child.seeds) == [[11]] * 3


def test_item_101_the_rule_of_the_chain(make: Any) -> None:
    env = make("serial", 1, Counter)
    for seed in (0, 1, 12345, 2**32 - 2):
        assert env.set_seed(seed) == next_seed(seed)
    assert env.set_seed(None) is None


@pytest.mark.parametrize("child", [Counter, lambda: GymEnv("CartPole-v1")])
def test_item_102_the_same_final_seed(child: Any, make: Any) -> None:
    envs = [make(kind, 3, child) for kind in BOTH]
    reference = TorchRLSerialEnv(3, child, shared_memory=False)
    assert len({env.set_seed(3) for env in (*envs, reference)}) == 1
    reference.close()


def test_item_103_seeds_are_remembered(make: Any) -> None:
    env = make("parallel", 3, Counter)
    following = env.set_seed(8)
    assert env._seeds[0] == 8
    assert env._seeds == [seeds[0] for seeds in env.map(lambda child: child.seeds)]
    assert next_seed(env._seeds[-1]) == following


@pytest.mark.parametrize("kind", BOTH)
def test_item_104_moving_does_not_seed_again(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.set_seed(8)
    env.reset()
    env.step(acting(env, 1.0))
    assert env.to("cpu") is env
    assert env.map(lambda child: len(child.seeds)) == [1, 1]
    assert column(env.step(acting(env, 1.0).to("cpu"))["next"]) == [2, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_item_105_set_seed_none(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset()
    assert env.set_seed(None) is None
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]
