"""PARITY 2.3: what is wrong in TorchRL 0.14.1, and has to be right here."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
import resource
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from parity_cases import BOTH, acting, column, mask
from parity_envs import Counter, Dice, Locked, OnlyDone, SnapshotCounter, Waiting
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs import EnvCreator, GymWrapper, RewardSum, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import CountingEnv

from shoal import EnvError, ParallelEnv, RecvTimeout, SerialEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D01_step_after_load_is_never_stale(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnv)
    env.reset()
    env.load_state_dict(env.state_dict())
    for n in (1, 2, 3):
        assert column(env.step(env.full_action_spec.one())["next"]) == [n, n]


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D01_step_after_writing_back_is_never_stale(kind: str, make: Any) -> None:
    env = make(kind, 2, SnapshotCounter)
    env.reset()
    env[0] = SnapshotCounter(start=50)
    assert column(env.step(acting(env, 1.0))["next"]) == [51, 1]
    assert column(env.step(acting(env, 1.0))["next"]) == [52, 2]


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D02_an_env_that_was_closed_can_be_pickled(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset()
    env.close()
    copied = pickle.loads(pickle.dumps(env))
    assert column(copied.reset()) == [0, 0]
    copied.close()


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D03_an_exception_in_a_step_costs_nothing_else(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    env.reset()
    pids = list(env.pid())
    with pytest.raises(EnvError, match=r"(?s)Env 1.*step.*no step today") as caught:
        env.step(acting(env, 1.0, -1.0, 1.0))
    assert isinstance(caught.value.__cause__, ValueError)
    assert "_step" in str(caught.value)  # the traceback of the worker
    assert not env.is_closed
    assert list(env.pid()) == pids
    assert env.map(lambda child: child.count.item()) == [1, 0, 1]  # the others have stepped
    assert column(env.reset()) == [0, 0, 0]
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1, 1]
    env.close()
    assert env.is_closed


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D03_under_a_transform(kind: str, make: Any) -> None:
    base = make(kind, 2, Counter)
    env = TransformedEnv(base, RewardSum())
    root = env.reset()
    with pytest.raises(EnvError, match="no step today"):
        env.step(root.update(acting(env, 1.0, -1.0)))
    root = env.reset()
    assert column(env.step(root.update(acting(env, 1.0)))["next"], "episode_reward") == [1.0, 1.0]


def test_defect_D03_a_dead_worker_can_be_closed_and_forgotten(make: Any) -> None:
    env = make("parallel", 2, Counter)
    env.reset()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?i)worker"):
            env.step(acting(env, -2.0))
    env.close()
    assert env.is_closed
    assert column(env.reset()) == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D04_an_exception_in_a_call_costs_nothing_else(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter, create_env_kwargs=[{"start": n} for n in (1, 2, 3)])
    env.reset()
    with pytest.raises(LookupError, match="no such thing") as caught:
        env.fail()
    assert any("Env 0" in note for note in caught.value.__notes__)
    with pytest.raises(LookupError, match="not in mine") as caught:
        env.fail_at_two()
    assert any("Env 1" in note for note in caught.value.__notes__)
    with pytest.raises(TypeError):
        env.add("wrong", "arguments", "and too many")
    assert column(env.step(acting(env, 1.0))["next"]) == [2, 3, 4]
    assert env.add(0)[1] == 2


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D05_set_seed_none_kills_nobody(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.set_seed(None)
    env.reset()
    pids = list(env.pid())
    env.set_seed(None)
    env.set_seed(None, static_seed=True)
    assert list(env.pid()) == pids
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D06_hasattr_starts_nothing(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    assert not hasattr(env, "colour")
    assert not hasattr(env, "add")
    assert env.is_closed
    env.reset()
    assert not hasattr(env, "colour")
    assert hasattr(env, "add")
    env.close()
    assert not hasattr(env, "add")
    assert env.is_closed


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["add", "colour", "_private", "_envs", "_workers"])
def test_defect_D07_attributes_of_a_closed_env(kind: str, name: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    with pytest.raises((RuntimeError, AttributeError)) as caught:
        getattr(env, name)
    assert not isinstance(caught.value, RecursionError)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("share", [None, True])
def test_defect_D08_a_reset_of_nobody(kind: str, share: Any, make: Any) -> None:
    env = make(kind, 2, Counter, share_individual_td=share)
    root = env.step_mdp(env.step(env.reset().update(acting(env, 1.0))))
    made = env.reset(root.clone().set("_reset", mask(False, False)))
    assert column(made) == [1, 1]
    assert column(env.reset(TensorDict({"_reset": mask(False, False)}, [2]))) == [1, 1]
    assert env.map(lambda child: child.num_resets) == [1, 1]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("verb", ["step", "step_and_maybe_reset"])
def test_defect_D09_partial_steps_of_batched_children(kind: str, verb: str, make: Any) -> None:
    env = make(kind, 2, Counter, create_env_kwargs={"batch_size": (3,)})
    root = env.reset().update(acting(env, 1.0))
    root["_step"] = torch.tensor([[True] * 3, [False] * 3])
    stepped = getattr(env, verb)(root)
    stepped = stepped[0] if isinstance(stepped, tuple) else stepped
    assert stepped["next", "observation"][..., 0].tolist() == [[1] * 3, [0] * 3]


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D15_a_collector_saves_the_state_of_the_workers(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnv)
    policy = TensorDictModule(
        lambda seen: torch.ones(2, 1, dtype=torch.int8), ["observation"], ["action"]
    )
    collector = Collector(env, policy, frames_per_batch=6, total_frames=60)
    next(iter(collector))
    state = copy.deepcopy(collector.state_dict())
    counts = [state["env_state_dict"][f"worker{i}"]["count"].item() for i in range(2)]
    assert counts == [3, 3]
    next(iter(collector))
    collector.load_state_dict(state)
    assert env.map(lambda child: child.count.item()) == [3, 3]
    collector.shutdown()


def test_defect_D10_waiting_for_a_call_costs_no_processor(make: Any, tmp_path: Path) -> None:
    # For steps: test_addition_03_waiting_costs_no_processor.
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def hang(child: Any) -> None:
        os.close(os.open(fifo, os.O_RDONLY))

    env = make("parallel", 2, Counter, timeout=1.0, shutdown_timeout=0.1)
    env.reset()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(TimeoutError):
        env.map(hang)
    # Processor time, not elapsed time: a spinning wait takes all of it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5


def test_defect_D11_calls_have_a_limit_too(make: Any, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert ParallelEnv(2, Counter)._options.timeout <= 600

    def hang(child: Any) -> None:
        os.close(os.open(fifo, os.O_RDONLY))

    env = make(
        "parallel", 2, functools.partial(Waiting, fifo=str(fifo)), timeout=0.3, shutdown_timeout=0.3
    )
    env.reset()
    with pytest.raises((RecvTimeout, TimeoutError)):
        env.map(hang)
    for verb in (env.state_dict, lambda: env.set_seed(1), lambda: env.add(1)):
        with pytest.raises(RuntimeError):  # nobody answers, and nothing hangs
            verb()
    env.close()
    assert env.is_closed


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D12_load_state_dict_hands_on_its_arguments(kind: str, make: Any) -> None:
    env = make(kind, 2, Locked)
    env.reset()
    env.load_state_dict(env.state_dict(), strict=False, assign=True)
    assert env.map(lambda child: child.loaded_with) == [{"strict": False, "assign": True}] * 2


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D12_a_failed_load_is_reported(kind: str, make: Any) -> None:
    env = make(kind, 2, CountingEnv)
    env.reset()
    with pytest.raises(RuntimeError, match="surplus"):
        env.load_state_dict(OrderedDict(surplus=torch.ones(1)))
    assert column(env.step(env.full_action_spec.one())["next"]) == [1, 1]


def test_defect_D13_all_generators_are_seeded(make: Any) -> None:
    for more in ({}, {"use_buffers": False}):
        env = make("parallel", 2, Dice, **more)
        env.set_seed(3)
        first = env.reset()
        env.set_seed(3)
        again = env.reset()
        for name in ("torch", "numpy", "python"):
            assert torch.equal(first[name], again[name])


def test_defect_D13_the_callers_generators_are_left_alone(make: Any) -> None:
    env = make("parallel", 2, Dice)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    expected = torch.rand(1).item(), np.random.random_sample(), random.random()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    env.set_seed(3)
    env.reset()
    assert (torch.rand(1).item(), np.random.random_sample(), random.random()) == expected


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D14_resets_below_a_transform_are_prepared(kind: str, make: Any) -> None:
    """The terminal observation stays, every end has one reset, and roots are fresh."""
    env = make(kind, 2, functools.partial(Counter, length=2))
    outer = TransformedEnv(env, RewardSum())
    policy = TensorDictModule(lambda seen: torch.ones(2, 1), ["observation"], ["action"])
    data = outer.rollout(40, policy, break_when_any_done=False)
    assert data["next", "observation"][..., 0].tolist() == [[1, 2] * 20] * 2
    assert data["observation"][..., 0].tolist() == [[0, 1] * 20] * 2
    assert data["next", "episode_reward"][..., 0].tolist() == [[1.0, 2.0] * 20] * 2
    # The last end is not followed by a reset, or by one that was prepared and not used.
    for count in env.map(lambda child: child.num_resets):
        assert count in (20, 21)


class NotingGym(gymnasium.Env):  # type: ignore[type-arg]
    """Ends at every second step, and writes a line at every reset."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Box(0, 1, (1,))

    def __init__(self, diary: str) -> None:
        self.diary = diary
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        with Path(self.diary).open("a") as file:
            file.write("reset\n")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return np.ones(1, np.float32), 0.0, self.count == 2, False, {}


@pytest.mark.parametrize("inside", [False, True], ids=["a plain GymEnv", "below a transform"])
def test_defect_D14_below_a_transform_an_end_costs_no_round_trip(
    inside: bool, make: Any, tmp_path: Path
) -> None:
    # Of these envs the generator is known, so that a reset may be prepared, and taken back.
    diary = tmp_path / "diary"

    def build() -> Any:
        env = GymWrapper(NotingGym(str(diary)))
        return TransformedEnv(env, StepCounter()) if inside else env

    outer = TransformedEnv(make("parallel", 2, build), RewardSum())
    root = outer.reset()
    came_with_the_reset = []
    for _ in range(60):
        stepped = outer.step(root.set("action", torch.ones(2, 1)))
        before = len(diary.read_text().splitlines())
        root = outer.maybe_reset(outer.step_mdp(stepped))
        came_with_the_reset.append(len(diary.read_text().splitlines()) - before)
    assert sum(came_with_the_reset[:10])
    assert not any(came_with_the_reset[40:])  # they were done with the steps before


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D15_the_state_of_the_workers_is_there(kind: str, make: Any) -> None:
    # TransformedEnv.state_dict is its transforms' by TorchRL's design; the base has the rest.
    env = TransformedEnv(make(kind, 2, CountingEnv), RewardSum())
    env.rollout(3)
    state = env.base_env.state_dict()
    assert list(state) == ["worker0", "worker1"]
    state = OrderedDict((key, {k: v.clone() for k, v in one.items()}) for key, one in state.items())
    env.rollout(3)
    env.base_env.load_state_dict(state)
    again = env.base_env.state_dict()
    assert all(torch.equal(again[key]["count"], state[key]["count"]) for key in state)


# That make_variant changes the creator's own kwargs is up to torchrl, whose class it is.


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D16_a_variant_has_specs_of_its_own(kind: str, make: Any) -> None:
    variant = EnvCreator(Counter, start=1).make_variant(size=3)
    env = make(kind, 2, variant)
    try:
        root = env.reset()
    except RuntimeError as error:  # its metadata are those of the creator, which is torchrl's doing
        assert "observation" in str(error)  # noqa: PT017
    else:
        assert root["observation"].shape == env.observation_spec["observation"].shape


@pytest.mark.parametrize("cls", [SerialEnv, ParallelEnv])
def test_defect_D16_a_creator_with_kwargs_needs_no_words(cls: Any) -> None:
    assert cls.__name__ in repr(cls(2, EnvCreator(Counter, start=1)))


@pytest.mark.parametrize("kind", BOTH)
def test_defect_D23_thread_counts_are_left_alone(kind: str, make: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        env = make(kind, 2, Counter)
        env.reset()
        assert torch.get_num_threads() == 3
        env.close()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("use_buffers", [None, False])
def test_defect_D24_done_without_terminated(kind: str, use_buffers: Any, make: Any) -> None:
    env = make(kind, 2, OnlyDone, use_buffers=use_buffers)
    step = TensorDict({"action": torch.zeros(2, 1)}, [2])
    env.reset()
    inner = env._step(step.copy())
    assert column(inner, "terminated") == column(inner, "done") == [True, True]
    env.reset()
    stepped, root = env.step_and_maybe_reset(step.copy())
    assert column(stepped["next"], "terminated") == [True, True]
    assert column(root, "terminated") == [False, False]


def test_defect_D25_workers_share_one_import_of_torch() -> None:
    """One interpreter imports torch; the workers are forked from it."""
    script = """
import os
import torch
from torchrl.testing.mocking_classes import CountingEnv
from shoal import ParallelEnv
env = ParallelEnv(2, CountingEnv, num_processes=2)
env.reset()
pids = env.map(lambda child: (os.getpid(), os.getppid(), id(__import__("torch").nn.Module)))
env.close()
(one, server, place), (other, same, again) = pids
assert one != other
assert server == same != os.getpid()
assert place == again  # at the same address: it was there before they were
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_defect_D25_gymnasium_workers_do_without_torch(make: Any) -> None:
    import gymnasium

    def loaded(child: Any) -> bool:
        return "torch" in sys.modules

    env = make("parallel", 2, lambda: gymnasium.make("CartPole-v1"), mp_start_method="forkserver")
    env.reset()
    assert env.map(loaded) == [False, False]
