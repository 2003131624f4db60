"""Objects with Gymnasium's members and coroutines, as envs of the engine."""

from __future__ import annotations

import asyncio

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from shoal.adapters.coroutines import AsyncGymnasiumEnv, AsyncGymnasiumFactory
from shoal.adapters.gymnasium import GymnasiumDescription, GymnasiumFactory
from shoal.engine import ArraySpec, Engine
from shoal.errors import StartError


class AsyncCartPole:
    """CartPole behind something to wait for."""

    def __init__(self, steps=500):
        self.inner = gymnasium.make("CartPole-v1", max_episode_steps=steps)
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space
        self.is_open = True

    @property
    def np_random(self):
        return self.inner.unwrapped.np_random

    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return self.inner.reset(seed=seed, options=options)

    async def step(self, action):
        await asyncio.sleep(0)
        return self.inner.step(action)

    async def close(self):
        await asyncio.sleep(0)
        self.inner.close()
        self.is_open = False

    async def angle(self, scale=1):
        await asyncio.sleep(0)
        return scale * float(self.inner.unwrapped.state[2])


class Talker:
    """Takes and returns text and numbers; has no generator and no close."""

    observation_space = spaces.Dict(
        {"text": spaces.Text(20), "count": spaces.Box(0, 99, (1,), np.int64)}
    )
    action_space = spaces.Dict({"say": spaces.Text(20), "loud": spaces.Discrete(2)})

    def __init__(self):
        self.seeds = []

    def _observe(self, text, count):
        return {"text": text, "count": np.array([count])}

    async def reset(self, *, seed, options):
        self.seeds.append(seed)
        return self._observe("hello", 0), {"options": options}

    async def step(self, action):
        text = action["say"].upper() if action["loud"] else action["say"]
        return self._observe(text, len(text)), 1.0, False, False, {"tokens": len(text)}


def _open(factories, **options):
    return Engine(factories, backend="coroutines", timeout=20, **options)


@pytest.mark.parametrize("autoreset", [True, False])
def test_prepared_resets_change_nothing(autoreset):
    def run(**options):
        rng = np.random.default_rng(0)
        with _open([AsyncGymnasiumFactory(AsyncCartPole, {"steps": 30})] * 4, **options) as engine:
            engine.seed(3)
            batches = [engine.reset()]
            for t in range(150):
                batches.append(engine.step(rng.integers(0, 2, 4), autoreset=autoreset))
                ended = batches[-1].env_ids[batches[-1].done].tolist()
                if ended and not autoreset:
                    # Some of the resets that were prepared are taken back.
                    seed = 40 + t if t % 5 == 0 else None
                    batches.append(engine.reset(env_ids=ended, seed=seed))
            return [
                (b.observation[()].tolist(), b.reward.tolist(), b.done.tolist()) for b in batches
            ]

    assert run() == run(prefetch_resets=False)


def test_seeded_resets_equal_the_plain_env():
    with (
        _open([AsyncGymnasiumFactory(AsyncCartPole)] * 2) as engine,
        Engine([GymnasiumFactory.of("CartPole-v1")] * 2, backend="serial") as plain,
    ):
        for seed in (1, 2):
            mine, theirs = engine.reset(seed=seed), plain.reset(seed=seed)
            assert mine.observation[()].tolist() == theirs.observation[()].tolist()
            for _ in range(60):
                mine, theirs = engine.step(np.ones(2, np.int64)), plain.step(np.ones(2, np.int64))
                assert mine.observation[()].tolist() == theirs.observation[()].tolist()
                assert mine.reset_rows.tolist() == theirs.reset_rows.tolist()


def test_text_travels_and_seeds_wait_for_the_next_reset():
    info = {("tokens",): ArraySpec((), np.dtype(np.int64))}
    with _open([AsyncGymnasiumFactory(Talker, info=info)] * 2, keep_infos=True) as engine:
        assert not engine.spec.undoes_resets
        seeds, _ = engine.seed(5)
        batch = engine.reset(options={"level": 1})
        assert batch.observation["text",].tolist() == ["hello", "hello"]
        engine.reset()
        engine.reset(seed=9)
        assert engine.call("seeds") == [[seed, None, 9 + i] for i, seed in enumerate(seeds)]
        batch = engine.step({"say": ["a", "bc"], "loud": np.array([0, 1])})
        assert batch.observation["text",].tolist() == ["a", "BC"]
        assert batch.info["tokens",].tolist() == [1, 2]


def test_calls_of_methods_attributes_and_questions():
    with _open([AsyncGymnasiumFactory(AsyncCartPole, {"steps": 7})] * 2) as engine:
        engine.reset(seed=0)
        angles = engine.call("angle")
        assert engine.call("angle", scale=2) == [2 * angle for angle in angles]
        assert engine.call("inner.spec.max_episode_steps") == [7, 7]
        assert engine.call("?has", "angle") == ["method", "method"]
        assert engine.call("?has", "nothing") == ["missing", "missing"]
        engine.call("!set", "mood", "fine")
        assert engine.call("mood") == ["fine", "fine"]
        [description, _] = engine.call("?describe")
        assert isinstance(description, GymnasiumDescription)
        assert description.action_space == spaces.Discrete(2)


def test_the_env_may_come_from_a_coroutine_and_is_closed():
    made = []

    async def connect(steps):
        await asyncio.sleep(0)
        made.append(AsyncCartPole(steps))
        return made[-1]

    with _open([AsyncGymnasiumFactory(connect, {"steps": 5})] * 2) as engine:
        engine.reset()
        assert [env.is_open for env in made] == [True, True]
    assert [env.is_open for env in made] == [False, False]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (lambda: gymnasium.make("CartPole-v1"), "reset and step are plain"),
        (lambda: AsyncCartPole, "which is a class"),
        (lambda: object(), "has no reset, step, observation_space, action_space"),
    ],
)
def test_other_things_are_refused(target, words):
    with pytest.raises(StartError, match=words) as caught:
        _open([AsyncGymnasiumFactory(target)])
    assert isinstance(caught.value.__cause__, TypeError)


def test_dice_are_put_back():
    env = AsyncGymnasiumEnv(AsyncCartPole())
    asyncio.run(env.reset(seed=1))
    env.seed(8)
    state = env.save_rng()
    first = asyncio.run(env.reset())[0].tolist()
    other = asyncio.run(env.reset())[0].tolist()
    env.load_rng(state)
    assert asyncio.run(env.reset())[0].tolist() == first != other
    env.load_rng(None)
