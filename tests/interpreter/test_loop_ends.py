"""However a program ends, its event loops of envs hold nothing up and say nothing."""

from __future__ import annotations

import pytest
from scripts import PREAMBLE, Script

OPEN = """
import asyncio, sys, threading, time
from shoal.engine import ArraySpec, EnvSpec

class Env:
    spec = EnvSpec(
        observation={(): ArraySpec((), np.dtype(np.int64))},
        action={(): ArraySpec((), np.dtype(np.int64))},
    )
    flatten_observation = build_action = None

    async def reset(self, seed=None, options=None):
        return 0, {}

    async def step(self, action):
        if action == 2:
            is_blocked.set()
            time.sleep(60)
        try:
            if action:
                await asyncio.Event().wait()
        finally:
            print("left", flush=True)
        return 1, 0.0, False, False, {}

    def seed(self, seed): pass
    def save_rng(self): return None
    def load_rng(self, state): pass
    def call(self, name, args, kwargs): return getattr(self, name)

    async def close(self):
        await asyncio.sleep(0)
        print("closed", flush=True)

is_blocked = threading.Event()
engine = Engine([Env] * 2, backend="coroutines")
engine.reset(seed=0)
engine.step(np.zeros(2, np.int64))
"""


@pytest.mark.parametrize(
    ("ending", "exitcode", "said"),
    [
        ("", 0, "left left closed closed"),
        ("engine.close()", 0, "left left closed closed"),
        ("del engine", 0, "left left closed closed"),
        ("sys.exit(3)", 3, "left left closed closed"),
        ("engine.send(np.ones(2, np.int64)); 1 / 0", 1, None),
        ("engine.send(np.ones(2, np.int64)); sys.exit(3)", 3, None),
        ("os._exit(4)", 4, "left left"),
    ],
)
def test_ends_in_the_middle(tmp_path, ending, exitcode, said):
    with Script(OPEN + ending, folder=tmp_path) as script:
        code, out, err = script.finish()
    assert code == exitcode, err
    if said is None:
        assert out.split().count("closed") == 2
    else:
        assert out.split() == said.split()
    if exitcode != 1:
        assert err == ""


def test_a_blocked_loop_does_not_hold_up_the_end(tmp_path):
    code = OPEN + "engine.send(np.full(2, 2)); is_blocked.wait(); sys.exit(5)"
    with Script(code, folder=tmp_path) as script:
        code, out, err = script.finish(timeout=30)
    assert code == 5
    assert "closed" not in out
    assert "blocks the event loop" in err


def test_nothing_is_said_in_development_mode(tmp_path):
    inner = (
        PREAMBLE
        + OPEN
        + """
engine.send(np.ones(2, np.int64))
engine.close()
engine = Engine([Env] * 2, backend="coroutines")
del engine
import gc
gc.collect()
"""
    )
    outer = f"""
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-X", "dev", "-c", {inner!r}]).returncode)
"""
    with Script(outer, folder=tmp_path, preamble="") as script:
        exitcode, _, err = script.finish()
    assert exitcode == 0, err
    assert err == ""
