"""What has to come out, said in numbers: where TorchRL's own is wrong, or has no answer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from children_cases import SEED, assert_same, open_oracle, open_ours
from children_envs import Counter, DoneOnly, Teams, Walker, Weighted, Words, dressed
from children_scripts import only_action
from tensordict import TensorDict
from torchrl.envs import (
    EnvCreator,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
    VecNormV2,
    check_env_specs,
    step_mdp,
)
from torchrl.envs import SerialEnv as TorchRLSerialEnv
from torchrl.testing.mocking_classes import (
    CountingEnv,
    EnvWithMetadata,
    EnvWithTensorClass,
    NestedCountingEnv,
)

from shoal.torchrl import SerialEnv

if TYPE_CHECKING:
    from collections.abc import Iterator

P = functools.partial
WAYS = ["serial", "2 processes"]


@pytest.fixture
def open_env() -> Iterator[Any]:
    envs = []

    def open_one(way: str, makers: Any, **options: Any) -> Any:
        envs.append(open_ours(way, makers, **options))
        return envs[-1]

    yield open_one
    while envs:  # pytest holds the list for longer, and creators hold shared memory
        envs.pop().close(raise_if_closed=False)


def column(*values: Any) -> torch.Tensor:
    return torch.tensor(values).unsqueeze(-1)


# --- flags -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("autoreset", [False, True])
def test_done_alone_means_terminated(way: str, autoreset: bool, open_env: Any) -> None:
    # TorchRL's buffered SerialEnv leaves `terminated` false for ever (D24).
    env = open_env(way, [P(DoneOnly, n) for n in (1, 2, 3)])
    root = env.reset()
    assert not root["terminated"].any()
    for t in range(1, 4):
        root = env.rand_action(root)
        if autoreset:
            td, root = env.step_and_maybe_reset(root)
        else:
            td = env.step(root)
            root = step_mdp(td)
        lengths = torch.tensor([1, 2, 3])
        ended = (t % lengths == 0) if autoreset else (t >= lengths)
        assert torch.equal(td["next", "done"].squeeze(-1), ended)
        assert torch.equal(td["next", "terminated"].squeeze(-1), ended)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrap", [False, True])
def test_done_alone_below_a_transform(way: str, wrap: bool, open_env: Any) -> None:
    env = open_env(way, P(DoneOnly, 2))
    env = TransformedEnv(env, StepCounter()) if wrap else env
    data = env.rollout(40, break_when_any_done=False)
    assert torch.equal(data["next", "terminated"], data["next", "done"])
    assert int(data["next", "done"].sum()) == 60


# --- masks -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_alone_leaves_the_others_where_they_are(way: str, open_env: Any) -> None:
    # TorchRL's own returns outdated rows here, or zeros.
    env = open_env(way, P(CountingEnv, max_steps=100))
    env.reset()
    root = None
    for _ in range(103):
        td = env.step(TensorDict({"action": torch.ones(3, 1, dtype=torch.int8)}, [3]))
        root = step_mdp(td)
    assert root is not None
    assert root["done"].all()
    assert torch.equal(root["observation"], column(103, 103, 103).int())
    mask = column(True, False, False)
    root = env.reset(TensorDict({"_reset": mask}, [3]))
    mask.fill_(True)
    assert torch.equal(root["observation"], column(0, 103, 103).int())
    assert torch.equal(root["done"], column(False, True, True))
    assert torch.equal(root["terminated"], column(False, True, True))
    assert "_reset" not in root
    nobody = env.reset(TensorDict({"_reset": column(False, False, False)}, [3]))
    assert torch.equal(nobody["observation"], column(0, 103, 103).int())
    td = env.step(TensorDict({"action": torch.ones(3, 1, dtype=torch.int8)}, [3]))
    assert torch.equal(td["next", "observation"], column(1, 104, 104).int())


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_agents_alone(way: str, open_env: Any) -> None:
    env = open_env(way, P(NestedCountingEnv, max_steps=1))
    root = env.reset()
    for _ in range(3):
        action = torch.ones(3, 3, 1, dtype=torch.int8)
        root = step_mdp(env.step(root.set(("data", "action"), action)))
    mask = torch.zeros(3, 3, 1, dtype=torch.bool)
    mask[1] = True
    inner = TensorDict({"_reset": mask}, [3, 3])
    root = env.reset(TensorDict({"data": inner}, [3]))
    assert root["data", "states"][:, 0, 0].tolist() == [3, 0, 3]
    assert root["data"].batch_size == (3, 3)


@pytest.mark.parametrize("way", WAYS)
def test_part_of_the_agents(way: str, open_env: Any) -> None:
    """The red agents end one by one, and only those who ended begin again."""
    env = open_env(way, P(Teams, 1))
    alone = Teams(1)
    root, own = env.reset(), alone.reset()
    for _ in range(9):
        action = {
            name: torch.ones(3, k, dtype=torch.int64) for name, k in (("red", 3), ("blue", 2))
        }
        for name in action:
            root.set((name, "move"), action[name])
            own.set((name, "move"), action[name][0])
        td, root = env.step_and_maybe_reset(root)
        own_td, own = alone.step_and_maybe_reset(own)
        for row in range(3):
            assert_same(td[row]["next"], own_td["next"])
            assert_same(root[row], own)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["transformed", "serial of torchrl", "serial"])
def test_step_masks_finer_than_a_worker(way: str, kind: str, open_env: Any) -> None:
    """As the children alone would do; TorchRL's own wants masks of whole workers."""
    makers = {
        "transformed": P(dressed, P(Counter, 3, batch_size=(2,)), "sum only"),
        "serial of torchrl": P(TorchRLSerialEnv, 2, P(Counter, 3)),
        "serial": P(SerialEnv, 2, P(Counter, 3)),
    }
    maker = makers[kind]
    env = open_env(way, maker)
    alone = [maker() for _ in range(3)]
    seed = SEED
    env.set_seed(SEED)
    for child in alone:
        seed = child.set_seed(seed)
    root, own = env.reset(), [child.reset() for child in alone]
    for t in range(5):
        mask = torch.tensor([[(t >> k) % 2 == 0, (t + k) % 3 == 0] for k in range(3)])
        root = env.rand_action(root).set("_step", mask)
        td = env.step(root)
        for k, child in enumerate(alone):
            if kind == "transformed" and not mask[k].any():
                continue  # nothing to compare with: it does not say what it skipped
            own_td = child.step(own[k].set("action", root["action"][k]).set("_step", mask[k]))
            for key in ("observation", "done"):
                assert_same(td["next", key][k], own_td["next", key], f"{t} {k} {key}")
            own[k] = step_mdp(own_td).exclude("_step")
        root = step_mdp(td).exclude("_step")
    for child in alone:
        child.close()


@pytest.mark.parametrize("way", WAYS)
def test_idle_rows_of_unlike_children(way: str, open_env: Any) -> None:
    """They repeat the root; TorchRL's own forgets the entries that not all rows have."""
    env = open_env(way, [P(Counter, 9), P(Counter, 9, key="other"), P(Counter, 9, size=1)])
    root = env.reset()
    root = step_mdp(env.step(env.rand_action(root)))
    td = env.step(env.rand_action(root).set("_step", torch.tensor([True, False, True])))
    after = td["next"]
    assert torch.equal(after[1]["other"], root[1]["other"])
    assert not torch.equal(after[0]["observation"], root[0]["observation"])
    assert after[2]["observation"].shape == (1,)
    assert "observation" not in after[1]


@pytest.mark.parametrize("way", WAYS)
def test_records_of_a_class_of_their_own(way: str, open_env: Any) -> None:
    """TorchRL's SerialEnv can neither reset nor step part of these children."""
    env = open_env(way, EnvWithTensorClass)
    root = env.reset()
    assert type(root["tc"]) is EnvWithTensorClass.tc_cls
    assert root["tc"].device is None
    mask = torch.tensor([True, False, True])
    after = env.step(env.rand_action(root).set("_step", mask))["next"]
    assert [row.get("tc").field0 for row in after.unbind(0)] == ["1", "0", "1"]
    assert [row.get("tc").field1.item() for row in after.unbind(0)] == [1, 0, 1]
    assert [row.get("tc").field0 for row in env.reset().unbind(0)] == ["0", "0", "0"]


# --- what children remember --------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_stateless_children_remember_what_they_returned(way: str, open_env: Any) -> None:
    """The caller passes actions only; TorchRL's SerialEnv raises a KeyError."""
    env = open_env(way, P(Walker, 9))
    root = env.reset()
    position = root["position"].clone()
    for _ in range(3):
        action = torch.full((3, 2), 0.25)
        td = env.step(TensorDict({"action": action}, [3]))
        position = position + action / 4
        assert torch.equal(td["next", "position"], position)
    # What the caller does pass counts more.
    given = TensorDict({"action": action, "position": torch.zeros(3, 2)}, [3])
    td, root = env.step_and_maybe_reset(given)
    assert torch.equal(td["next", "position"], action / 4)
    assert torch.equal(td["next", "steps"], column(4, 4, 4))


@pytest.mark.parametrize("way", WAYS)
def test_non_tensor_states_are_remembered(way: str, open_env: Any) -> None:
    env = open_env(way, EnvWithMetadata)
    env.reset()
    for t in range(1, 4):
        td = env.step(only_action(env))
        assert td["next", "non_tensor"] == [t] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "makers",
    [
        P(Counter, 2),
        P(Counter, batch_size=(2,)),
        P(Teams, 1),
        P(dressed, P(Counter, 2), "usual"),
        [P(Words, name, text_action=False) for name in "abc"],
        P(Walker, 3),
    ],
    ids=["counter", "batched", "teams", "dressed", "words", "stateless"],
)
@pytest.mark.parametrize("wrap", [False, True])
def test_specs_hold(way: str, makers: Any, wrap: bool, open_env: Any) -> None:
    env = open_env(way, makers)
    check_env_specs(TransformedEnv(env, RewardSum()) if wrap else env, seed=SEED)


def test_reset_returns_the_object_it_was_given(open_env: Any) -> None:
    env = open_env("serial", P(Counter, 2))
    root = env.reset()
    assert env.reset(root.set("_reset", column(True, False, True))) is root
    assert env.step(env.rand_action(root)) is root


# --- states ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_states_are_saved_and_loaded(way: str, open_env: Any) -> None:
    makers = [P(Counter, 9), P(Counter, 8), P(Counter, 7)]
    env, oracle = open_env(way, makers), open_oracle(makers)
    for one in (env, oracle):
        one.set_seed(SEED)
        one.rollout(4, lambda td: td.set("action", torch.zeros(3, 2)))
    state = env.state_dict()
    expected = oracle.state_dict()
    assert list(state) == list(expected) == ["worker0", "worker1", "worker2"]
    for worker, entries in expected.items():
        assert state[worker].keys() == entries.keys()
        for name, value in entries.items():
            assert torch.equal(state[worker][name], value), (worker, name)
    still = TensorDict({"action": torch.zeros(3, 2)}, [3])
    before = env.step(still.clone())["next", "observation"]
    env.step(still.clone())
    env.load_state_dict(state)
    assert torch.equal(env.step(still.clone())["next", "observation"], before)
    env.load_state_dict(state["worker0"])  # one for all
    counts = {worker: entries["count"].item() for worker, entries in env.state_dict().items()}
    assert counts == {"worker0": 4, "worker1": 4, "worker2": 4}
    oracle.close()


def normed(kind: Any) -> Any:
    return TransformedEnv(Counter(9), kind(in_keys=["observation"], decay=1.0))


@pytest.mark.filterwarnings("ignore:VecNorm wasn't initialized")
@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
@pytest.mark.parametrize("way", ["serial", "1 process", "2 processes", "one each"])
def test_shared_statistics(way: str, kind: Any, open_env: Any) -> None:
    """A creator's envs share them, in whatever process they are."""
    maker, other = EnvCreator(P(normed, kind)), EnvCreator(P(normed, kind))
    env, oracle = open_env(way, maker), open_oracle(other)
    still = TensorDict({"action": torch.zeros(3, 2)}, [3])
    for one in (env, oracle):
        one.set_seed(SEED)
        one.reset()
        for _ in range(5):
            one.step(still.clone())
    states, expected = env.state_dict(), oracle.state_dict()
    for name, value in expected["worker0"].items():
        for worker in states:
            found = states[worker][name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found, value, msg=f"{worker} {name}")
    assert states["worker0"].keys() == expected["worker0"].keys()
    oracle.close()
    del maker, other


# --- gradients -----------------------------------------------------------------------------


def rolled(env: Any, weight: torch.Tensor) -> Any:
    env.reset()
    loss = torch.zeros(())
    root = env.reset()
    for _ in range(4):
        td, root = env.step_and_maybe_reset(root.set("action", root["observation"] * weight))
        loss = loss + td["next", "observation"].sum() + td["next", "reward"].sum()
    loss.backward()
    return loss.detach(), weight.grad


@pytest.mark.parametrize("options", [{"share_individual_td": True}, {"use_buffers": False}])
def test_gradients_flow_through_a_serial_env(options: dict[str, Any], open_env: Any) -> None:
    makers = [P(Weighted, 2), P(Weighted, 3), P(Weighted, 9)]
    oracle = open_oracle(makers, **options)
    expected = rolled(oracle, torch.full((1,), 0.5, requires_grad=True))
    env = open_env("serial", makers, **options)
    loss, gradient = rolled(env, torch.full((1,), 0.5, requires_grad=True))
    assert gradient is not None
    assert gradient.item() != 0
    assert torch.equal(loss, expected[0])
    assert torch.equal(gradient, expected[1])
    oracle.close()


def test_gradients_are_refused_where_they_cannot_survive(open_env: Any) -> None:
    env = open_env("serial", P(Weighted, 2))
    root = env.reset()
    with pytest.raises(Exception, match="share_individual_td"):
        env.step(root.set("action", torch.ones(3, 1, requires_grad=True)))


def test_processes_record_no_gradients(open_env: Any) -> None:
    env = open_env("2 processes", P(Weighted, 2))
    root = env.reset()
    td = env.step(root.set("action", torch.ones(3, 1, requires_grad=True)))
    assert not td["next", "observation"].requires_grad
    assert torch.equal(td["next", "observation"].detach(), torch.full((3, 1), 3.0))
