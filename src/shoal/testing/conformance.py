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

import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine import ArraySpec, Batch, Engine, ObjectSpec
from shoal.errors import (
    ClosedError,
    EnvError,
    NoPendingCallError,
    PendingCallError,
    ShoalError,
    SpecError,
    UsageError,
)
from shoal.testing.scripted import Fault, How, ScriptedError, ScriptedFactory, Verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.engine.spec import LeafPath, LeafSpec

__all__ = ["CHECKS", "Check", "MakeEngine", "assert_same_batch"]

MakeEngine = Callable[..., Engine]
Check = Callable[[MakeEngine], None]
CHECKS: list[Check] = []

_NUM_ENVS = 4


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


# --- tools -------------------------------------------------------------------------


def assert_same_batch(actual: Batch, expected: Batch) -> None:
    """Raises `AssertionError` unless both batches hold the same, bit for bit."""
    for name in ("env_ids", "reward", "terminated", "truncated", "reset_rows"):
        _assert_same_array(getattr(actual, name), getattr(expected, name), name)
    for name in ("observation", "final_observation", "info"):
        leaves, others = getattr(actual, name), getattr(expected, name)
        assert list(leaves) == list(others), f"{name}: {list(leaves)} != {list(others)}"
        for path in leaves:
            _assert_same_array(leaves[path], others[path], f"{name} {path}")
    for name in ("infos", "reset_infos"):
        infos, other_infos = getattr(actual, name), getattr(expected, name)
        assert repr(infos) == repr(other_infos), f"{name}: {infos} != {other_infos}"


def _assert_same_array(actual: Any, expected: Any, name: str) -> None:
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
    same = (
        actual.tolist() == expected.tolist()
        if actual.dtype == object
        else actual.tobytes() == expected.tobytes()
    )
    assert same, f"{name}: {actual} != {expected}"


@contextmanager
def _raises(kind: type[BaseException], words: str = "") -> Iterator[list[Any]]:
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"{kind.__name__} was not raised"
    assert words in str(caught[0]), f"{words!r} is not in {caught[0]}"


def _factories(num_envs: int = _NUM_ENVS, **script: Any) -> list[ScriptedFactory]:
    return [ScriptedFactory(name=f"env{i}", **script) for i in range(num_envs)]


def _faulty(env_id: int, *faults: Fault, **script: Any) -> list[ScriptedFactory]:
    factories = _factories(**script)
    factories[env_id] = replace(factories[env_id], faults=faults)
    return factories


def _actions(*values: int) -> Any:
    return np.asarray(values or range(_NUM_ENVS), np.int64)


def _lone_episodes(
    factories: Sequence[ScriptedFactory], seed: int, actions: Sequence[Any]
) -> list[list[tuple[float, int, float]]]:
    """Steps each env alone; returns reward, count and first draw of every step."""
    histories = []
    for env_id, factory in enumerate(factories):
        env = factory()
        env.reset(seed=seed + env_id)
        history = []
        for step_actions in actions:
            observation, reward, terminated, truncated, _ = env.step(int(step_actions[env_id]))
            if terminated or truncated:
                observation, _ = env.reset()
            history.append((reward, int(observation["count"]), float(observation["draw"][0])))
        histories.append(history)
    return histories


# --- results -----------------------------------------------------------------------


@_check
def check_says_what_it_holds(make_engine: MakeEngine) -> None:
    """Counts, spec and state are right."""
    with make_engine(_factories()) as engine:
        assert engine.num_envs == _NUM_ENVS
        assert set(engine.spec.observation) == {("count",), ("draw",)}
        assert (engine.is_closed, engine.is_broken, engine.num_in_flight) == (False, False, 0)
        assert f"num_envs={_NUM_ENVS}" in repr(engine)


@_check
def check_reset_seeds_each_env(make_engine: MakeEngine) -> None:
    """One seed spreads, a list is taken as it is, options reach every env."""
    with make_engine(_factories(), keep_infos=True) as engine:
        spread = engine.reset(seed=3)
        listed = engine.reset(seed=[3, 4, 5, 6], options={"level": 2})
        draws = [np.random.default_rng(3 + i).random(3) for i in range(_NUM_ENVS)]
        for batch in (spread, listed):
            assert batch.observation["draw",].tolist() == np.asarray(draws).tolist()
            assert batch.env_ids.tolist() == list(range(_NUM_ENVS))
            assert not batch.done.any()
            assert not batch.reward.any()
            assert len(batch.reset_rows) == 0
        assert listed.infos is not None
        assert [info["options"] for info in listed.infos] == [{"level": 2}] * _NUM_ENVS
        assert [info["seed"] for info in listed.infos] == [3, 4, 5, 6]


@_check
def check_steps_equal_lone_envs(make_engine: MakeEngine) -> None:
    """Trajectories, automatic resets included, are those of each env alone."""
    factories = _factories(episode_length=3)
    rng = np.random.default_rng(1)
    actions = [rng.integers(0, 9, _NUM_ENVS) for _ in range(10)]
    expected = _lone_episodes(factories, 11, actions)
    with make_engine(factories) as engine:
        engine.reset(seed=11)
        for t, step_actions in enumerate(actions):
            batch = engine.step(step_actions)
            for i in range(_NUM_ENVS):
                got = (
                    float(batch.reward[i]),
                    int(batch.observation["count",][i]),
                    float(batch.observation["draw",][i, 0]),
                )
                assert got == expected[i][t], f"env {i}, step {t}: {got} != {expected[i][t]}"


@_check
def check_final_observation_is_kept(make_engine: MakeEngine) -> None:
    """Where an episode ends, the batch has its last observation and the next one's first."""
    factories = _factories(episode_length=2, ends_by="truncated")
    factories[1] = replace(factories[1], episode_length=1, ends_by="terminated")
    with make_engine(factories, keep_infos=True) as engine:
        engine.reset(seed=0)
        batch = engine.step(_actions())
        assert batch.reset_rows.tolist() == [1]
        assert batch.terminated.tolist() == [False, True, False, False]
        assert batch.observation["count",].tolist() == [1, 0, 1, 1]
        assert batch.final_observation["count",].tolist() == [1]
        batch = engine.step(_actions())
        assert batch.reset_rows.tolist() == [0, 1, 2, 3]
        assert batch.truncated.tolist() == [True, False, True, True]
        assert batch.final_observation["count",].tolist() == [2, 1, 2, 2]
        assert batch.infos is not None
        assert batch.reset_infos is not None
        assert [info["count"] for info in batch.infos] == [2, 1, 2, 2]
        assert [info["episode"] for info in batch.reset_infos] == [2, 3, 2, 2]


@_check
def check_steps_without_autoreset_go_on(make_engine: MakeEngine) -> None:
    """Without automatic resets an ended env is stepped on, until it is reset."""
    with make_engine(_factories(episode_length=1)) as engine:
        engine.reset(seed=0)
        batch = engine.step(_actions(), autoreset=False)
        assert batch.terminated.all()
        assert len(batch.reset_rows) == 0
        batch = engine.step(_actions(), autoreset=False)
        assert batch.observation["count",].tolist() == [2] * _NUM_ENVS
        assert not batch.done.any()


@_check
def check_prepared_resets_change_nothing(make_engine: MakeEngine) -> None:
    """A loop of steps and plain resets gives the same with and without prefetching."""

    def run(prefetch: bool) -> list[Batch]:
        batches = []
        with make_engine(_factories(episode_length=2), prefetch_resets=prefetch) as engine:
            batches.append(engine.reset(seed=5))
            for t in range(40):
                batches.append(engine.step(_actions() + t, autoreset=False))
                ended = batches[-1].env_ids[batches[-1].done]
                if t == 31:
                    batches.append(engine.reset(env_ids=ended.tolist(), seed=9))
                elif len(ended):
                    batches.append(engine.reset(env_ids=ended.tolist()))
        return batches

    for batch, expected in zip(run(True), run(False), strict=True):
        assert_same_batch(batch, expected)


@_check
def check_numeric_infos_travel(make_engine: MakeEngine) -> None:
    """Declared info entries arrive as arrays; what an env leaves out is zero."""
    info = {
        ("episode",): ArraySpec((), np.dtype(np.int64)),
        ("missing", "deep"): ArraySpec((2,), np.dtype(np.float32)),
    }
    with make_engine(_factories(episode_length=2, info=info)) as engine:
        first = engine.reset(seed=0)
        assert first.info["episode",].tolist() == [1] * _NUM_ENVS
        batch = engine.step(_actions())
        assert batch.info["episode",].tolist() == [1] * _NUM_ENVS
        assert batch.info["missing", "deep"].shape == (_NUM_ENVS, 2)
        assert not batch.info["missing", "deep"].any()
        assert batch.infos is None


@_check
def check_objects_and_infos_travel(make_engine: MakeEngine) -> None:
    """Leaves without a fixed shape and whole infos arrive, at resets and at ends too."""
    leaves = {("graph",): ObjectSpec("a graph"), ("x",): ArraySpec((2,), np.dtype(np.float32))}
    for reuses_buffers in (False, True):
        factories = _factories(
            observation=leaves,
            episode_length=2,
            action={("say",): ObjectSpec()},
            reuses_buffers=reuses_buffers,
        )
        with make_engine(factories, keep_infos=True) as engine:
            batch = engine.reset(seed=1)
            assert [graph["count"] for graph in batch.observation["graph",]] == [0] * _NUM_ENVS
            engine.step({("say",): ["a", "b", "c", "d"]})
            batch = engine.step({("say",): ["a", "bb", "ccc", "dddd"]})
            assert batch.infos is not None
            assert batch.reset_infos is not None
            assert [info["action"]["say"] for info in batch.infos] == ["a", "bb", "ccc", "dddd"]
            assert ["action" in info for info in batch.reset_infos] == [False] * _NUM_ENVS
            graphs, finals = batch.observation["graph",], batch.final_observation["graph",]
            assert [graph["count"] for graph in graphs] == [0] * _NUM_ENVS
            assert [graph["count"] for graph in finals] == [2] * _NUM_ENVS
            assert batch.reward.astype(int).tolist() == [1, 2, 3, 4]


# --- ownership ---------------------------------------------------------------------


@_check
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
    with make_engine(_factories(**script), keep_infos=True) as engine:
        batches = [engine.reset(seed=2)]
        texts = [repr(batches[0])]
        for t in range(6):
            batches.append(engine.step(_actions() + t))
            texts.append(repr(batches[-1]))
        engine.reset(env_ids=[1, 2])
    assert [repr(batch) for batch in batches] == texts


@_check
def check_actions_stay_whose_they_are(make_engine: MakeEngine) -> None:
    """An env may keep and overwrite its action; the caller's arrays do not change."""
    action = {("move",): ArraySpec((3,), np.dtype(np.float64))}
    with make_engine(_factories(action=action, abuses_actions=True)) as engine:
        engine.reset(seed=0)
        moves = np.ones((_NUM_ENVS, 3))
        for t in range(3):
            engine.step({"move": moves * t})
        assert (moves == 1).all()
        assert (engine.step({"move": moves}).reward >= 3).all()
        for kept in engine.call("kept_actions"):
            assert len(kept) == 4
            assert all((action["move"] == 77).all() for action in kept)


# --- send and recv -----------------------------------------------------------------


@_check
def check_subsets_come_back(make_engine: MakeEngine) -> None:
    """Some envs are sent in any order; they and no others come back, in order."""
    with make_engine(_factories()) as engine:
        engine.reset(seed=0)
        engine.send(_actions(30, 10), env_ids=[3, 1])
        assert engine.num_in_flight == 2
        batch = engine.recv()
        assert batch.env_ids.tolist() == [1, 3]
        assert batch.reward.astype(int).tolist() == [10, 30]
        assert engine.num_in_flight == 0
        engine.send(_actions(5), env_ids=[0])
        engine.send(_actions(6), env_ids=[2])
        one = engine.recv(min_envs=1, max_envs=1)
        other = engine.recv()
        assert sorted([*one.env_ids.tolist(), *other.env_ids.tolist()]) == [0, 2]
        counts = engine.step(_actions()).observation["count",]
        assert counts.tolist() == [2, 2, 2, 2]


@_check
def check_busy_envs_are_refused(make_engine: MakeEngine) -> None:
    """An env in flight takes no second call; the first one's result still comes."""
    with make_engine(_factories()) as engine:
        engine.reset(seed=0)
        engine.send(_actions(1, 2), env_ids=[1, 2])
        for call in (
            lambda: engine.send(_actions(9), env_ids=[2]),
            lambda: engine.step(_actions()),
            lambda: engine.reset(),
            lambda: engine.reset(env_ids=[1]),
            lambda: engine.call("pid", env_ids=[2]),
            lambda: engine.seed(0),
        ):
            with _raises(PendingCallError):
                call()
        assert engine.call("count", env_ids=[0]) == [0]
        assert engine.reset(env_ids=[3]).env_ids.tolist() == [3]
        assert engine.recv().reward.astype(int).tolist() == [1, 2]


@_check
def check_nothing_to_receive(make_engine: MakeEngine) -> None:
    """Receiving more than is in flight is refused."""
    with make_engine(_factories()) as engine:
        engine.reset(seed=0)
        with _raises(NoPendingCallError):
            engine.recv()
        engine.send(_actions(1), env_ids=[1])
        with _raises(NoPendingCallError):
            engine.recv(min_envs=2)
        with _raises(UsageError):
            engine.recv(min_envs=1, max_envs=0)
        assert len(engine.recv()) == 1


@_check
def check_partial_resets(make_engine: MakeEngine) -> None:
    """Some envs are reset, seeds following the order of the ids; the others go on."""
    with make_engine(_factories()) as engine:
        engine.reset(seed=0)
        engine.step(_actions())
        batch = engine.reset(env_ids=[2, 0], seed=[8, 9])
        assert batch.env_ids.tolist() == [0, 2]
        draws = [np.random.default_rng(seed).random(3).tolist() for seed in (9, 8)]
        assert batch.observation["draw",].tolist() == draws
        assert engine.step(_actions()).observation["count",].tolist() == [1, 2, 1, 2]


# --- calls and seeds ---------------------------------------------------------------


@_check
def check_calls_return_per_env(make_engine: MakeEngine) -> None:
    """Values come in env order; attributes are read; arguments travel."""
    with make_engine(_factories()) as engine:
        assert engine.call("factory.name") == ["env0", "env1", "env2", "env3"]
        assert engine.call("factory.name", env_ids=[3, 1]) == ["env1", "env3"]
        assert engine.call("echo", value={"a": [1]}) == [{"a": [1]}] * _NUM_ENVS
        with _raises(EnvError, "call nonsense") as caught:
            engine.call("nonsense")
        assert isinstance(caught[0].__cause__, AttributeError)
        assert [failure.env_id for failure in caught[0].failures] == [0, 1, 2, 3]


@_check
def check_seed_chain(make_engine: MakeEngine) -> None:
    """Seeding reaches each env, and the same seed gives the same episodes."""
    with make_engine(_factories(2)) as engine:
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
            with _raises(UsageError):
                engine.seed(bad)


# --- errors ------------------------------------------------------------------------


@_check
def check_an_error_spares_the_others(make_engine: MakeEngine) -> None:
    """The env's own error arrives as cause; the other envs went on; all go on after."""
    with make_engine(_faulty(2, Fault(how=How.RAISE, number=2))) as engine:
        engine.reset(seed=0)
        engine.step(_actions())
        with _raises(EnvError, "env2 at step 2") as caught:
            engine.step(_actions())
        error = caught[0]
        assert (error.env_id, error.during) == (2, "step")
        assert isinstance(error.__cause__, ScriptedError)
        assert "_strike" in error.worker_traceback
        assert error.failures == (error,)
        assert error.batch.env_ids.tolist() == [0, 1, 3]
        assert error.batch.observation["count",].tolist() == [2, 2, 2]
        assert engine.num_in_flight == 0
        assert engine.step(_actions()).observation["count",].tolist() == [3, 3, 2, 3]
        assert engine.reset(env_ids=[2]).env_ids.tolist() == [2]


@_check
def check_errors_of_several_envs(make_engine: MakeEngine) -> None:
    """All failures of one call are told, in env order; none comes back with a batch."""
    fault = (Fault(how=How.RAISE),)
    factories = [replace(factory, faults=fault) for factory in _factories()]
    with make_engine(factories) as engine:
        engine.reset(seed=0)
        with _raises(EnvError, "env0") as caught:
            engine.step(_actions())
        assert [failure.env_id for failure in caught[0].failures] == [0, 1, 2, 3]
        assert caught[0].batch is None
        assert len(engine.step(_actions())) == _NUM_ENVS


@_check
def check_errors_in_every_verb(make_engine: MakeEngine) -> None:
    """Resets (plain, seeded, automatic), seeds and calls fail like steps."""
    verbs: tuple[Verb, ...] = ("reset", "seed", "call")
    faults = [Fault(how=How.RAISE, at=verb, number=n) for verb in verbs for n in (2, 3)]
    with make_engine(_faulty(1, *faults, episode_length=1)) as engine:
        engine.reset(seed=0)
        engine.seed(0)
        engine.call("pid")
        for call, during in (
            (lambda: engine.reset(), "reset"),
            (lambda: engine.step(_actions()), "reset"),
            (lambda: engine.seed(1), "seed"),
            (lambda: engine.call("pid"), "call pid"),
        ):
            with _raises(EnvError) as caught:
                call()
            assert (caught[0].env_id, caught[0].during) == (1, during)
            assert isinstance(caught[0].__cause__, ScriptedError)
        assert len(engine.reset(seed=1)) == _NUM_ENVS


@_check
def check_seeded_resets_fail_alone(make_engine: MakeEngine) -> None:
    """A reset with a seed that fails leaves the others' observations in the batch."""
    with make_engine(_faulty(0, Fault(how=How.RAISE, at="reset"))) as engine:
        with _raises(EnvError, "env0 at reset 1") as caught:
            engine.reset(seed=6)
        assert caught[0].batch.env_ids.tolist() == [1, 2, 3]
        draws = caught[0].batch.observation["draw",]
        assert draws[0].tolist() == np.random.default_rng(7).random(3).tolist()
        assert len(engine.reset(seed=6)) == _NUM_ENVS


@_check
def check_errors_that_cannot_travel(make_engine: MakeEngine) -> None:
    """An error that cannot be pickled or rebuilt still arrives, as text."""
    faults = (
        Fault(how=How.RAISE_UNPICKLABLE, number=1),
        Fault(how=How.RAISE_UNLOADABLE, number=2),
    )
    with make_engine(_faulty(1, *faults)) as engine:
        engine.reset(seed=0)
        for number in (1, 2):
            with _raises(EnvError, f"env1 at step {number}") as caught:
                engine.step(_actions())
            assert "_strike" in caught[0].worker_traceback
            assert len(caught[0].batch) == _NUM_ENVS - 1
        assert len(engine.step(_actions())) == _NUM_ENVS


@_check
def check_bad_data_is_refused(make_engine: MakeEngine) -> None:
    """What does not fit a leaf is an error that names env, leaf, expected and actual."""
    faults = (
        Fault(how=How.OBSERVATION, number=1, value={"count": 1, "draw": np.zeros(4)}),
        Fault(how=How.OBSERVATION, number=2, value={"count": 0.5, "draw": np.zeros(3)}),
        Fault(how=How.OBSERVATION, number=3, value={"count": 1}),
        Fault(how=How.REWARD, number=4, value="much"),
        Fault(how=How.TERMINATED, number=5, value="yes"),
        Fault(how=How.TRUNCATED, number=6, value=2),
    )
    told = [
        ("observation/draw", "(3,)", "(4,)"),
        ("observation/count", "int64", "0.5"),
        ("observation/draw", "there", "missing"),
        ("reward", "real number", "much"),
        ("terminated", "bool", "yes"),
        ("truncated", "bool", "2"),
    ]
    with make_engine(_faulty(3, *faults)) as engine:
        engine.reset(seed=0)
        for key, expected, actual in told:
            with _raises(EnvError) as caught:
                engine.step(_actions())
            cause = caught[0].__cause__
            assert isinstance(cause, SpecError)
            assert (cause.env_id, cause.key) == (3, key)
            assert expected in cause.expected
            assert actual in cause.actual
        assert len(engine.step(_actions())) == _NUM_ENVS


@_check
def check_bad_actions_move_nothing(make_engine: MakeEngine) -> None:
    """Actions of a wrong number, shape, dtype or structure are refused at once."""
    with make_engine(_factories()) as engine:
        engine.reset(seed=0)
        for bad in (
            _actions(1, 2, 3),
            np.zeros((_NUM_ENVS, 1), np.int64),
            np.full(_NUM_ENVS, 0.5),
            np.array(3),
            None,
            ["a"] * _NUM_ENVS,
            {"left": _actions()},
            {(): _actions(), "extra": _actions()},
        ):
            with _raises(SpecError, "action"):
                engine.step(bad)
            with _raises(SpecError, "action"):
                engine.send(bad)
        for bad_some in (_actions(1), _actions(1, 2, 3), None):
            with _raises(SpecError, "action"):
                engine.send(bad_some, env_ids=[2, 1])
        assert engine.num_in_flight == 0
        assert engine.step(_actions()).observation["count",].tolist() == [1] * _NUM_ENVS


@_check
def check_unknown_envs_are_refused(make_engine: MakeEngine) -> None:
    """Ids out of range, named twice, of no integer, or none at all."""
    with make_engine(_factories()) as engine:
        engine.reset(seed=0)
        wrong: list[Any] = [[4], [-1], [1, 1], [], [0.5], [True, False], ["0"]]
        for bad in wrong:
            with _raises(UsageError):
                engine.send(np.zeros(len(bad), np.int64), env_ids=bad)
            with _raises(UsageError):
                engine.reset(env_ids=bad)
            with _raises(UsageError):
                engine.call("pid", env_ids=bad)
        with _raises(UsageError):
            engine.reset(seed=[1, 2])
        assert engine.num_in_flight == 0


# --- start and end -----------------------------------------------------------------


@_check
def check_envs_must_agree(make_engine: MakeEngine) -> None:
    """Envs whose leaves differ, be it in their order alone, are refused with both sides."""
    leaves: dict[LeafPath, LeafSpec] = {
        ("a",): ArraySpec((2,), np.dtype(np.float32)),
        ("b",): ArraySpec((2,), np.dtype(np.float32)),
    }
    swapped: dict[LeafPath, LeafSpec] = dict(reversed(leaves.items()))
    wider: dict[LeafPath, LeafSpec] = {**leaves, ("b",): ArraySpec((3,), np.dtype(np.float32))}
    for odd in (swapped, wider):
        factories = _factories(observation=leaves)
        factories[2] = replace(factories[2], observation=odd)
        with _raises(SpecError, "env 0") as caught:
            make_engine(factories)
        assert caught[0].env_id == 2


@_check
def check_wrong_options_are_refused(make_engine: MakeEngine) -> None:
    """Unknown options and bad values are told before anything starts."""
    with _raises(UsageError):
        make_engine([])
    with _raises(UsageError):
        make_engine([None])
    for bad in ({"timeout": -1}, {"close_timeout": "long"}, {"nonsense": 1}):
        with _raises(UsageError):
            make_engine(_factories(), **bad)


@_check
def check_build_errors(make_engine: MakeEngine) -> None:
    """An env that cannot be built is named; those that were built are closed."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        factories = _faulty(1, Fault(how=How.RAISE, at="build"), journal=str(journal))
        with _raises(ShoalError, "env1 at build 1") as caught:
            make_engine(factories)
        assert caught[0].env_id == 1
        assert isinstance(caught[0].__cause__, ScriptedError)
        lines = journal.read_text().splitlines()
        assert "build env0" in lines
        assert "build env1" not in lines


@_check
def check_close_closes_envs(make_engine: MakeEngine) -> None:
    """Closing reaches every env, whatever one of them raises; twice is once."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        factories = _faulty(1, Fault(how=How.RAISE, at="close"), journal=str(journal))
        engine = make_engine(factories)
        engine.reset(seed=0)
        engine.send(_actions(1), env_ids=[0])
        engine.close()
        engine.close()
        lines = journal.read_text().splitlines()
        closed = sorted(line for line in lines if line.startswith("close"))
        assert closed == ["close env0", "close env2", "close env3"]


@_check
def check_closed_engine_refuses(make_engine: MakeEngine) -> None:
    """Every verb of a closed engine says so; a wrong timeout does not half-close it."""
    engine = make_engine(_factories())
    batch = engine.reset(seed=0)
    with _raises(UsageError):
        engine.close(timeout=-1)
    states = [engine.is_closed]
    engine.close()
    states.append(engine.is_closed)
    assert states == [False, True]
    for call in (
        lambda: engine.step(_actions()),
        lambda: engine.send(_actions()),
        engine.recv,
        engine.reset,
        lambda: engine.seed(0),
        lambda: engine.call("pid"),
    ):
        with _raises(ClosedError):
            call()
    assert batch.observation["count",].tolist() == [0] * _NUM_ENVS
    assert "closed" in repr(engine)


@_check
def check_printing_does_no_harm(make_engine: MakeEngine) -> None:
    """An env may write to stdout whenever it likes."""
    verbs: tuple[Verb, ...] = ("build", "reset", "step", "call", "close")
    faults = [Fault(how=How.PRINT, at=verb, number=0) for verb in verbs]
    with make_engine(_faulty(0, *faults)) as engine:
        engine.reset(seed=0)
        engine.step(_actions())
        engine.call("pid")
