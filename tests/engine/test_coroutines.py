"""Envs on one event loop: the common suite, and what only they do."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest
from async_envs import SPEC, AsyncShellFactory, WaitingEnv, open_shells

from shoal.engine import Engine
from shoal.errors import (
    BrokenError,
    EnvError,
    RecvTimeout,
    StartError,
    StartTimeout,
    UsageError,
    WorkerDied,
)
from shoal.testing import CHECKS, Fault, How, ScriptedFactory, no_leaks

SOON_S = 20  # longer than anything here takes, unless it hangs


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_backend_conforms(check):
    check(open_shells)


@pytest.fixture
def open_async(open_engine):
    def open_one(factories, **options):
        return open_engine(factories, backend="coroutines", **{"timeout": SOON_S, **options})

    return open_one


def _zeros(count):
    return np.zeros(count, np.int64)


def _env(**methods):
    """Returns a class of waiting envs with other methods."""
    return type("OtherEnv", (WaitingEnv,), methods)


# --- overlap -----------------------------------------------------------------------


def test_256_steps_wait_at_once_and_come_as_they_end(open_async):
    engine = open_async([WaitingEnv] * 256)
    engine.reset()
    engine.call("shut")
    opens = engine.call("open_from_outside")
    engine.send(np.arange(256))
    with pytest.raises(RecvTimeout):
        engine.recv(min_envs=1, timeout=0)
    for env_id in reversed(range(256)):
        opens[env_id]()
        batch = engine.recv(min_envs=1)
        assert batch.env_ids.tolist() == [env_id]
        assert batch.reward.tolist() == [env_id]
    assert engine.num_in_flight == 0


def test_others_go_on_while_one_hangs(open_async):
    engine = open_async([WaitingEnv] * 3)
    engine.reset()
    engine.call("shut", env_ids=[1])
    [open_gate] = engine.call("open_from_outside", env_ids=[1])
    engine.send(_zeros(3))
    for number in range(1, 20):
        batch = engine.recv(min_envs=2)
        assert batch.env_ids.tolist() == [0, 2]
        assert batch.observation[()].tolist() == [number, number]
        engine.send(_zeros(2), env_ids=[0, 2])
    engine.recv(min_envs=2)
    open_gate()
    assert engine.recv().env_ids.tolist() == [1]


def test_builds_overlap(open_async):
    together = []

    async def build():
        # Nobody passes before all have come.
        if not together:
            together.append(asyncio.Barrier(8))
        await together[0].wait()
        return WaitingEnv()

    engine = open_async([build] * 8)
    assert len(engine.reset()) == 8


def test_calls_overlap_within_one(open_async):
    meeting = []

    class Meeting(WaitingEnv):
        async def meet(self):
            if not meeting:
                meeting.append(asyncio.Barrier(4))
            return await meeting[0].wait()

    engine = open_async([Meeting] * 4)
    assert sorted(engine.call("meet")) == [0, 1, 2, 3]


def test_an_env_that_never_answers_does_not_hold_up_calls_of_others(open_async):
    engine = open_async([WaitingEnv] * 3)
    with pytest.raises(RecvTimeout) as caught:
        engine.call("wait_for_ever", env_ids=[0, 2], timeout=0.05)
    assert caught.value.waiting_for == (0, 2)
    assert engine.call("count", env_ids=[1]) == [0]
    assert len(engine.reset(env_ids=[1])) == 1
    # Those that wait take what comes next after it.
    with pytest.raises(RecvTimeout):
        engine.reset(env_ids=[0], timeout=0.05)


def test_everything_runs_in_one_task_of_the_env(open_async):
    seen = []
    variable = contextvars.ContextVar("variable", default=0)

    class Watched(WaitingEnv):
        def __init__(self):
            super().__init__()
            self._note()

        def _note(self):
            variable.set(variable.get() + 1)
            seen.append((asyncio.current_task().get_name(), variable.get()))

        async def reset(self, **kwargs):
            self._note()
            return await super().reset(**kwargs)

        async def step(self, action):
            async with asyncio.timeout(SOON_S):
                self._note()
                return await super().step(action)

        async def close(self):
            self._note()

    with Engine([Watched], backend="coroutines") as engine:
        engine.reset()
        engine.step(_zeros(1))
    assert seen == [("shoal-env-0", number) for number in (1, 2, 3, 4)]


# --- build and refuse --------------------------------------------------------------


@pytest.mark.parametrize("method", ["reset", "step"])
def test_plain_envs_are_refused_with_a_hint(method):
    journal = []
    plain = _env(**{method: lambda self, *args, **kwargs: None})
    with pytest.raises(StartError, match="run this env with") as caught:
        Engine([WaitingEnv, partial(plain, journal)], backend="coroutines")
    assert caught.value.env_id == 1
    assert isinstance(caught.value.__cause__, TypeError)
    for words in (f"{method} of env 1", "OtherEnv", "async def", '"threads"', '"processes"'):
        assert words in str(caught.value)
    assert journal == ["closed"]


def test_scripted_envs_are_refused(open_async):
    with pytest.raises(StartError, match="reset and step of env 0"):
        open_async([ScriptedFactory()])


def test_a_failing_async_factory_is_named_and_the_others_are_closed():
    journal = []

    async def fail():
        await asyncio.sleep(0)
        raise LookupError("no browser here")

    with pytest.raises(StartError, match="no browser here") as caught:
        Engine([partial(WaitingEnv, journal), fail], backend="coroutines")
    assert caught.value.env_id == 1
    assert isinstance(caught.value.__cause__, LookupError)
    assert journal == ["closed"]


def test_a_build_that_takes_too_long():
    journal = []

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            journal.append("left the build")

    factories = [partial(WaitingEnv, journal), never]
    with pytest.raises(StartTimeout, match=r"Envs 1 were not built within 0\.05 s"):
        Engine(factories, backend="coroutines", start_timeout=0.05)
    assert sorted(journal) == ["closed", "left the build"]


def test_a_build_that_blocks_the_loop():
    goes_on = threading.Event()

    def block():
        goes_on.wait(SOON_S)
        return WaitingEnv()

    try:
        with pytest.raises(StartTimeout, match="Envs 0, 1 were not built"):
            Engine([block, WaitingEnv], backend="coroutines", start_timeout=0)
    finally:
        goes_on.set()
    _join_loops()


def test_an_end_while_envs_are_built():
    def leave():
        raise SystemExit(3)

    with pytest.raises(StartError, match="SystemExit"):
        Engine([WaitingEnv, leave], backend="coroutines")


def test_envs_that_differ_are_closed_again():
    journal = []

    def differ():
        env = WaitingEnv(journal)
        env.spec = type(SPEC)(observation={}, action=SPEC.action)
        return env

    with pytest.raises(UsageError):
        Engine([partial(WaitingEnv, journal), differ], backend="coroutines")
    assert journal == ["closed", "closed"]


# --- failures ----------------------------------------------------------------------


@pytest.mark.parametrize("error", [asyncio.CancelledError, TimeoutError, KeyError, Exception])
@pytest.mark.parametrize("verb", ["step", "reset", "seed", "call oops"])
def test_what_an_env_raises_is_its_own_failure(open_async, error, verb):
    def raises(plan=(True,)):
        plan = list(plan)

        async def method(self, *args, **kwargs):
            await asyncio.sleep(0)
            if plan:
                plan.pop()
                raise error("its own")
            return 0, {}

        return method

    engine = open_async([WaitingEnv, _env(**{verb.removeprefix("call "): raises()}), WaitingEnv])
    run = {
        "step": lambda: engine.step(_zeros(3)),
        "reset": engine.reset,
        "seed": lambda: engine.seed(0),
        "call oops": lambda: engine.call("oops", env_ids=[1]),
    }
    with pytest.raises(EnvError, match="its own") as caught:
        run[verb]()
    assert (caught.value.env_id, caught.value.during) == (1, verb)
    assert isinstance(caught.value.__cause__, error)
    if verb in ("step", "reset"):
        assert caught.value.batch.env_ids.tolist() == [0, 2]
    assert len(engine.reset()) == 3


def test_an_env_that_cancels_itself(open_async):
    class Selfish(WaitingEnv):
        async def step(self, action):
            if action:
                asyncio.current_task().cancel()
            async with asyncio.timeout(SOON_S):
                await asyncio.sleep(0)
            return await super().step(action)

        def cancel_later(self):
            self.loop.call_soon(asyncio.current_task().cancel)

    engine = open_async([Selfish, WaitingEnv])
    engine.reset()
    with pytest.raises(EnvError, match="CancelledError"):
        engine.step(np.array([1, 0]))
    assert engine.step(_zeros(2)).observation[()].tolist() == [1, 2]
    engine.call("cancel_later", env_ids=[0])
    assert engine.call("count") == [1, 2]


@pytest.mark.parametrize(
    ("end", "exitcode"), [(SystemExit(5), 5), (SystemExit(), 0), (KeyboardInterrupt(), 1)]
)
@pytest.mark.parametrize("verb", ["step", "reset", "call leave"])
def test_what_ends_a_worker_breaks_the_engine(end, exitcode, verb):
    journal = []

    async def leave(self, *args, **kwargs):
        raise end

    dying = partial(_env(**{verb.removeprefix("call "): leave}), journal)
    with Engine([partial(WaitingEnv, journal), dying], backend="coroutines") as engine:
        run = {
            "step": lambda: engine.step(_zeros(2)),
            "reset": engine.reset,
            "call leave": lambda: engine.call("leave", env_ids=[1]),
        }
        with pytest.raises(WorkerDied) as caught:
            run[verb]()
        died = caught.value
        assert (died.worker_id, died.env_ids, died.exitcode) == (0, (0, 1), exitcode)
        assert died.during == verb
        assert died.__cause__ is end
        with pytest.raises(BrokenError):
            engine.reset()
    assert journal.count("closed") == 2


def test_the_end_of_a_task_that_an_env_has_started(open_async):
    async def leave():
        raise SystemExit(6)

    class Starter(WaitingEnv):
        async def step(self, action):
            self.task = asyncio.create_task(leave())
            await asyncio.Event().wait()

    engine = open_async([Starter])
    engine.reset()
    with pytest.raises(WorkerDied) as caught:
        engine.step(_zeros(1))
    assert caught.value.exitcode == 6


def test_results_of_others_come_with_the_death(open_async):
    async def leave(self, action):
        raise SystemExit(1)

    engine = open_async([WaitingEnv, _env(step=leave)])
    engine.reset()
    engine.send(np.array([4, 0]))
    with pytest.raises(WorkerDied) as caught:
        engine.recv()
    assert caught.value.batch.reward.tolist() == [4]


# --- notes -------------------------------------------------------------------------


def test_notes_are_those_of_their_results(open_engine):
    factories = [
        AsyncShellFactory(
            ScriptedFactory(name=f"env{i}", episode_length=3 + i % 3, reuses_buffers=True)
        )
        for i in range(32)
    ]
    engine = open_engine(factories, backend="coroutines", keep_infos=True)
    engine.reset(seed=0)
    counts = [0] * 32
    engine.send(np.arange(32))
    for _ in range(300):
        batch = engine.recv(min_envs=1)
        for k, env_id in enumerate(batch.env_ids.tolist()):
            counts[env_id] = counts[env_id] % (3 + env_id % 3) + 1
            assert batch.infos[k]["name"] == f"env{env_id}"
            assert batch.infos[k]["count"] == counts[env_id]
            assert batch.infos[k]["action"] == env_id
        engine.send(batch.env_ids, env_ids=batch.env_ids)


# --- waiting outside ---------------------------------------------------------------


def test_doze_ends_when_something_comes(open_async):
    engine = open_async([WaitingEnv] * 2)
    engine.reset()
    engine.call("shut")
    open_first, open_second = engine.call("open_from_outside")
    backend = engine._backend
    [_, *_] = backend.wake_fds()
    backend.arm(True)
    engine.send(_zeros(2))
    deadline = _deadline()
    for open_gate, ready in ((open_first, [0]), (open_second, [1])):
        open_gate()
        while not engine._driver.arrays.status[ready].all():
            news = backend.doze(deadline)
            assert news
            backend.take_news(news)
        assert engine.recv(min_envs=1, timeout=0).env_ids.tolist() == ready
    backend.arm(False)


def test_doze_ends_by_a_poke_or_by_its_deadline(open_async):
    engine = open_async([WaitingEnv])
    backend = engine._backend
    backend.arm(True)
    while backend.doze(_deadline(0)):
        pass  # rings from before
    assert backend.doze(_deadline(0.01)) == []
    thread = threading.Thread(target=backend.poke)
    thread.start()
    assert backend.doze(_deadline())
    thread.join()


def test_doze_ends_by_a_death(open_async):
    async def leave(self, action):
        raise SystemExit(1)

    engine = open_async([_env(step=leave)])
    engine.reset()
    backend = engine._backend
    backend.arm(True)
    engine.send(_zeros(1))
    with pytest.raises(WorkerDied):  # noqa: PT012 - a ring may be one from before
        while news := backend.doze(_deadline()):
            backend.take_news(news)


def _deadline(timeout=SOON_S):
    from shoal.engine.core.deadline import Deadline

    return Deadline.after(timeout)


# --- interrupts --------------------------------------------------------------------


def test_results_after_an_interrupt_are_those_of_the_next_call(open_async):
    engine = open_async([WaitingEnv] * 2)
    engine.reset()
    engine.call("shut", env_ids=[0])
    [open_gate] = engine.call("open_from_outside", env_ids=[0])
    backend, wait = engine._backend, engine._backend.wait

    def interrupt(*args, **kwargs):
        backend.wait = wait
        raise KeyboardInterrupt

    backend.wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step(np.array([7, 7]))
    open_gate()
    batch = engine.step(np.array([1, 2]))
    assert batch.reward.tolist() == [1, 2]
    assert batch.observation[()].tolist() == [2, 2]  # nothing was done twice


# --- close -------------------------------------------------------------------------


def test_close_cancels_steps_and_awaits_what_they_clean_up(open_async):
    journals = [[], [], []]
    under_way = threading.Semaphore(0)

    class Careful(WaitingEnv):
        async def step(self, action):
            under_way.release()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                self.journal.append("cleaned up")

    engine = open_async([partial(Careful, journal) for journal in journals])
    engine.reset()
    engine.send(_zeros(3))
    for _ in range(3):
        assert under_way.acquire(timeout=SOON_S)
    engine.close()
    assert journals == [["cleaned up", "closed"]] * 3


def test_close_before_the_steps_have_begun(open_async):
    journal = []
    engine = open_async([partial(WaitingEnv, journal)] * 3)
    engine.send(_zeros(3))
    engine.close()
    assert journal.count("closed") == 3


def test_close_ends_what_envs_have_left_on_the_loop(open_async):
    journal = []

    class Untidy(WaitingEnv):
        async def reset(self, **kwargs):
            self.task = asyncio.create_task(self._wait())
            self.numbers = self._count()
            await anext(self.numbers)
            self.work = asyncio.get_running_loop().run_in_executor(None, journal.append, "worked")
            return await super().reset()

        async def _wait(self):
            try:
                await asyncio.Event().wait()
            finally:
                journal.append("task ended")

        async def _count(self):
            try:
                yield 1
            finally:
                journal.append("generator ended")

    with no_leaks():
        engine = open_async([Untidy])
        engine.reset()
        engine.close()
    assert {"task ended", "generator ended", "worked"} <= set(journal)


def test_an_env_that_will_not_end_is_given_up(open_async):
    class Stubborn(WaitingEnv):
        async def step(self, action):
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    self.journal.append("no")

    journal = []
    engine = open_async([WaitingEnv, partial(Stubborn, journal)])
    engine.reset()
    engine.send(_zeros(2))
    engine.recv(min_envs=1)
    with pytest.warns(RuntimeWarning, match="Envs 1 went on"):
        engine.close(timeout=0.05)
    engine.close()


def test_a_close_that_hangs_ends_at_the_deadline(open_async):
    journal = []

    async def hang(self):
        try:
            await asyncio.Event().wait()
        finally:
            self.journal.append("cancelled")

    engine = open_async([partial(_env(close=hang), journal), partial(WaitingEnv, journal)])
    engine.close(timeout=0.05)
    assert sorted(journal) == ["cancelled", "closed"]


def test_a_blocked_loop_is_left_behind_and_ends_by_itself(open_async):
    goes_on = threading.Event()
    is_there = threading.Event()
    journal = []

    class Blocking(WaitingEnv):
        async def step(self, action):
            is_there.set()
            goes_on.wait(SOON_S)
            return await super().step(action)

    engine = open_async([partial(Blocking, journal)])
    engine.reset()
    engine.send(_zeros(1))
    assert is_there.wait(SOON_S)
    with pytest.warns(RuntimeWarning, match="blocks the event loop"):
        engine.close(timeout=0)
    assert "closed" not in journal
    goes_on.set()
    _join_loops()
    assert "closed" in journal


def _join_loops():
    for thread in threading.enumerate():
        if thread.name == "shoal-coroutines":
            thread.join(SOON_S)


def test_a_forgotten_engine_ends_its_loop():
    journal = []
    with no_leaks():
        engine = Engine([partial(WaitingEnv, journal)] * 2, backend="coroutines")
        engine.reset()
        engine.send(_zeros(2))
        gone = weakref.ref(engine._backend)
        del engine
        gc.collect()
        assert gone() is None
    assert journal.count("closed") == 2


def test_envs_go_with_the_engine():
    with Engine([WaitingEnv], backend="coroutines") as engine:
        engine.reset()
        [method] = engine.call("open_from_outside")
        gone = weakref.ref(engine._backend._tasks.envs[0])
        del method
    assert gone() is None


def test_many_are_opened_and_closed():
    for _ in range(20):
        with Engine([WaitingEnv] * 4, backend="coroutines") as engine:
            engine.reset()
            engine.send(_zeros(4))


@pytest.mark.parametrize("how", [How.RAISE, How.SYS_EXIT])
def test_what_close_raises_spares_the_others(tmp_path, how):
    journal = tmp_path / "journal"
    script = {"journal": str(journal)}
    factories = [
        ScriptedFactory(name="env0", faults=[Fault(how=how, at="close")], **script),
        ScriptedFactory(name="env1", **script),
    ]
    open_shells(factories).close()
    assert "close env1" in journal.read_text()


def test_a_late_answer_goes_to_nobody(open_async):
    class Late(WaitingEnv):
        async def answer(self, value):
            await self.gate.wait()
            return value

    engine = open_async([Late])
    engine.call("shut")
    [open_gate] = engine.call("open_from_outside")
    with pytest.raises(RecvTimeout):
        engine.call("answer", 1, timeout=0.01)
    open_gate()
    assert engine.call("answer", 2) == [2]


def test_idle_costs_nothing(open_async):
    engine = open_async([WaitingEnv] * 8)
    engine.reset()
    thread = next(t for t in threading.enumerate() if t.name == "shoal-coroutines")
    clock = time.pthread_getcpuclockid(thread.ident)
    # It may still be on its way to sleep.
    while time.clock_gettime_ns(clock) != (used := _settled(clock)):
        pass
    threading.Event().wait(0.2)
    assert time.clock_gettime_ns(clock) == used


def _settled(clock):
    threading.Event().wait(0.05)
    return time.clock_gettime_ns(clock)
