"""PARITY 2.1: what TorchRL's batched envs have got since."""

from __future__ import annotations

import functools
import os
import resource
import warnings
from typing import Any

import pytest
import torch
from parity_cases import BOTH, acting, column, diary_of, mask, open_batched
from parity_envs import (
    Counter,
    Dice,
    HomeBound,
    Recurrent,
    SnapshotCounter,
    StatefulCounter,
    Waiting,
    Writer,
)
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    EnvCreator,
    GymEnv,
    RewardSum,
    TransformedEnv,
)
from torchrl.testing.mocking_classes import CountingEnv, EnvWithDynamicSpec, NestedCountingEnv

from shoal import ParallelEnv, RecvTimeout, SerialEnv

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of itself
    from torchrl.collectors import Collector

CLASSES = [SerialEnv, ParallelEnv]
STARTS = [{"start": 10 * n} for n in range(4)]


# --- 1: step_and_maybe_reset -----------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("child", [functools.partial(Counter, length=2), NestedCountingEnv, Writer])
def test_addition_01_step_and_maybe_reset(kind: str, child: Any, make: Any) -> None:
    env, plain = make(kind, 2, child), make("serial", 2, child)
    root, expected = env.reset(), plain.reset()
    action = env.full_action_spec.zero()
    for _ in range(5):
        stepped, root = env.step_and_maybe_reset(root.update(action))
        wanted, expected = EnvBase.step_and_maybe_reset(plain, expected.update(action))
        for made, right in ((stepped, wanted), (root, expected)):
            assert set(made.keys(True, True)) == set(right.keys(True, True))
            assert (made.exclude("text") == right.exclude("text")).all()
        assert "next" not in root.keys()  # noqa: SIM118
    assert env.map(lambda child: getattr(child, "num_resets", 0)) == plain.map(
        lambda child: getattr(child, "num_resets", 0)
    )


@pytest.mark.parametrize("kind", BOTH)
def test_addition_01_both_results_are_copies(kind: str, make: Any) -> None:
    env = make(kind, 2, functools.partial(Counter, length=2))
    stepped, root = env.step_and_maybe_reset(env.reset().update(acting(env, 1.0)))
    root["observation"].fill_(50)
    assert column(stepped["next"]) == [1, 1]
    stepped, root = env.step_and_maybe_reset(root.update(acting(env, 1.0)))
    assert column(stepped["next"]) == [2, 2]
    assert column(stepped["next"], "done") == [True, True]
    assert column(root) == [0, 0]
    assert column(root, "done") == [False, False]


# --- 2: partial steps ------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("verb", ["step", "step_and_maybe_reset"])
def test_addition_02_partial_steps(kind: str, verb: str, make: Any) -> None:
    env = make(kind, 3, Counter, create_env_kwargs=STARTS[:3])
    root = env.step_mdp(env.step(env.reset().update(acting(env, 1.0))))
    root.update(acting(env, 2.0)).set("_step", torch.tensor([True, False, True]))
    stepped = getattr(env, verb)(root)
    stepped = stepped[0] if isinstance(stepped, tuple) else stepped
    assert column(stepped["next"]) == [2, 11, 22]
    assert env.map(lambda child: child.count.item()) == [2, 11, 22]
    # A following step goes on with all of them.
    assert column(env.step(acting(env, 1.0))["next"]) == [3, 12, 23]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_02_a_mask_that_names_nobody(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    root = env.reset().update(acting(env, 1.0)).set("_step", torch.zeros(2, dtype=torch.bool))
    stepped = env.step(root)
    assert column(stepped["next"]) == [0, 0]
    assert env.map(lambda child: child.step_keys) == [[], []]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_02_in_rollouts_that_wait_for_all(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter, create_env_kwargs=[{"length": 2}, {"length": 4}])
    data = env.rollout(9, break_when_any_done=False, break_when_all_done=True)
    assert data.shape == (2, 4)
    assert data["next", "observation"][..., 0].tolist() == [[1, 2, 2, 2], [1, 2, 3, 4]]
    assert env.map(lambda child: child.count.item()) == [2, 4]


# --- 3: waiting ------------------------------------------------------------------------


def test_addition_03_waiting_costs_no_processor(make: Any, tmp_path: Any) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    env = make("parallel", 2, functools.partial(Waiting, fifo=str(fifo)), timeout=1.0)
    env.reset()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(RecvTimeout):
        env.step(acting(env, 1.0, 5.0))
    # Processor time, not elapsed time: a spinning wait takes all of it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5
    os.close(os.open(fifo, os.O_WRONLY))


# --- 4: configure_parallel -------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_addition_04_configure_parallel(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    same = env.configure_parallel(
        use_buffers=False,
        shared_memory=False,
        memmap=True,
        num_threads=2,
        num_sub_threads=2,
        non_blocking=False,
        daemon=True,
        shutdown_timeout=5.0,
    )
    assert same is env
    assert env._use_buffers is False
    assert env.non_blocking is False
    before = torch.get_num_threads()
    assert column(env.reset()) == [0, 0]
    if kind == "parallel":
        assert torch.get_num_threads() == 2
        assert env.map(lambda child: torch.get_num_threads()) == [2, 2]
    with pytest.raises(RuntimeError, match="started"):
        env.configure_parallel(num_threads=3)
    env.close()
    assert torch.get_num_threads() == before
    env.configure_parallel(num_threads=1, use_buffers=None)
    assert env._use_buffers is False


def test_addition_04_start_method(make: Any) -> None:
    env = make("parallel", 2, Counter)
    assert env.configure_parallel(mp_start_method="spawn")._mp_start_method == "spawn"


def test_addition_04_other_envs_say_no() -> None:
    with pytest.raises(NotImplementedError, match="configure_parallel"):
        Counter().configure_parallel(num_threads=1)


# --- 5 and 6: views --------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("index", "chosen"),
    [
        (1, [1]),
        (-1, [3]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        ([3, 0], [3, 0]),
        (torch.tensor([2, 1]), [2, 1]),
    ],
)
def test_addition_05_views(kind: str, index: Any, chosen: list[int], make: Any) -> None:
    env = make(kind, 4, Counter, create_env_kwargs=STARTS)
    env.reset()
    view = env[index]
    assert isinstance(view, type(env))
    assert view.batch_size == (len(chosen),)
    assert view.num_workers == len(chosen)
    assert not view.is_closed
    stepped = view.step(acting(view, *range(1, len(chosen) + 1)))
    assert column(stepped["next"]) == [10 * n + 1 for n in chosen]
    assert column(stepped["next"], "reward") == list(range(1, len(chosen) + 1))
    # The workers are shared: the others have not moved.
    counts = [10 * n + (n in chosen) for n in range(4)]
    assert env.map(lambda child: child.count.item()) == counts
    assert column(env.step(acting(env, 1.0))["next"]) == [n + 1 for n in counts]
    assert view.map(lambda child: child.start) == [10 * n for n in chosen]
    assert column(view.reset()) == [10 * n for n in chosen]
    assert list(view.pid()) == [list(env.pid())[n] for n in chosen]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_05_indices_that_name_nobody(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    env.reset()
    for boolean in (True, torch.tensor([True, False, True]), [True, False, True]):
        with pytest.raises(NotImplementedError, match=r"(?i)boolean"):
            env[boolean]
    for empty in ([], slice(2, 2), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(IndexError):
            env[empty]
    for outside in (3, -4, [0, 5]):
        with pytest.raises(IndexError):
            env[outside]
    with pytest.raises(IndexError, match="twice"):
        env[[0, 0]]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_05_life_of_a_view(kind: str, make: Any) -> None:
    env = make(kind, 3, Counter)
    env.reset()
    view, other = env[:2], env[2]
    view.close()
    assert view.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        view.reset()
    assert not env.is_closed
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 1, 1]
    assert column(other.step(acting(other, 1.0))["next"]) == [2]
    env.close()
    with pytest.raises(RuntimeError, match="parent"):
        other.step(acting(other, 1.0))
    assert other.is_closed


@pytest.mark.parametrize("kind", BOTH)
def test_addition_05_a_view_keeps_its_parent(kind: str) -> None:
    env = open_batched(kind, 2, Counter)
    env.reset()
    view = env[1]
    inner = env.__dict__
    del env
    assert column(view.step(acting(view, 1.0))["next"]) == [1]
    inner["_engine"].close()


@pytest.mark.parametrize("kind", BOTH)
def test_addition_05_rollouts_and_views_of_views(kind: str, make: Any) -> None:
    env = make(kind, 4, functools.partial(Counter, length=3), create_env_kwargs=STARTS)
    env.reset()
    view = env[[3, 1, 0]][1:]
    data = view.rollout(4, break_when_any_done=False)
    assert data["next", "observation"][..., 0].tolist() == [[11, 12, 13, 11], [1, 2, 3, 1]]
    assert env.map(lambda child: child.num_resets) == [3, 3, 1, 1]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_06_writing_a_snapshot(kind: str, make: Any) -> None:
    env = make(kind, 3, SnapshotCounter)
    env.reset()
    source = SnapshotCounter(start=40)
    env[1] = source
    assert env.map(lambda child: child.count.item()) == [0, 40, 0]
    assert column(env.step(acting(env, 1.0))["next"]) == [1, 41, 1]
    env[[2, 0]] = [SnapshotCounter(start=5), SnapshotCounter(start=6)]
    assert column(env.step(acting(env, 1.0))["next"]) == [7, 42, 6]
    sources = make("serial", 2, SnapshotCounter, create_env_kwargs=STARTS[2:])
    sources.reset()
    env[:2] = sources
    assert env.map(lambda child: child.count.item()) == [20, 30, 6]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_06_what_cannot_be_written(kind: str, make: Any) -> None:
    env = make(kind, 3, SnapshotCounter)
    env.reset()
    with pytest.raises(ValueError, match=r"2.*1|1.*2"):
        env[:2] = SnapshotCounter()
    with pytest.raises(TypeError):
        env[0] = 5
    with pytest.raises(TypeError):
        env[0] = [5]
    with pytest.raises(NotImplementedError, match="ParallelEnv"):
        env[:2] = ParallelEnv(2, SnapshotCounter)
    plain = make(kind, 2, Counter)
    plain.reset()
    with pytest.raises(NotImplementedError, match="Counter"):
        plain[0] = Counter()
    assert column(plain.step(acting(plain, 1.0))["next"]) == [1, 1]


# --- 7: metadata from the workers ------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_addition_07_metadata_from_workers(kind: str, make: Any, tmp_path: Any) -> None:
    diary = tmp_path / "diary"
    env = make(kind, 2, lambda: Counter(diary=str(diary)), metadata_from_workers=True)
    assert not env.is_closed  # started at once
    notes = diary_of(diary)
    assert [what for what, _ in notes] == ["built", "built"]  # and none besides
    assert (os.getpid() in [pid for _, pid in notes]) is (kind == "serial")
    assert env._metadata_from_workers is True
    assert env.observation_spec["observation"].shape == (2, 1)
    assert env.rollout(3)["next", "observation"][..., 0].tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize("cls", CLASSES)
def test_addition_07_needs_no_buffers(cls: Any) -> None:
    with pytest.raises(RuntimeError, match="use_buffers"):
        cls(2, Counter, metadata_from_workers=True, use_buffers=True)


@pytest.mark.parametrize("kind", BOTH)
def test_addition_07_schemas_are_compared(kind: str, make: Any) -> None:
    with pytest.raises(RuntimeError, match=r"(?i)metadata|incompatible"):
        make(
            kind,
            2,
            Counter,
            metadata_from_workers=True,
            create_env_kwargs=[{"size": 1}, {"size": 2}],
        )


@pytest.mark.parametrize("kind", BOTH)
def test_addition_07_a_failure_has_its_traceback(kind: str, make: Any) -> None:
    def broken_maker() -> Any:
        raise LookupError("no world to live in")

    with pytest.raises(RuntimeError, match=r"(?s)broken_maker.*no world to live in"):
        make(kind, 2, broken_maker, metadata_from_workers=True)


# --- 8 and 9: starting and ending ------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("auto_wrap_envs", [False, True])
def test_addition_08_lambdas_need_no_wrapping(cls: Any, auto_wrap_envs: bool) -> None:
    maker = lambda: Counter()  # noqa: E731
    env = cls(2, maker, auto_wrap_envs=auto_wrap_envs)  # a warning would be an error here
    assert env._single_task
    assert env.create_env_fn[0] is env.create_env_fn[1]
    assert cls(2, [maker, maker], auto_wrap_envs=auto_wrap_envs)._single_task


def test_addition_09_close_waits_only_so_long(make: Any, tmp_path: Any) -> None:
    fifo = tmp_path / "never opened by others"
    os.mkfifo(fifo)
    parent = os.getpid()

    class Clinging(Counter):
        def close(self, **kwargs: Any) -> None:
            if os.getpid() != parent:
                os.close(os.open(fifo, os.O_RDONLY))  # for ever

    env = make("parallel", 2, Clinging, shutdown_timeout=0.3, daemon=True)
    env.reset()
    pids = list(env.pid())
    env.close()  # the leak check sees that the workers are gone
    assert env.is_closed
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_addition_09_a_failed_start_is_cleaned_up(make: Any) -> None:
    parent = os.getpid()

    def maker(start: int = 0) -> Any:
        if os.getpid() != parent and start:
            raise LookupError("not here")
        return Counter()

    kwargs = [{"start": 0}, {"start": 1}]
    env = make("parallel", 2, maker, create_env_kwargs=kwargs, num_threads=2)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="not here"):
        env.start()
    assert env.is_closed
    assert torch.get_num_threads() == before
    env.update_kwargs({"start": 0})
    assert column(env.reset()) == [0, 0]


# --- 10 to 13: data that is not fresh, and attributes ----------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_addition_10_chained_attributes(kind: str, make: Any) -> None:
    env = make(kind, 2, lambda: TransformedEnv(Counter(start=3), Compose(RewardSum())))
    env.reset()
    if kind == "parallel":  # T has it there only
        assert list(env.base_env.start) == [3, 3]
        assert env.base_env.add(1) == [4, 4]
        with pytest.raises(AttributeError):
            env.base_env._private  # noqa: B018
        with pytest.raises(AttributeError, match="colour"):
            list(env.base_env.colour)


@pytest.mark.parametrize("kind", BOTH)
def test_addition_11_non_tensor_values_of_others(kind: str, make: Any) -> None:
    env = make(kind, 3, Writer, create_env_kwargs=[{"letter": letter} for letter in "agx"])
    root = env.reset().update(acting(env, 1.0))
    stepped = env.step(root.set("_step", torch.tensor([True, False, True])))
    assert stepped["next", "text"] == ["b", "g", "y"]
    root = env.step_mdp(stepped)
    made = env.reset(root.set("_reset", mask(False, False, True)))
    assert made["text"] == ["b", "g", "x"]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_11_stacked_non_tensor_specs(kind: str, make: Any) -> None:
    env = make(kind, 2, [lambda: Writer(letter="a"), lambda: Writer(letter="p")])
    assert env._non_tensor_keys == ["text"]
    assert env.step(env.reset().update(acting(env, 1.0)))["next", "text"] == ["b", "q"]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_12_last_outputs_without_buffers(kind: str, make: Any) -> None:
    env = make(kind, 3, EnvWithDynamicSpec)
    env.reset()
    env.step(TensorDict({"action": torch.zeros(3, 2)}, [3]))
    made = env.reset(TensorDict({"_reset": mask(False, True, False)}, [3]))
    assert isinstance(made, LazyStackedTensorDict)
    rows = [row["observation"] for row in made.unbind(0)]
    assert [row.shape for row in rows] == [(3, 2, 2), (3, 1, 2), (3, 2, 2)]
    assert [row.max().item() for row in rows] == [1.0, 0.0, 1.0]
    plain = make(kind, 2, Counter, use_buffers=False)
    plain.reset()
    plain.step(acting(plain, 1.0))
    assert column(plain.reset(TensorDict({"_reset": mask(False, True)}, [2]))) == [1, 0]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("child", [Counter, functools.partial(GymEnv, "CartPole-v1")])
def test_addition_13_compact_observations(kind: str, child: Any, make: Any) -> None:
    env = make(kind, 2, child)
    action = env.full_action_spec.rand()["action"]
    policy = TensorDictModule(lambda seen: action, ["observation"], ["action"])
    collector = Collector(env, policy, frames_per_batch=8, total_frames=8, compact_obs=True)
    (data,) = [batch.clone() for batch in collector]
    collector.shutdown()
    assert "observation" not in data["next"].keys()  # noqa: SIM118
    assert {"reward", "done", "terminated"} <= set(data["next"].keys())
    if child is Counter:
        assert data["observation"][..., 0].tolist() == [[0, 1, 2, 3]] * 2


# --- 14 to 20 --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_addition_14_reset_into_a_state(kind: str, make: Any) -> None:
    env = make(kind, 2, StatefulCounter)
    assert env._supports_set_state is True
    env.reset(set_state=False)
    places = TensorDict({"place": torch.tensor([[30], [40]])}, [2])
    assert column(env.reset(places.clone(), set_state=True)) == [30, 40]
    assert column(env.step(acting(env, 1.0))["next"]) == [31, 41]
    assert column(env.reset(places.clone(), set_state=False)) == [0, 0]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_14_only_if_every_child_supports_it(kind: str, make: Any) -> None:
    plain = make(kind, 2, Counter)
    assert plain._supports_set_state is False
    with pytest.raises(NotImplementedError, match="set_state"):
        plain.reset(TensorDict({}, [2]), set_state=True)
    mixed = make(kind, 2, [StatefulCounter, Counter])
    assert mixed._supports_set_state is False


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("as_creator", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_addition_15_transforms_that_refuse(cls: Any, as_creator: bool, several: bool) -> None:
    def maker() -> Any:
        return TransformedEnv(Counter(), Compose(RewardSum(), HomeBound()))

    made = EnvCreator(maker) if as_creator else maker
    with pytest.raises(RuntimeError, match="HomeBound belongs outside"):
        cls(2, [made, Counter] if several else made)


@pytest.mark.parametrize("kind", BOTH)
def test_addition_15_such_transforms_work_outside(kind: str, make: Any) -> None:
    env = TransformedEnv(make(kind, 2, Counter), HomeBound())
    assert env.rollout(3)["next", "observation"][..., 0].tolist() == [[1, 2, 3]] * 2


class OnlyTerminated(CountingEnv):
    """Its done spec is not completed."""

    auto_complete_done_specs = False

    def __init__(self) -> None:
        super().__init__()
        self.full_done_spec = Composite(
            done=Binary(1, shape=(1,), dtype=torch.bool), shape=self.batch_size
        )

    def _step(self, tensordict: Any) -> Any:
        return super()._step(tensordict).exclude("terminated")

    def _reset(self, tensordict: Any, **kwargs: Any) -> Any:
        return super()._reset(tensordict, **kwargs).exclude("terminated")


@pytest.mark.parametrize("cls", CLASSES)
def test_addition_17_the_done_spec_of_the_metadata_is_final(cls: Any) -> None:
    assert cls.auto_complete_done_specs is False
    env = cls(2, OnlyTerminated)
    assert set(env.full_done_spec.keys()) == {"done"}
    complete = cls(2, CountingEnv)
    assert set(complete.full_done_spec.keys()) == {"done", "terminated"}


def test_addition_18_global_generators_are_seeded_in_workers(make: Any) -> None:
    env = make("parallel", 2, Dice)
    draws = []
    for _ in range(2):
        env.set_seed(3)
        draws.append(env.rollout(3))
    for name in ("torch", "numpy", "python"):  # torch alone in T; see D13
        assert torch.equal(draws[0]["next", name], draws[1]["next", name])
        assert not torch.equal(draws[0]["next", name][0], draws[0]["next", name][1])


def test_addition_19_make_parallel() -> None:
    env = ParallelEnv.make_parallel(Counter, num_envs=3, create_env_kwargs={"start": 1})
    assert type(env) is ParallelEnv
    assert env.batch_size == (3,)
    env = ParallelEnv.make_parallel(2, Counter)
    assert type(env) is ParallelEnv
    assert env.batch_size == (2,)


@pytest.mark.parametrize("kind", BOTH)
def test_addition_20_variants_of_a_creator(kind: str, make: Any) -> None:
    creator = EnvCreator(Counter, start=1)
    variant = creator.make_variant(length=3)
    env = make(kind, 2, variant)
    assert column(env.reset()) == [1, 1]
    assert list(env.length) == [3, 3]


@pytest.mark.parametrize("kind", BOTH)
def test_addition_01_preset_next_entries_of_recurrent_policies(kind: str, make: Any) -> None:
    class Policy(torch.nn.Module):
        def forward(self, observation: Any, hidden: Any) -> Any:
            return torch.ones(2, 1), hidden + 1

    env = make(kind, 2, Recurrent)
    policy = TensorDictModule(Policy(), ["observation", "hidden"], ["action", ("next", "hidden")])
    data = env.rollout(4, policy, break_when_any_done=False)
    assert data["hidden"][0, :, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert data["next", "seen"][0, :, 0].tolist() == [3.0, 6.0, 9.0, 12.0]
    assert isinstance(env.observation_spec["hidden"], Unbounded)
