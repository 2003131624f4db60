"""What every backend must do when something is wrong; see `conformance`."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.engine import ArraySpec
from shoal.errors import (
    ClosedError,
    EnvError,
    ShoalError,
    SpecError,
    UsageError,
)
from shoal.testing.scripted import Fault, How, ScriptedError, Verb

if TYPE_CHECKING:
    from shoal.engine.spec import LeafPath, LeafSpec

from shoal.testing._checks import (
    NUM_ENVS,
    MakeEngine,
    actions_of,
    check,
    factories_of,
    faulty,
    raises,
)

__all__: list[str] = []


# --- errors ------------------------------------------------------------------------


@check
def check_an_error_spares_the_others(make_engine: MakeEngine) -> None:
    """The env's own error arrives as cause; the other envs went on; all go on after."""
    with make_engine(faulty(2, Fault(how=How.RAISE, number=2))) as engine:
        engine.reset(seed=0)
        engine.step(actions_of())
        with raises(EnvError, "env2 at step 2") as caught:
            engine.step(actions_of())
        error = caught[0]
        assert (error.env_id, error.during) == (2, "step")
        assert isinstance(error.__cause__, ScriptedError)
        assert "_strike" in error.worker_traceback
        assert error.failures == (error,)
        assert error.batch.env_ids.tolist() == [0, 1, 3]
        assert error.batch.observation["count",].tolist() == [2, 2, 2]
        assert engine.num_in_flight == 0
        assert engine.step(actions_of()).observation["count",].tolist() == [3, 3, 2, 3]
        assert engine.reset(env_ids=[2]).env_ids.tolist() == [2]


@check
def check_errors_of_several_envs(make_engine: MakeEngine) -> None:
    """All failures of one call are told, in env order; none comes back with a batch."""
    fault = (Fault(how=How.RAISE),)
    factories = [replace(factory, faults=fault) for factory in factories_of()]
    with make_engine(factories) as engine:
        engine.reset(seed=0)
        with raises(EnvError, "env0") as caught:
            engine.step(actions_of())
        assert [failure.env_id for failure in caught[0].failures] == [0, 1, 2, 3]
        assert caught[0].batch is None
        assert len(engine.step(actions_of())) == NUM_ENVS


@check
def check_errors_in_every_verb(make_engine: MakeEngine) -> None:
    """Resets (plain, seeded, automatic), seeds and calls fail like steps."""
    verbs: tuple[Verb, ...] = ("reset", "seed", "call")
    faults = [Fault(how=How.RAISE, at=verb, number=n) for verb in verbs for n in (2, 3)]
    with make_engine(faulty(1, *faults, episode_length=1)) as engine:
        engine.reset(seed=0)
        engine.seed(0)
        engine.call("pid")
        for call, during in (
            (lambda: engine.reset(), "reset"),
            (lambda: engine.step(actions_of()), "reset"),
            (lambda: engine.seed(1), "seed"),
            (lambda: engine.call("pid"), "call pid"),
        ):
            with raises(EnvError) as caught:
                call()
            assert (caught[0].env_id, caught[0].during) == (1, during)
            assert isinstance(caught[0].__cause__, ScriptedError)
        assert len(engine.reset(seed=1)) == NUM_ENVS


@check
def check_seeded_resets_fail_alone(make_engine: MakeEngine) -> None:
    """A reset with a seed that fails leaves the others' observations in the batch."""
    with make_engine(faulty(0, Fault(how=How.RAISE, at="reset"))) as engine:
        with raises(EnvError, "env0 at reset 1") as caught:
            engine.reset(seed=6)
        assert caught[0].batch.env_ids.tolist() == [1, 2, 3]
        draws = caught[0].batch.observation["draw",]
        assert draws[0].tolist() == np.random.default_rng(7).random(3).tolist()
        assert len(engine.reset(seed=6)) == NUM_ENVS


@check
def check_errors_that_cannot_travel(make_engine: MakeEngine) -> None:
    """An error that cannot be pickled or rebuilt still arrives, as text."""
    faults = (
        Fault(how=How.RAISE_UNPICKLABLE, number=1),
        Fault(how=How.RAISE_UNLOADABLE, number=2),
    )
    with make_engine(faulty(1, *faults)) as engine:
        engine.reset(seed=0)
        for number in (1, 2):
            with raises(EnvError, f"env1 at step {number}") as caught:
                engine.step(actions_of())
            assert "_strike" in caught[0].worker_traceback
            assert len(caught[0].batch) == NUM_ENVS - 1
        assert len(engine.step(actions_of())) == NUM_ENVS


@check
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
    with make_engine(faulty(3, *faults)) as engine:
        engine.reset(seed=0)
        for key, expected, actual in told:
            with raises(EnvError) as caught:
                engine.step(actions_of())
            cause = caught[0].__cause__
            assert isinstance(cause, SpecError)
            assert (cause.env_id, cause.key) == (3, key)
            assert expected in cause.expected
            assert actual in cause.actual
        assert len(engine.step(actions_of())) == NUM_ENVS


@check
def check_bad_actions_move_nothing(make_engine: MakeEngine) -> None:
    """Actions of a wrong number, shape, dtype or structure are refused at once."""
    with make_engine(factories_of()) as engine:
        engine.reset(seed=0)
        for bad in (
            actions_of(1, 2, 3),
            np.zeros((NUM_ENVS, 1), np.int64),
            np.full(NUM_ENVS, 0.5),
            np.array(3),
            None,
            ["a"] * NUM_ENVS,
            {"left": actions_of()},
            {(): actions_of(), "extra": actions_of()},
        ):
            with raises(SpecError, "action"):
                engine.step(bad)
            with raises(SpecError, "action"):
                engine.send(bad)
        for bad_some in (actions_of(1), actions_of(1, 2, 3), None):
            with raises(SpecError, "action"):
                engine.send(bad_some, env_ids=[2, 1])
        assert engine.num_in_flight == 0
        assert engine.step(actions_of()).observation["count",].tolist() == [1] * NUM_ENVS


@check
def check_unknown_envs_are_refused(make_engine: MakeEngine) -> None:
    """Ids out of range, named twice, of no integer, or none at all."""
    with make_engine(factories_of()) as engine:
        engine.reset(seed=0)
        wrong: list[Any] = [[4], [-1], [1, 1], [], [0.5], [True, False], ["0"]]
        for bad in wrong:
            with raises(UsageError):
                engine.send(np.zeros(len(bad), np.int64), env_ids=bad)
            with raises(UsageError):
                engine.reset(env_ids=bad)
            with raises(UsageError):
                engine.call("pid", env_ids=bad)
        with raises(UsageError):
            engine.reset(seed=[1, 2])
        assert engine.num_in_flight == 0


# --- start and end -----------------------------------------------------------------


@check
def check_envs_must_agree(make_engine: MakeEngine) -> None:
    """Envs whose leaves differ, be it in their order alone, are refused with both sides."""
    leaves: dict[LeafPath, LeafSpec] = {
        ("a",): ArraySpec((2,), np.dtype(np.float32)),
        ("b",): ArraySpec((2,), np.dtype(np.float32)),
    }
    swapped: dict[LeafPath, LeafSpec] = dict(reversed(leaves.items()))
    wider: dict[LeafPath, LeafSpec] = {**leaves, ("b",): ArraySpec((3,), np.dtype(np.float32))}
    for odd in (swapped, wider):
        factories = factories_of(observation=leaves)
        factories[2] = replace(factories[2], observation=odd)
        with raises(SpecError, "env 0") as caught:
            make_engine(factories)
        assert caught[0].env_id == 2


@check
def check_wrong_options_are_refused(make_engine: MakeEngine) -> None:
    """Unknown options and bad values are told before anything starts."""
    with raises(UsageError):
        make_engine([])
    with raises(UsageError):
        make_engine([None])
    for bad in ({"timeout": -1}, {"close_timeout": "long"}, {"nonsense": 1}):
        with raises(UsageError):
            make_engine(factories_of(), **bad)


@check
def check_build_errors(make_engine: MakeEngine) -> None:
    """An env that cannot be built is named; those that were built are closed."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        factories = faulty(1, Fault(how=How.RAISE, at="build"), journal=str(journal))
        with raises(ShoalError, "env1 at build 1") as caught:
            make_engine(factories)
        assert caught[0].env_id == 1
        assert isinstance(caught[0].__cause__, ScriptedError)
        lines = journal.read_text().splitlines()
        assert "build env0" in lines
        assert "build env1" not in lines


@check
def check_close_closes_envs(make_engine: MakeEngine) -> None:
    """Closing reaches every env, whatever one of them raises; twice is once."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        factories = faulty(1, Fault(how=How.RAISE, at="close"), journal=str(journal))
        engine = make_engine(factories)
        engine.reset(seed=0)
        engine.send(actions_of(1), env_ids=[0])
        engine.close()
        engine.close()
        lines = journal.read_text().splitlines()
        closed = sorted(line for line in lines if line.startswith("close"))
        assert closed == ["close env0", "close env2", "close env3"]


@check
def check_closed_engine_refuses(make_engine: MakeEngine) -> None:
    """Every verb of a closed engine says so; a wrong timeout does not half-close it."""
    engine = make_engine(factories_of())
    batch = engine.reset(seed=0)
    with raises(UsageError):
        engine.close(timeout=-1)
    states = [engine.is_closed]
    engine.close()
    states.append(engine.is_closed)
    assert states == [False, True]
    for call in (
        lambda: engine.step(actions_of()),
        lambda: engine.send(actions_of()),
        engine.recv,
        engine.reset,
        lambda: engine.seed(0),
        lambda: engine.call("pid"),
    ):
        with raises(ClosedError):
            call()
    assert batch.observation["count",].tolist() == [0] * NUM_ENVS
    assert "closed" in repr(engine)


@check
def check_printing_does_no_harm(make_engine: MakeEngine) -> None:
    """An env may write to stdout whenever it likes."""
    verbs: tuple[Verb, ...] = ("build", "reset", "step", "call", "close")
    faults = [Fault(how=How.PRINT, at=verb, number=0) for verb in verbs]
    with make_engine(faulty(0, *faults)) as engine:
        engine.reset(seed=0)
        engine.step(actions_of())
        engine.call("pid")
