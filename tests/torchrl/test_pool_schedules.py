"""Random schedules on every backend, against a model: which env, which step, nothing else.

Whatever is sent, received, timed out, reset and closed in whatever order: each result
comes once, to the right caller, in the order of its env, and never changes afterwards.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import MAIN, SOON, acts, index_of, open_named, seen
from tensordict import TensorDict

from shoal import NoPendingCallError, PendingCallError, RecvTimeout
from shoal.torchrl.pool_requests import RESET, STEP, STEP_AND_RESET, VERBS

NUM_ENVS, LENGTH = 4, 3


@dataclass
class Model:
    """One env, as it is when nobody else is there."""

    name: int
    resets: int = 0
    count: int = 0

    def reset(self) -> list[int]:
        self.resets, self.count = self.resets + 1, 0
        return [self.name, self.resets, 0]

    def step(self) -> list[int]:
        self.count += 1
        return [self.name, self.resets, self.count]


@dataclass
class World:
    """A pool, and what it has to be like."""

    pool: Any
    envs: list[Model] = field(default_factory=lambda: [Model(i) for i in range(NUM_ENVS)])
    # By env: what was asked for, with what action, and whether by number.
    sent: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    kept: list[tuple[Any, Any]] = field(default_factory=list)
    tick: int = 0

    def keep(self, td: Any) -> None:
        self.kept.append((td, td.clone()))

    def assert_untouched(self) -> None:
        for td, copied in self.kept:
            assert index_of(td) == index_of(copied)
            assert bool((td.exclude("env_index") == copied.exclude("env_index")).all())

    # --- what can be done ------------------------------------------------------------

    def send(self, kind: int, ids: list[int], by_number: bool) -> None:
        send = getattr(self.pool, f"async_{VERBS[kind]}_send")
        actions = []
        for _ in ids:
            self.tick += 1
            actions.append(self.tick % 89)
        td = None if kind == RESET else acts(*actions)
        arguments: Any = ids
        if by_number:
            ids, actions, arguments = ids[:1], actions[:1], ids[0]
            td = None if td is None else td[0]
        busy = sorted(self.sent)
        if set(ids) & set(busy):
            with pytest.raises(PendingCallError) as caught:
                send(td, env_index=arguments)
            assert f"envs {busy} are busy" in str(caught.value)
            return
        send(td, env_index=arguments)
        if td is not None:
            td["action"].fill_(-1)  # the pool has its own
        for i, action in zip(ids, actions, strict=True):
            self.sent[i] = (kind, action, by_number)

    def receive(self, kind: int, min_get: int, max_get: int | None, timeout: float | None) -> None:
        mine = [i for i, (k, _, private) in self.sent.items() if k == kind and not private]
        recv = getattr(self.pool, f"async_{VERBS[kind]}_recv")
        options = {"min_get": min_get, "max_get": max_get, "timeout": timeout}
        if min_get > len(mine):
            with pytest.raises(NoPendingCallError):
                recv(**options)
            return
        try:
            found = recv(**options)
        except RecvTimeout:
            assert timeout is not None
            return
        got = self.check(kind, found)
        assert set(got) <= set(mine)
        assert min_get <= len(got) <= (max_get or NUM_ENVS)

    def receive_these(self, kind: int, ids: list[int], timeout: float | None) -> None:
        recv = getattr(self.pool, f"async_{VERBS[kind]}_recv")
        if any(self.sent.get(i, (0,))[0] != kind for i in ids):
            with pytest.raises(NoPendingCallError):
                recv(env_index=ids, timeout=timeout)
            return
        try:
            found = recv(env_index=ids, timeout=timeout)
        except RecvTimeout:
            assert timeout is not None
            return
        assert self.check(kind, found) == sorted(ids)

    def step_all(self, kind: int) -> None:
        """A synchronous verb: refused while somebody is busy."""
        actions = [(self.tick + i) % 89 for i in range(NUM_ENVS)]
        self.tick += NUM_ENVS
        call = getattr(self.pool, VERBS[kind])
        arguments = () if kind == RESET else (acts(*actions),)
        if self.sent:
            with pytest.raises(PendingCallError):
                call(*arguments)
            return
        found = call(*arguments)
        self.sent = {i: (kind, action, False) for i, action in enumerate(actions)}
        assert self.check(kind, found) == list(range(NUM_ENVS))

    def reset_some(self, mask: list[bool]) -> None:
        """A reset of some, while others may be busy."""
        named = [i for i, chosen in enumerate(mask) if chosen]
        td = TensorDict({"_reset": torch.tensor(mask).unsqueeze(-1)}, [NUM_ENVS])
        if set(named) & set(self.sent):
            with pytest.raises(PendingCallError):
                self.pool.reset(td)
            return
        root = self.pool.reset(td)
        self.keep(root)
        rows = seen(root)
        for i in named:
            assert rows[i] == self.envs[i].reset()

    def wait_for(self, kind: int, ids: list[int]) -> None:
        """Coroutines that await one env each."""
        ids = [i for i in ids if i not in self.sent]
        if ids:
            asyncio.run(self._wait_for(kind, ids))

    async def _wait_for(self, kind: int, ids: list[int]) -> None:
        send = {RESET: self.pool.areset, STEP: self.pool.astep}.get(
            kind, self.pool.astep_and_maybe_reset
        )
        calls = []
        for i in ids:
            self.sent[i] = (kind, i, True)
            td = None if kind == RESET else acts(i)
            calls.append(send(td, env_index=[i]))
        async with asyncio.timeout(SOON):
            for i, found in zip(ids, await asyncio.gather(*calls), strict=True):
                assert self.check(kind, found) == [i]

    def close(self) -> None:
        """Whatever was in flight is gone; the next reset starts other envs."""
        self.pool.close()
        assert self.pool.is_closed
        self.envs, self.sent = [Model(i) for i in range(NUM_ENVS)], {}
        self.step_all(RESET)

    # --- what comes ------------------------------------------------------------------

    def check(self, kind: int, found: Any) -> list[int]:
        """Compares a result with the model; returns whose it was."""
        stepped, root = found if kind == STEP_AND_RESET else (found, found)
        ids: list[int] = index_of(root)
        assert ids == sorted(ids)
        if kind != RESET:
            assert index_of(stepped) == ids
            rewards = stepped["next", "reward"].flatten().tolist()
            assert rewards == [self.sent[i][1] for i in ids]
            if "action" in stepped.keys():  # noqa: SIM118
                assert stepped["action"].tolist() == rewards
            dones = stepped["next", "done"].flatten().tolist()
        for k, i in enumerate(ids):
            env = self.envs[i]
            if kind == RESET:
                assert seen(root)[k] == env.reset()
            else:
                after = env.step()
                assert seen(stepped["next"])[k] == after
                assert dones[k] == (env.count >= LENGTH)
                if kind == STEP_AND_RESET:
                    assert seen(root)[k] == (env.reset() if env.count >= LENGTH else after)
            del self.sent[i]
        for td in {id(td): td for td in (stepped, root)}.values():
            self.keep(td)
        return ids


_IDS = st.lists(st.integers(0, NUM_ENVS - 1), min_size=1, max_size=NUM_ENVS, unique=True)
_KIND = st.sampled_from([STEP, STEP_AND_RESET, STEP_AND_RESET, RESET])
_TIMEOUT = st.sampled_from([None, 0, 0.001])
_MOVES = st.one_of(
    st.tuples(st.just("send"), _KIND, _IDS, st.just(False)),
    st.tuples(st.just("send"), _KIND, _IDS, st.booleans()),
    st.tuples(
        st.just("receive"), _KIND, st.integers(1, 3), st.sampled_from([None, 3, 4]), _TIMEOUT
    ),
    st.tuples(st.just("receive_these"), _KIND, _IDS, _TIMEOUT),
    st.tuples(st.just("step_all"), _KIND),
    st.tuples(st.just("reset_some"), st.lists(st.booleans(), min_size=4, max_size=4)),
    st.tuples(st.just("wait_for"), _KIND, _IDS),
)
_SCHEDULES = st.lists(_MOVES, min_size=8, max_size=40)


def play_schedules(way: str, stack: str, *, num_examples: int, closes: bool) -> None:
    """Plays them one after another: what one has left in flight is the next one's business."""
    # Envs that hand out the same array each time, and spoil it when they are called.
    pool = open_named(way, NUM_ENVS, stack=stack, env={"length": LENGTH, "reuse": True})
    world = World(pool)

    @settings(max_examples=num_examples)
    @given(schedule=_SCHEDULES)
    def play(schedule: list[tuple[Any, ...]]) -> None:
        moves = list(schedule)
        if closes:
            moves.insert(len(moves) // 2, ("close",))
        for verb, *arguments in moves:
            getattr(world, verb)(*arguments)
        world.assert_untouched()
        world.kept.clear()

    try:
        world.step_all(RESET)
        play()
    finally:
        pool.close(raise_if_closed=False)


@pytest.mark.parametrize("stack", ["dense", "maybe_dense", "lazy"])
@pytest.mark.parametrize("way", MAIN)
def test_schedules(way: str, stack: str) -> None:
    play_schedules(way, stack, num_examples=15 if stack == "dense" else 8, closes=False)


@pytest.mark.parametrize("way", MAIN)
def test_schedules_with_a_close_in_them(way: str) -> None:
    play_schedules(way, "dense", num_examples=3, closes=True)
