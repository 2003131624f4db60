"""What an env returns is stored unchanged, or refused in words; so are actions."""

from __future__ import annotations

import numpy as np
import pytest
from backends import ONE_WORKER, SERIAL

from shoal.engine import ArraySpec, Engine, ObjectSpec
from shoal.errors import EnvError, SpecError
from shoal.testing import Fault, How, ScriptedFactory

U1, I8, F4 = np.dtype("uint8"), np.dtype("int64"), np.dtype("float32")

REFUSED = [
    (ArraySpec((), U1), 300, "300"),
    (ArraySpec((), U1), np.int64(300), "int64"),
    (ArraySpec((), U1), -1, "-1"),
    (ArraySpec((), U1), np.nan, "nan"),
    (ArraySpec((), U1), 0.7, "0.7"),
    (ArraySpec((), U1), 10**30, str(10**30)),
    (ArraySpec((3,), U1), np.array([1, 300, 2]), "300"),
    (ArraySpec((2, 3), F4), np.zeros((3, 2), F4), "(3, 2)"),
    (ArraySpec((3,), F4), np.zeros(1, F4), "(1,)"),
    (ArraySpec((3,), F4), 0.0, "0.0"),
    (ArraySpec((3,), F4), [0.0, 1.0], "(2,)"),
    (ArraySpec((1,), F4), np.float32(1), "()"),
    (ArraySpec((), F4), np.zeros(1, F4), "(1,)"),
    (ArraySpec((), F4), None, "None"),
    (ArraySpec((), F4), "1", "'1'"),
    (ArraySpec((2,), F4), ["a", "b"], "a"),
    (ArraySpec((2,), F4), [[1], [1, 2]], "no array"),
    (ArraySpec((), F4), 1e39, "1e+39"),
    (ArraySpec((), I8), np.uint64(2**64 - 1), "uint64"),
    (ArraySpec((), np.dtype("bool")), 2, "2"),
]
ACCEPTED = [
    (ArraySpec((3,), F4), np.array([0.1, 1e-60, np.inf]), np.array([0.1, 0, np.inf], F4)),
    (ArraySpec((), F4), 0.1, np.float32(0.1)),
    (ArraySpec((2,), U1), [1, 255], np.array([1, 255], U1)),
    (ArraySpec((), U1), np.array(7), np.uint8(7)),
    (ArraySpec((), I8), True, np.int64(1)),
    (ArraySpec((2,), F4), np.array([1, 2], np.int16), np.array([1, 2], F4)),
    (ArraySpec((2,), F4), np.array([1, 2], ">f4"), np.array([1, 2], F4)),
    (ArraySpec((2, 2), F4), np.asfortranarray([[1, 2], [3, 4]], F4), [[1, 2], [3, 4]]),
]


def _open(leaf, values, verb, options):
    faults = [Fault(how=How.OBSERVATION, at=verb, number=k, value=v) for k, v in values]
    good = ScriptedFactory(observation={(): leaf})
    return Engine([good, ScriptedFactory(observation={(): leaf}, faults=faults)], **options)


@pytest.mark.parametrize("verb", ["step", "reset"])
@pytest.mark.parametrize(("leaf", "value", "words"), REFUSED, ids=str)
def test_observations_that_do_not_fit(leaf, value, words, verb):
    with _open(leaf, [(2, {"x": 1} if value is ... else value)], verb, SERIAL) as engine:
        engine.reset()
        engine.step([0, 0])
        with pytest.raises(EnvError) as caught:
            engine.step([0, 0]) if verb == "step" else engine.reset()
        cause = caught.value.__cause__
        assert isinstance(cause, SpecError)
        assert (cause.env_id, cause.key, cause.expected) == (1, "observation", str(leaf))
        assert words in cause.actual
        assert str(cause).startswith("Env 1: observation should be")
        assert caught.value.batch.env_ids.tolist() == [0]
        assert len(engine.step([0, 0])) == 2


@pytest.mark.parametrize(("leaf", "value", "stored"), ACCEPTED, ids=str)
def test_observations_that_keep_their_value(leaf, value, stored):
    with _open(leaf, [(1, value)], "step", SERIAL) as engine:
        engine.reset()
        observation = engine.step([0, 0]).observation[()]
        assert observation.dtype == leaf.dtype
        np.testing.assert_array_equal(observation[1], stored)


def test_a_worker_refuses_in_the_same_words():
    values = [(k, value) for k, (leaf, value, _) in enumerate(REFUSED, 1) if leaf.dtype == U1]
    texts = []
    for options in (SERIAL, ONE_WORKER):
        with _open(ArraySpec((), U1), values, "step", options) as engine:
            engine.reset()
            texts.append([])
            for _ in values:
                with pytest.raises(EnvError) as caught:
                    engine.step([0, 0])
                texts[-1].append(str(caught.value.__cause__))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("how", "value", "key"),
    [
        (How.REWARD, None, "reward"),
        (How.REWARD, "1", "reward"),
        (How.REWARD, 1j, "reward"),
        (How.REWARD, [1.0, 2.0], "reward"),
        (How.REWARD, np.zeros(2), "reward"),
        (How.REWARD, {}, "reward"),
        (How.TERMINATED, None, "terminated"),
        (How.TERMINATED, "False", "terminated"),
        (How.TERMINATED, 2, "terminated"),
        (How.TERMINATED, np.zeros(2, bool), "terminated"),
        (How.TRUNCATED, 0.5, "truncated"),
        (How.TRUNCATED, [True, False], "truncated"),
    ],
    ids=str,
)
def test_rewards_and_flags_that_are_none(how, value, key):
    factories = [ScriptedFactory(), ScriptedFactory(faults=[Fault(how=how, value=value)])]
    with Engine(factories, **SERIAL) as engine:
        engine.reset()
        with pytest.raises(EnvError) as caught:
            engine.step([0, 0])
        cause = caught.value.__cause__
        assert isinstance(cause, SpecError)
        assert (cause.env_id, cause.key) == (1, key)
        assert len(engine.step([0, 0])) == 2


@pytest.mark.parametrize(
    ("how", "value", "expected"),
    [
        (How.REWARD, 1, 1.0),
        (How.REWARD, True, 1.0),
        (How.REWARD, np.float32(0.5), 0.5),
        (How.REWARD, np.array(2.0), 2.0),
        (How.REWARD, np.array([3], np.int8), 3.0),
        (How.REWARD, [4.0], 4.0),
        (How.TERMINATED, np.True_, True),
        (How.TERMINATED, 1, True),
        (How.TERMINATED, np.array([True]), True),
        (How.TRUNCATED, 0, False),
    ],
    ids=str,
)
def test_rewards_and_flags_of_any_type(how, value, expected):
    with Engine([ScriptedFactory(faults=[Fault(how=how, value=value)])], **SERIAL) as engine:
        engine.reset()
        batch = engine.step([0])
        assert getattr(batch, how.name.lower()).tolist() == [expected]


@pytest.mark.parametrize(
    ("value", "key", "actual"),
    [
        ({"a": 1}, "observation/b/c", "missing"),
        ({"a": 1, "b": {}}, "observation/b/c", "missing"),
        ({"a": 1, "b": {"c": 1}, "d": 1}, "observation", "1 more"),
    ],
    ids=str,
)
def test_missing_and_extra_keys(value, key, actual):
    leaves = {("a",): ArraySpec((), I8), ("b", "c"): ArraySpec((), I8)}
    fault = Fault(how=How.OBSERVATION, value=value)
    with Engine([ScriptedFactory(observation=leaves, faults=[fault])], **SERIAL) as engine:
        engine.reset()
        with pytest.raises(EnvError) as caught:
            engine.step([0])
        cause = caught.value.__cause__
        assert (cause.env_id, cause.key) == (0, key)
        assert actual in cause.actual


# --- actions -----------------------------------------------------------------------

ACTION = {
    ("move",): ArraySpec((2,), F4),
    ("grip", "left"): ArraySpec((), U1),
    ("say",): ObjectSpec(),
}


def _action(**changes):
    action = {
        "move": np.zeros((2, 2), F4),
        ("grip", "left"): np.zeros(2, U1),
        ("say",): ["a", "b"],
    }
    for name, value in changes.items():
        key = ("grip", "left") if name == "grip" else ("say",) if name == "say" else name
        if value is ...:
            del action[key]
        else:
            action[key] = value
    return action


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"move": np.zeros((3, 2), F4)}, "action/move", "(3, 2)"),
        ({"move": np.zeros(2, F4)}, "action/move", "(2,)"),
        ({"move": np.zeros((2, 2), complex)}, "action/move", "complex"),
        ({"move": [[1, 2], [3]]}, "action/move", "no array"),
        ({"grip": [1, 256]}, "action/grip/left", "256"),
        ({"grip": [0.5, 1]}, "action/grip/left", "float"),
        ({"grip": ...}, "action/grip/left", "missing"),
        ({"say": ["a"]}, "action/say", "1 objects"),
        ({"say": ...}, "action/say", "missing"),
        ({"jump": [1, 2]}, "action/jump", "extra"),
    ],
    ids=str,
)
def test_actions_that_do_not_fit_move_nothing(changes, key, words):
    with Engine([ScriptedFactory(action=ACTION)] * 2, **SERIAL) as engine:
        engine.reset()
        for call in (engine.step, engine.send):
            with pytest.raises(SpecError) as caught:
                call(_action(**changes))
            assert caught.value.key == key
            assert words in str(caught.value)
        assert engine.num_in_flight == 0
        assert engine.call("count") == [0, 0]
        assert engine.step(_action()).observation["count",].tolist() == [1, 1]


def test_actions_that_cannot_be_built_are_errors_of_their_env():
    class PickyFactory(ScriptedFactory):
        def __call__(self):
            env = super().__call__()
            build = env.build_action

            def picky(leaves):
                if leaves[1] == 3:
                    raise OverflowError("three is too many")
                return build(leaves)

            env.build_action = picky
            return env

    for options in (SERIAL, ONE_WORKER):
        with Engine([PickyFactory(action=ACTION)] * 2, **options) as engine:
            engine.reset()
            with pytest.raises(EnvError, match="three is too many") as caught:
                engine.step(_action(grip=[0, 3]))
            assert (caught.value.env_id, caught.value.during) == (1, "step")
            assert caught.value.batch.env_ids.tolist() == [0]
            assert engine.step(_action()).observation["count",].tolist() == [2, 1]


def test_the_callers_order_of_envs_counts():
    with Engine([ScriptedFactory()] * 3, **SERIAL) as engine:
        engine.reset()
        for actions in (np.array([30, 10]), [30, 10], (30, 10)):
            engine.send(actions, env_ids=[2, 0])
            assert engine.recv().reward.astype(int).tolist() == [10, 30]
        for wrong in (np.array([1, 2, 3]), [1], 5, None, np.array(5)):
            with pytest.raises(SpecError, match="action"):
                engine.send(wrong, env_ids=[2, 0])
        assert engine.num_in_flight == 0
