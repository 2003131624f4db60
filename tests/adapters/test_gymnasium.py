from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from shoal.adapters.gymnasium import GymnasiumEnv, GymnasiumFactory
from shoal.engine.spec import ArraySpec


class ScriptedEnv(gymnasium.Env[Any, Any]):
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    observation_space = spaces.Box(0, 1, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.is_closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.np_random.random(1), 0.0, False, False, {}

    def add(self, a: int, *, b: int) -> int:
        return a + b

    def close(self) -> None:
        self.is_closed = True


class OldResetEnv(ScriptedEnv):
    """Its reset is from before seeds were given to it."""

    def reset(self) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        return np.zeros(1), {}


class OldSeedEnv(OldResetEnv):
    def seed(self, seed: int) -> None:
        self.value = seed


def test_step_and_reset_are_the_envs_own() -> None:
    inner = ScriptedEnv()
    env = GymnasiumEnv(inner, info={("score",): ArraySpec((), np.dtype("float32"))})
    assert env.step == inner.step
    assert env.reset == inner.reset
    assert env.env is inner
    assert env.metadata is inner.metadata
    assert env.observation_space is inner.observation_space
    assert env.action_space is inner.action_space
    assert env.spec.action == {(): ArraySpec((), np.dtype("int64"))}
    assert env.spec.info == {("score",): ArraySpec((), np.dtype("float32"))}
    assert env.flatten_observation is None
    assert env.build_action is None


def test_seed_is_what_a_seeded_reset_does() -> None:
    env, other = GymnasiumEnv(ScriptedEnv()), ScriptedEnv()
    env.seed(7)
    other.reset(seed=7)
    np.testing.assert_array_equal(env.reset()[0], other.reset()[0])


def test_seed_none_is_a_fresh_seed() -> None:
    env = GymnasiumEnv(ScriptedEnv())
    env.seed(7)
    seeded = env.reset()[0]
    env.seed(None)
    assert env.env.np_random_seed != 7
    assert not np.array_equal(env.reset()[0], seeded)


def test_seed_of_an_old_env_uses_its_method() -> None:
    env = GymnasiumEnv(TimeLimit(OldSeedEnv(), 5))
    env.seed(11)
    assert env.env.unwrapped.value == 11  # type: ignore[attr-defined]


def test_seed_of_an_env_that_has_none() -> None:
    with pytest.raises(TypeError, match="OldResetEnv cannot be seeded") as caught:
        GymnasiumEnv(OldResetEnv()).seed(1)
    assert isinstance(caught.value.__cause__, TypeError)


def test_seed_lets_the_envs_own_type_error_through() -> None:
    class Broken(ScriptedEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            raise TypeError("mine")

        def seed(self, seed: int) -> None:
            raise AssertionError("must not be asked")

    with pytest.raises(TypeError, match=r"^mine$"):
        GymnasiumEnv(Broken()).seed(1)


def test_random_state_can_be_put_back() -> None:
    env = GymnasiumEnv(TimeLimit(ScriptedEnv(), 5))
    assert env.save_rng() is None
    env.load_rng(None)
    env.seed(3)
    saved = env.save_rng()
    first = env.reset()[0]
    assert not np.array_equal(env.reset()[0], first)
    env.load_rng(saved)
    np.testing.assert_array_equal(env.reset()[0], first)


def test_call_reaches_methods_and_attributes_through_wrappers() -> None:
    env = GymnasiumEnv(OrderEnforcing(TimeLimit(ScriptedEnv("here"), 5)))
    assert env.call("add", (1,), {"b": 2}) == 3
    assert env.call("value", (), {}) == "here"
    assert env.call("_max_episode_steps", (), {}) == 5
    assert env.call("unwrapped.value", (), {}) == "here"
    assert env.call("action_space.n", (), {}) == 2
    assert env.call("env.env.add", (1,), {"b": 1}) == 2
    with pytest.raises(TypeError, match=r"value of .* is a str; it takes no arguments"):
        env.call("value", (1,), {})
    with pytest.raises(AttributeError, match="nothing"):
        env.call("nothing", (), {})


def test_close() -> None:
    inner = ScriptedEnv()
    GymnasiumEnv(inner).close()
    assert inner.is_closed


class DuckEnv:
    observation_space = spaces.Box(0, 1, (1,))
    action_space = spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1), kwargs

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1), 0.0, False, False, {}

    def close(self) -> None:
        pass


def test_an_object_with_the_same_members_is_taken() -> None:
    env = GymnasiumEnv(DuckEnv())  # type: ignore[arg-type]
    env.seed(1)
    assert env.save_rng() is None
    assert env.call("action_space.n", (), {}) == 2
    assert env.metadata == {}


def _look_alike(name: str, module: str) -> object:
    base = type(name, (DuckEnv,), {"__module__": module})
    return type("Mine", (base,), {})()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: None, "NoneType, which has no reset"),
        (lambda: ScriptedEnv, "which is a class"),
        (lambda: _look_alike("EnvBase", "torchrl.envs.common"), "TorchRL env"),
        (lambda: _look_alike("Env", "gym.core"), "old gym library"),
        (lambda: gymnasium.vector.SyncVectorEnv([ScriptedEnv]), "vector of envs"),
        (lambda: _look_alike("VecEnv", "stable_baselines3.common"), "vector of envs"),
    ],
)
def test_other_things_are_refused(make: Any, words: str) -> None:
    with pytest.raises(TypeError, match=r"expected a gymnasium\.Env.*but got .*" + words):
        GymnasiumFactory.of(make)()


def _wrappers(env: gymnasium.Env[Any, Any]) -> list[type]:
    found = []
    while isinstance(env, gymnasium.Wrapper):
        found.append(type(env))
        env = env.env
    return found


def test_an_id_is_made_as_gymnasium_makes_it() -> None:
    env = GymnasiumFactory.of("CartPole-v1", {"max_episode_steps": 3})()
    assert _wrappers(env.env) == [TimeLimit, OrderEnforcing, PassiveEnvChecker]
    assert env.call("_max_episode_steps", (), {}) == 3


def test_an_id_is_made_as_gym_env_makes_it() -> None:
    cart_pole = GymnasiumFactory.of("CartPole-v1", defaults="torchrl")()
    assert _wrappers(cart_pole.env) == [TimeLimit, OrderEnforcing]
    pong = GymnasiumFactory.of("ALE/Pong-v5", defaults="torchrl")()
    assert pong.call("_frameskip", (), {}) == 1
    assert GymnasiumFactory.of("ALE/Pong-v5")().call("_frameskip", (), {}) == 4


def test_an_unknown_id_is_refused_at_once() -> None:
    with pytest.raises(gymnasium.error.NameNotFound):
        GymnasiumFactory.of("NoSuchEnv-v0")
    with pytest.raises(ModuleNotFoundError):
        GymnasiumFactory.of("no_such_module:Env-v0")
    with pytest.raises(TypeError, match=r"named by an id.*builtins\.int"):
        GymnasiumFactory.of(3)  # type: ignore[arg-type]


def test_arguments_are_copied() -> None:
    kwargs = {"value": [1]}
    factory = GymnasiumFactory.of(ScriptedEnv, kwargs)
    kwargs["value"].append(2)
    env = factory()
    assert env.call("value", (), {}) == [1]
    env.call("value", (), {}).append(3)
    assert factory().call("value", (), {}) == [1]


def test_registrations_are_shared_between_factories() -> None:
    one, other = (GymnasiumFactory.of(ScriptedEnv) for _ in range(2))
    assert one.registrations is other.registrations
    gymnasium.register("ShoalTest-v0", ScriptedEnv)
    try:
        later = GymnasiumFactory.of(ScriptedEnv)
    finally:
        del gymnasium.registry["ShoalTest-v0"]
    assert "ShoalTest-v0" in [spec.id for spec in later.registrations.by_value]


MAIN = """
import sys
import cloudpickle, gymnasium, minigrid
from gymnasium import spaces
from shoal.adapters.gymnasium import GymnasiumFactory

class MyEnv(gymnasium.Env):
    observation_space = spaces.Discrete(3)
    action_space = spaces.Discrete(2)
    def __init__(self, size=1):
        self.size = size
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}
    def step(self, action):
        return 1, 0.0, False, False, {}

class MyWrapper(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    def __init__(self, env, mark):
        gymnasium.utils.RecordConstructorArgs.__init__(self, mark=mark)
        super().__init__(env)
        self.mark = mark

gymnasium.register("ByText-v0", "__main__:MyEnv", max_episode_steps=9, kwargs={"size": 5})
gymnasium.register("ByClass-v0", MyEnv)
wrapped = MyWrapper(gymnasium.make("ByText-v0"), mark="m")
assert "torch" not in sys.modules
factories = [
    GymnasiumFactory.of("ByText-v0", {"size": 6}),
    GymnasiumFactory.of("ByClass-v0"),
    GymnasiumFactory.of(wrapped.spec),
    GymnasiumFactory.of(lambda: gymnasium.make("ByText-v0")),
    GymnasiumFactory.of(lambda: gymnasium.make("MiniGrid-Empty-5x5-v0")),
    GymnasiumFactory.of("ALE/Pong-v5"),
]
sys.stdout.buffer.write(cloudpickle.dumps(factories))
"""


WORKER = """
import sys
import cloudpickle, gymnasium
assert "MiniGrid-Empty-5x5-v0" not in gymnasium.registry
envs = [factory() for factory in cloudpickle.load(sys.stdin.buffer)]
assert envs[0].call("size", (), {}) == 6
assert envs[0].call("_max_episode_steps", (), {}) == 9
assert type(envs[1].env.unwrapped).__name__ == "MyEnv"
assert envs[2].call("mark", (), {}) == "m"
assert envs[2].call("size", (), {}) == 5
assert envs[3].call("size", (), {}) == 5
assert envs[4].observation_space["mission"].sample()
assert envs[5].observation_space.shape == (210, 160, 3)
assert "torch" not in sys.modules
"""


def _run(script: str, stdin: bytes = b"") -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", script], input=stdin, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert b"Overriding environment" not in done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("minigrid") is None, reason="needs minigrid")
def test_a_process_with_another_main_module_can_build_them() -> None:
    _run(WORKER, stdin=_run(MAIN))
