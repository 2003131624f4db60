"""What every backend must do, as checks that need nothing but a way to open an engine.

Each check is a function of ``make_engine(factories, **options)``, which returns an open
`shoal.engine.Engine` over the backend in question; the check closes it. It passes by
returning and fails with an `AssertionError`. `CHECKS` lists them all, for a test runner
to parametrise over.

Example:
    >>> import functools
    >>> from shoal.engine import Engine
    >>> make_engine = functools.partial(Engine, backend="serial")
    >>> for check in CHECKS:
    ...     check(make_engine)  # doctest: +SKIP
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import shoal.testing.conformance_faults  # noqa: F401 - adds its checks to the list
from shoal.engine import ArraySpec, Batch, ObjectSpec
from shoal.errors import (
    EnvError,
    NoPendingCallError,
    PendingCallError,
    UsageError,
)
from shoal.testing._checks import (
    CHECKS,
    NUM_ENVS,
    Check,
    MakeEngine,
    actions_of,
    assert_same_batch,
    check,
    factories_of,
    lone_episodes,
    raises,
)

__all__ = ["CHECKS", "Check", "MakeEngine", "assert_same_batch"]


# --- results -----------------------------------------------------------------------


@check
def check_says_what_it_holds(make_engine: MakeEngine) -> None:
    """Counts, spec and state are right."""
    with make_engine(factories_of()) as engine:
        assert engine.num_envs == NUM_ENVS
        assert set(engine.spec.observation) == {("count",), ("draw",)}
        assert (engine.is_closed, engine.is_broken, engine.num_in_flight) == (False, False, 0)
        assert f"num_envs={NUM_ENVS}" in repr(engine)


@check
def check_reset_seeds_each_env(make_engine: MakeEngine) -> None:
    """One seed spreads, a list is taken as it is, options reach every env."""
    with make_engine(factories_of(), keep_infos=True) as engine:
        spread = engine.reset(seed=3)
        listed = engine.reset(seed=[3, 4, 5, 6], options={"level": 2})
        draws = [np.random.default_rng(3 + i).random(3) for i in range(NUM_ENVS)]
        for batch in (spread, listed):
            assert batch.observation["draw",].tolist() == np.asarray(draws).tolist()
            assert batch.env_ids.tolist() == list(range(NUM_ENVS))
            assert not batch.done.any()
            assert not batch.reward.any()
            assert len(batch.reset_rows) == 0
        assert listed.infos is not None
        assert [info["options"] for info in listed.infos] == [{"level": 2}] * NUM_ENVS
        assert [info["seed"] for info in listed.infos] == [3, 4, 5, 6]


@check
def check_steps_equal_lone_envs(make_engine: MakeEngine) -> None:
    """Trajectories, automatic resets included, are those of each env alone."""
    factories = factories_of(episode_length=3)
    rng = np.random.default_rng(1)
    actions = [rng.integers(0, 9, NUM_ENVS) for _ in range(10)]
    expected = lone_episodes(factories, 11, actions)
    with make_engine(factories) as engine:
        engine.reset(seed=11)
        for t, step_actions in enumerate(actions):
            batch = engine.step(step_actions)
            for i in range(NUM_ENVS):
                got = (
                    float(batch.reward[i]),
                    int(batch.observation["count",][i]),
                    float(batch.observation["draw",][i, 0]),
                )
                assert got == expected[i][t], f"env {i}, step {t}: {got} != {expected[i][t]}"


@check
def check_final_observation_is_kept(make_engine: MakeEngine) -> None:
    """Where an episode ends, the batch has its last observation and the next one's first."""
    factories = factories_of(episode_length=2, ends_by="truncated")
    factories[1] = replace(factories[1], episode_length=1, ends_by="terminated")
    with make_engine(factories, keep_infos=True) as engine:
        engine.reset(seed=0)
        batch = engine.step(actions_of())
        assert batch.reset_rows.tolist() == [1]
        assert batch.terminated.tolist() == [False, True, False, False]
        assert batch.observation["count",].tolist() == [1, 0, 1, 1]
        assert batch.final_observation["count",].tolist() == [1]
        batch = engine.step(actions_of())
        assert batch.reset_rows.tolist() == [0, 1, 2, 3]
        assert batch.truncated.tolist() == [True, False, True, True]
        assert batch.final_observation["count",].tolist() == [2, 1, 2, 2]
        assert batch.infos is not None
        assert batch.reset_infos is not None
        assert [info["count"] for info in batch.infos] == [2, 1, 2, 2]
        assert [info["episode"] for info in batch.reset_infos] == [2, 3, 2, 2]


@check
def check_steps_without_autoreset_go_on(make_engine: MakeEngine) -> None:
    """Without automatic resets an ended env is stepped on, until it is reset."""
    with make_engine(factories_of(episode_length=1)) as engine:
        engine.reset(seed=0)
        batch = engine.step(actions_of(), autoreset=False)
        assert batch.terminated.all()
        assert len(batch.reset_rows) == 0
        batch = engine.step(actions_of(), autoreset=False)
        assert batch.observation["count",].tolist() == [2] * NUM_ENVS
        assert not batch.done.any()


@check
def check_prepared_resets_change_nothing(make_engine: MakeEngine) -> None:
    """A loop of steps and plain resets gives the same with and without prefetching."""

    def run(prefetch: bool) -> list[Batch]:
        batches = []
        with make_engine(factories_of(episode_length=2), prefetch_resets=prefetch) as engine:
            batches.append(engine.reset(seed=5))
            for t in range(40):
                batches.append(engine.step(actions_of() + t, autoreset=False))
                ended = batches[-1].env_ids[batches[-1].done]
                if t == 31:
                    batches.append(engine.reset(env_ids=ended.tolist(), seed=9))
                elif len(ended):
                    batches.append(engine.reset(env_ids=ended.tolist()))
        return batches

    for batch, expected in zip(run(True), run(False), strict=True):
        assert_same_batch(batch, expected)


@check
def check_numeric_infos_travel(make_engine: MakeEngine) -> None:
    """Declared info entries arrive as arrays; what an env leaves out is zero."""
    info = {
        ("episode",): ArraySpec((), np.dtype(np.int64)),
        ("missing", "deep"): ArraySpec((2,), np.dtype(np.float32)),
    }
    with make_engine(factories_of(episode_length=2, info=info)) as engine:
        first = engine.reset(seed=0)
        assert first.info["episode",].tolist() == [1] * NUM_ENVS
        batch = engine.step(actions_of())
        assert batch.info["episode",].tolist() == [1] * NUM_ENVS
        assert batch.info["missing", "deep"].shape == (NUM_ENVS, 2)
        assert not batch.info["missing", "deep"].any()
        assert batch.infos is None


@check
def check_objects_and_infos_travel(make_engine: MakeEngine) -> None:
    """Leaves without a fixed shape and whole infos arrive, at resets and at ends too."""
    leaves = {("graph",): ObjectSpec("a graph"), ("x",): ArraySpec((2,), np.dtype(np.float32))}
    for reuses_buffers in (False, True):
        factories = factories_of(
            observation=leaves,
            episode_length=2,
            action={("say",): ObjectSpec()},
            reuses_buffers=reuses_buffers,
        )
        with make_engine(factories, keep_infos=True) as engine:
            batch = engine.reset(seed=1)
            assert [graph["count"] for graph in batch.observation["graph",]] == [0] * NUM_ENVS
            engine.step({("say",): ["a", "b", "c", "d"]})
            batch = engine.step({("say",): ["a", "bb", "ccc", "dddd"]})
            assert batch.infos is not None
            assert batch.reset_infos is not None
            assert [info["action"]["say"] for info in batch.infos] == ["a", "bb", "ccc", "dddd"]
            assert ["action" in info for info in batch.reset_infos] == [False] * NUM_ENVS
            graphs, finals = batch.observation["graph",], batch.final_observation["graph",]
            assert [graph["count"] for graph in graphs] == [0] * NUM_ENVS
            assert [graph["count"] for graph in finals] == [2] * NUM_ENVS
            assert batch.reward.astype(int).tolist() == [1, 2, 3, 4]


# --- ownership ---------------------------------------------------------------------


@check
def check_batches_never_change(make_engine: MakeEngine) -> None:
    """What was returned stays, whatever is called later and whatever envs reuse."""
    leaves = {
        ("count",): ArraySpec((), np.dtype(np.int64)),
        ("draw",): ArraySpec((3,), np.dtype(np.float64)),
        ("graph",): ObjectSpec(),
    }
    info = {("episode",): ArraySpec((), np.dtype(np.int64))}
    script: dict[str, Any] = {
        "observation": leaves,
        "info": info,
        "episode_length": 2,
        "reuses_buffers": True,
    }
    with make_engine(factories_of(**script), keep_infos=True) as engine:
        batches = [engine.reset(seed=2)]
        texts = [repr(batches[0])]
        for t in range(6):
            batches.append(engine.step(actions_of() + t))
            texts.append(repr(batches[-1]))
        engine.reset(env_ids=[1, 2])
    assert [repr(batch) for batch in batches] == texts


@check
def check_actions_stay_whose_they_are(make_engine: MakeEngine) -> None:
    """An env may keep and overwrite its action; the caller's arrays do not change."""
    action = {("move",): ArraySpec((3,), np.dtype(np.float64))}
    with make_engine(factories_of(action=action, abuses_actions=True)) as engine:
        engine.reset(seed=0)
        moves = np.ones((NUM_ENVS, 3))
        for t in range(3):
            engine.step({"move": moves * t})
        assert (moves == 1).all()
        assert (engine.step({"move": moves}).reward >= 3).all()
        for kept in engine.call("kept_actions"):
            assert len(kept) == 4
            assert all((action["move"] == 77).all() for action in kept)


# --- send and recv -----------------------------------------------------------------


@check
def check_subsets_come_back(make_engine: MakeEngine) -> None:
    """Some envs are sent in any order; they and no others come back, in order."""
    with make_engine(factories_of()) as engine:
        engine.reset(seed=0)
        engine.send(actions_of(30, 10), env_ids=[3, 1])
        assert engine.num_in_flight == 2
        batch = engine.recv()
        assert batch.env_ids.tolist() == [1, 3]
        assert batch.reward.astype(int).tolist() == [10, 30]
        assert engine.num_in_flight == 0
        engine.send(actions_of(5), env_ids=[0])
        engine.send(actions_of(6), env_ids=[2])
        one = engine.recv(min_envs=1, max_envs=1)
        other = engine.recv()
        assert sorted([*one.env_ids.tolist(), *other.env_ids.tolist()]) == [0, 2]
        counts = engine.step(actions_of()).observation["count",]
        assert counts.tolist() == [2, 2, 2, 2]


@check
def check_busy_envs_are_refused(make_engine: MakeEngine) -> None:
    """An env in flight takes no second call; the first one's result still comes."""
    with make_engine(factories_of()) as engine:
        engine.reset(seed=0)
        engine.send(actions_of(1, 2), env_ids=[1, 2])
        for call in (
            lambda: engine.send(actions_of(9), env_ids=[2]),
            lambda: engine.step(actions_of()),
            lambda: engine.reset(),
            lambda: engine.reset(env_ids=[1]),
            lambda: engine.call("pid", env_ids=[2]),
            lambda: engine.seed(0),
        ):
            with raises(PendingCallError):
                call()
        assert engine.call("count", env_ids=[0]) == [0]
        assert engine.reset(env_ids=[3]).env_ids.tolist() == [3]
        assert engine.recv().reward.astype(int).tolist() == [1, 2]


@check
def check_nothing_to_receive(make_engine: MakeEngine) -> None:
    """Receiving more than is in flight is refused."""
    with make_engine(factories_of()) as engine:
        engine.reset(seed=0)
        with raises(NoPendingCallError):
            engine.recv()
        engine.send(actions_of(1), env_ids=[1])
        with raises(NoPendingCallError):
            engine.recv(min_envs=2)
        with raises(UsageError):
            engine.recv(min_envs=1, max_envs=0)
        assert len(engine.recv()) == 1


@check
def check_partial_resets(make_engine: MakeEngine) -> None:
    """Some envs are reset, seeds following the order of the ids; the others go on."""
    with make_engine(factories_of()) as engine:
        engine.reset(seed=0)
        engine.step(actions_of())
        batch = engine.reset(env_ids=[2, 0], seed=[8, 9])
        assert batch.env_ids.tolist() == [0, 2]
        draws = [np.random.default_rng(seed).random(3).tolist() for seed in (9, 8)]
        assert batch.observation["draw",].tolist() == draws
        assert engine.step(actions_of()).observation["count",].tolist() == [1, 2, 1, 2]


# --- calls and seeds ---------------------------------------------------------------


@check
def check_calls_return_per_env(make_engine: MakeEngine) -> None:
    """Values come in env order; attributes are read; arguments travel."""
    with make_engine(factories_of()) as engine:
        assert engine.call("factory.name") == ["env0", "env1", "env2", "env3"]
        assert engine.call("factory.name", env_ids=[3, 1]) == ["env1", "env3"]
        assert engine.call("echo", value={"a": [1]}) == [{"a": [1]}] * NUM_ENVS
        with raises(EnvError, "call nonsense") as caught:
            engine.call("nonsense")
        assert isinstance(caught[0].__cause__, AttributeError)
        assert [failure.env_id for failure in caught[0].failures] == [0, 1, 2, 3]


@check
def check_seed_chain(make_engine: MakeEngine) -> None:
    """Seeding reaches each env, and the same seed gives the same episodes."""
    with make_engine(factories_of(2)) as engine:
        seeds, following = engine.seed(4)
        first = engine.reset()
        assert seeds[0] == 4
        assert engine.seed(4) == (seeds, following)
        assert_same_batch(engine.reset(), first)
        assert engine.seed(7, static=True) == ([7, 7], 7)
        draws = engine.reset().observation["draw",]
        assert draws[0].tolist() == draws[1].tolist()
        wrong: list[Any] = [-1, 0.5, True, None, "1"]
        for bad in wrong:
            with raises(UsageError):
                engine.seed(bad)
