"""The backend: what single envs would give, exact ends, few calls, nothing lost."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pools
import pytest

from shoal.adapters.envpool import EnvPoolFactory
from shoal.engine import Engine
from shoal.errors import EnvError, PendingCallError, RecvTimeout, UsageError

N = 5


def _actions(num_steps: int, num_envs: int = N) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2, (num_steps, num_envs))


def _single_runs(num_steps: int, actions: np.ndarray, **kwargs: object) -> list[list[tuple]]:
    """Returns, per env of a pool of its own: observation, reward, flags, next root."""
    runs = []
    for i in range(actions.shape[1]):
        import envpool

        env = envpool.make_gymnasium(pools.CARTPOLE, num_envs=1, seed=[100 + i], **kwargs)
        root, _ = env.reset()
        run = [root[0]]
        for t in range(num_steps):
            seen, reward, terminated, truncated, _ = env.step(actions[t, i : i + 1])
            root = env.reset()[0] if terminated[0] or truncated[0] else seen
            run.append((seen[0], reward[0], terminated[0], truncated[0], root[0]))
        runs.append(run)
    return runs


@pytest.mark.parametrize("batch_size", [N, 1])
@pytest.mark.parametrize("timeout", [None, 60])
def test_data_equal_those_of_pools_of_one_env(batch_size: int, timeout: float | None) -> None:
    actions = _actions(80)
    expected = _single_runs(80, actions, max_episode_steps=13)
    factory = pools.cartpoles(N, max_episode_steps=13, batch_size=batch_size)
    with pools.engine_of(factory, timeout=timeout) as engine:
        first = engine.reset().observation[()]
        np.testing.assert_array_equal(first, [run[0] for run in expected])
        ends = 0
        for t in range(80):
            batch = engine.step(actions[t])
            seen, reward, terminated, truncated, root = zip(
                *(run[t + 1] for run in expected), strict=True
            )
            np.testing.assert_array_equal(batch.reward, reward)
            np.testing.assert_array_equal(batch.terminated, terminated)
            np.testing.assert_array_equal(batch.truncated, truncated)
            np.testing.assert_array_equal(batch.observation[()], root)
            over = np.flatnonzero(batch.terminated | batch.truncated)
            np.testing.assert_array_equal(batch.reset_rows, over)
            np.testing.assert_array_equal(batch.final_observation[()], np.array(seen)[over])
            ends += len(over)
        assert ends > 10
        assert any(run[t][2] for run in expected for t in range(1, 81)), "no episode terminated"


def test_envs_received_one_by_one_have_the_data_of_a_synchronous_run() -> None:
    actions = _actions(60)
    expected = _single_runs(60, actions, max_episode_steps=13)
    taken = np.zeros(N, int)
    rng = np.random.default_rng(0)
    factory = pools.cartpoles(N, max_episode_steps=13, batch_size=1, num_threads=2)
    with pools.engine_of(factory, timeout=60) as engine:
        engine.reset()
        idle = set(range(N))
        while (taken < 60).any():
            ready = [i for i in sorted(idle) if taken[i] < 60 and rng.random() < 0.7]
            if ready:
                engine.send(actions[taken[ready], ready], ready)
                idle -= set(ready)
            if engine.num_in_flight:
                batch = engine.recv(min_envs=1)
                for k, i in enumerate(batch.env_ids.tolist()):
                    taken[i] += 1
                    _, reward, terminated, truncated, root = expected[i][taken[i]]
                    assert (batch.reward[k], batch.terminated[k]) == (reward, terminated)
                    assert batch.truncated[k] == truncated
                    np.testing.assert_array_equal(batch.observation[()][k], root)
                idle |= set(batch.env_ids.tolist())


def test_one_more_call_for_all_that_ended_and_none_otherwise() -> None:
    with pools.engine_of(pools.cartpoles(N, max_episode_steps=4), timeout=None) as engine:
        engine.reset()
        calls = pools.count_calls(engine)
        for t in range(1, 13):
            engine.step(np.arange(N) % 2)
            assert len(calls["send"]) == t
            assert len(calls["reset"]) == t // 4
            assert len(calls["recv"]) == t + t // 4


def test_an_env_past_its_end_stays_there_and_gains_nothing() -> None:
    with pools.engine_of(pools.cartpoles(3, max_episode_steps=2), timeout=None) as engine:
        engine.reset()
        for _ in range(2):
            last = engine.step(np.ones(3, int), autoreset=False)
        assert last.truncated.all()
        engine.reset(env_ids=[1])
        calls = pools.count_calls(engine)
        batch = engine.step(np.ones(3, int), autoreset=False)
        assert [args[0][0].tolist() for args in calls["send"]] == [[1]]
        assert batch.reward.tolist() == [0, 1, 0]
        assert batch.truncated.tolist() == [True, False, True]
        for i in (0, 2):
            np.testing.assert_array_equal(batch.observation[()][i], last.observation[()][i])
        batch = engine.step(np.ones(3, int))
        assert batch.reward.tolist() == [0, 1, 0]
        assert batch.reset_rows.tolist() == [0, 1, 2]
        assert not (batch.observation[()] == last.observation[()]).all(-1).any()


def test_a_step_before_any_reset_resets_first() -> None:
    with pools.engine_of(pools.cartpoles(2), timeout=None) as engine:
        batch = engine.step(np.ones(2, int))
        assert batch.reward.tolist() == [1, 1]
    assert not engine._backend._exchange.can_receive()


def test_actions_that_would_end_the_process_are_refused() -> None:
    with pools.engine_of(pools.cartpoles(3), timeout=None) as engine:
        engine.reset()
        with pytest.raises(EnvError, match="action should be within") as caught:
            engine.step(np.array([0, 7, 1]))
        assert caught.value.env_id == 1
        assert caught.value.batch.env_ids.tolist() == [0, 2]
        assert caught.value.batch.reward.tolist() == [1, 1]
        with pytest.raises(UsageError):
            engine.step(np.ones(4, int))
        assert engine.step(np.ones(3, int)).reward.tolist() == [1, 1, 1]


def test_seeds_are_for_all_envs_and_make_the_same_run() -> None:
    with pools.engine_of(pools.cartpoles(3), timeout=None) as engine:
        first = engine.reset(seed=[1, 2, 3]).observation[()]
        again = engine.reset(seed=[3, 2, 1]).observation[()]
        np.testing.assert_array_equal(first, again[::-1])
        with pytest.raises(UsageError, match="as a whole"):
            engine.reset(env_ids=[0], seed=[1])
        with pytest.raises(UsageError, match="no options"):
            engine.reset(options={"x": 1})
        engine.step(np.ones(3, int))


def test_what_the_backend_cannot_do_is_refused_when_it_opens() -> None:
    with pytest.raises(UsageError, match="one pool"):
        Engine([EnvPoolFactory(pools.CARTPOLE, 2)], backend="envpool")
    with pytest.raises(UsageError, match="keep_infos"):
        pools.engine_of(pools.cartpoles(2), keep_infos=True)
    with pytest.raises(TypeError, match="EnvPoolMixin"):
        EnvPoolFactory.of_pool(object())


# --- a pool that waits for the test ----------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 1])
def test_a_deadline_is_kept_and_nothing_is_lost(batch_size: int) -> None:
    pool = pools.ScriptedPool(3, batch_size)
    with pools.engine_of(pool, timeout=60) as engine:
        with pytest.raises(RecvTimeout):
            engine.reset(timeout=0.01)
        pool.finish(2, 0, 1)
        assert engine.reset().observation[()].tolist() == [0, 0, 0]
        engine.send(np.zeros(3, int))
        with pytest.raises(RecvTimeout):
            engine.recv(timeout=0)
        pool.finish(0, 1, 2)
        assert engine.recv().observation[()].tolist() == [1, 1, 1]
    assert pool.is_closed


def test_first_ready_envs_come_first() -> None:
    pool = pools.ScriptedPool(3, 1)
    pool.free()
    with pools.engine_of(pool, timeout=60) as engine:
        engine.reset()
        pool.is_free = False
        engine.send(np.zeros(3, int))
        pool.finish(1)
        assert engine.recv(min_envs=1).env_ids.tolist() == [1]
        with pytest.raises(PendingCallError):
            engine.send(np.zeros(1, int), [0])
        engine.send(np.zeros(1, int), [1])
        pool.free()
        batch = engine.recv()
        assert batch.env_ids.tolist() == [0, 1, 2]
        assert batch.observation[()].tolist() == [1, 2, 1]


def test_fewer_envs_than_come_at_a_time_are_refused() -> None:
    pool = pools.ScriptedPool(4, 2)
    pool.free()
    with pools.engine_of(pool, timeout=60) as engine:
        engine.reset()
        engine.send(np.zeros(1, int), [3])
        with pytest.raises(UsageError, match="2 envs at a time"):
            engine.recv()
        engine.send(np.zeros(1, int), [0])
        assert engine.recv().env_ids.tolist() == [0, 3]


def test_requests_wait_for_their_turn_where_a_pool_takes_one_at_a_time() -> None:
    pool = pools.ScriptedPool(3, 3)
    with pools.engine_of(pool, timeout=60) as engine:
        engine.send(np.zeros(1, int), [0])  # its first reset
        engine.send(np.zeros(2, int), [1, 2])
        pool.free()
        batch = engine.recv()
        assert batch.env_ids.tolist() == [0, 1, 2]
        assert batch.observation[()].tolist() == [1, 1, 1]


@pytest.mark.parametrize("where", ["before send", "before reset", "before recv", "in between"])
def test_an_interrupt_leaves_a_pool_that_goes_on(where: str) -> None:
    pool = pools.ScriptedPool(3, 3)
    pool.free()
    with pools.engine_of(pool, timeout=None) as engine:
        engine.reset()
        engine.step(np.zeros(3, int))
        engine.step(np.zeros(3, int))
        pool.interrupts.append(where)
        with pytest.raises(KeyboardInterrupt):
            engine.step(np.zeros(3, int))  # the third: episodes end, and are reset
        done = int(pool.steps[0])
        batch = engine.step(np.zeros(3, int))
        assert len(set(pool.steps.tolist())) == 1
        assert batch.reward.tolist() in ([1, 1, 1], [3, 3, 3]), done
        engine.reset()
        assert engine.step(np.zeros(3, int)).observation[()].tolist() == [1, 1, 1]


def test_close_waits_for_what_is_under_way() -> None:
    pool = pools.ScriptedPool(2, 1)
    engine = pools.engine_of(pool, timeout=60)
    engine.send(np.zeros(2, int))
    with pytest.warns(RuntimeWarning, match="did not finish"):
        engine.close(timeout=0.01)
    assert not pool.is_closed
    pool.free()
    engine._backend._receiver._thread.join(10)
    assert pool.is_closed
    pool = pools.ScriptedPool(2, 1)
    pool.free()
    engine = pools.engine_of(pool, timeout=60)
    engine.send(np.zeros(2, int))
    engine.close()
    assert pool.is_closed


def test_results_that_cannot_be_read_break_the_engine() -> None:
    pool = pools.ScriptedPool(2, 2)
    pool.free()
    with pools.engine_of(pool, timeout=60) as engine:
        engine.reset()
        pool.unpack = lambda received: 1 / 0  # type: ignore[method-assign]
        with pytest.raises(Exception, match="ended") as caught:
            engine.step(np.zeros(2, int))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert engine.is_broken


@pytest.mark.parametrize("autoreset", [True, False])
def test_an_interrupt_at_any_line_leaves_a_pool_that_goes_on(autoreset: bool) -> None:
    lines = 0
    while _interrupted_at(lines, autoreset=autoreset):
        lines += 1
    assert lines > 50


def _interrupted_at(line: int, *, autoreset: bool) -> bool:
    """Interrupts a step in which episodes end, and checks what comes after."""
    pool = pools.ScriptedPool(3, 3)
    pool.free()
    actions = np.zeros(3, int)
    with pools.engine_of(pool, timeout=None) as engine:
        engine.reset()
        engine.step(actions)
        engine.step(actions)
        interrupting = _Interrupting(line)
        with contextlib.suppress(KeyboardInterrupt), interrupting:
            engine.step(actions, autoreset=autoreset)
        for _ in range(2):
            batch = engine.step(actions, autoreset=autoreset)
            assert len(set(batch.reward.tolist())) == 1, "the envs go on together"
            assert len(set(pool.steps.tolist())) == 1
            assert (batch.reward[0] == 0) <= bool(batch.terminated[0]), "stuck in mid-episode"
        assert autoreset == (batch.reward[0] > 0)
        engine.reset()
        assert engine.step(actions).observation[()].tolist() == [1, 1, 1]
    return interrupting.has_struck


class _Interrupting:
    """Raises ``KeyboardInterrupt`` at the n-th line of the backend's own code."""

    def __init__(self, line: int) -> None:
        self.has_struck = False
        self._left = line

    def _trace(self, frame, event, arg):
        if "/backends/" not in frame.f_code.co_filename or "pool" not in frame.f_code.co_filename:
            return None
        if event == "line" and not self.has_struck:
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(self._before)
