"""However a program ends, nothing of its engines stays."""

from __future__ import annotations

import os
import signal

import pytest
from scripts import Script, run

OPEN = """
faults = [Fault(how=How.HANG, number=2)]
factories = [ScriptedFactory(faults=faults if HANGS and i == 0 else []) for i in range(4)]
engine = Engine(factories, num_processes=2, **OPTIONS)
engine.reset(seed=0)
engine.step(np.arange(4))
"""


def _open(*, hangs=False, **options):
    return f"HANGS, OPTIONS = {hangs}, {options}\n" + OPEN


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_forgotten_engine_is_closed_at_exit(tmp_path, method):
    run(_open(start_method=method), folder=tmp_path)


def test_a_forgotten_engine_is_closed_when_collected(tmp_path):
    out, _ = run(
        _open()
        + """
import gc
from shoal.testing.leaks import look
print(len(look().processes))
del engine
gc.collect()
print(len(look().processes))
""",
        folder=tmp_path,
    )
    assert out == "3\n0\n"


@pytest.mark.parametrize(
    ("ending", "exitcode"),
    [
        ("sys.exit(3)", 3),
        ("1 / 0", 1),
        ("engine.send(np.arange(4)); sys.exit(3)", 3),
        ("engine.send(np.arange(4)); 1 / 0", 1),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.abort()", -6),
    ],
)
@pytest.mark.parametrize("hangs", [False, True])
def test_ends_in_the_middle(tmp_path, ending, exitcode, hangs):
    if hangs and "send" not in ending:
        ending = f"engine.send(np.arange(4)); {ending}"
    with Script(_open(hangs=hangs) + ending, folder=tmp_path) as script:
        assert script.finish()[0] == exitcode
        script.assert_nothing_left()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_killed_while_it_waits_for_an_env_that_hangs(tmp_path, method):
    code = _open(hangs=True, start_method=method) + "print('waits', flush=True)\n"
    with Script(code + "engine.step(np.arange(4))", folder=tmp_path) as script:
        assert script.process.stdout.readline() == "waits\n"
        script.process.send_signal(signal.SIGKILL)
        script.finish()
        script.assert_nothing_left()


def test_killed_while_it_starts(tmp_path):
    code = """
    faults = [Fault(how=How.HANG, at="build")]
    print("starts", flush=True)
    Engine([ScriptedFactory()] * 2 + [ScriptedFactory(faults=faults)], num_processes=3)
    """
    with Script(code, folder=tmp_path) as script:
        assert script.process.stdout.readline() == "starts\n"
        script.process.send_signal(signal.SIGKILL)
        script.finish()
        script.assert_nothing_left()


def test_interrupted_from_the_terminal(tmp_path):
    """Ctrl-C goes to the whole process group; only the caller minds."""
    code = (
        _open(hangs=True)
        + """
try:
    print('waits', flush=True)  # inside: the signal may come before it returns
    engine.step(np.arange(4))
except KeyboardInterrupt:
    engine.close(timeout=0.2)
    print('closed')
"""
    )
    with Script(code, folder=tmp_path) as script:
        assert script.process.stdout.readline() == "waits\n"
        os.killpg(script.process.pid, signal.SIGINT)
        exitcode, out, err = script.finish()
        assert (exitcode, out, err) == (0, "closed\n", "")
        script.assert_nothing_left()


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_forked_child_that_exits_does_no_harm(tmp_path, method):
    out, _ = run(
        _open(start_method=method)
        + """
import gc
for way in ("exit", "collect", "close"):
    pid = os.fork()
    if not pid:
        if way == "close":
            engine.close()
        if way == "collect":
            del engine
            gc.collect()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(engine.step(np.arange(4)).observation["count",].tolist())
engine.close()
""",
        folder=tmp_path,
    )
    assert out == "[2, 2, 2, 2]\n[3, 3, 3, 3]\n[4, 4, 4, 4]\n"


def test_two_engines_do_not_hold_each_other(tmp_path):
    """A pool forked from a caller with another pool inherits its descriptors."""
    run(
        """
        one = Engine([ScriptedFactory()] * 2, num_processes=2)
        two = Engine([ScriptedFactory()] * 2, num_processes=2, start_method="fork")
        three = Engine([ScriptedFactory()] * 2, num_processes=2)
        for engine in (one, two, three):
            engine.reset(seed=0)
        one.close()
        from shoal.testing.leaks import look
        assert len(look().processes) == 6, look().processes
        two.step([1, 2])
        three.close()
        two.close()
        assert not look().processes
        """,
        folder=tmp_path,
    )


def test_closing_in_every_state(tmp_path):
    run(
        """
        from shoal.errors import ShoalError
        hang = [Fault(how=How.HANG, at="step")]
        kill = [Fault(how=How.SIGKILL, at="step")]
        def open_one(faults=()):
            factories = [ScriptedFactory(faults=faults), ScriptedFactory()]
            engine = Engine(factories, num_processes=2)
            return engine
        fresh = open_one()
        fresh.close(); fresh.close()
        busy = open_one(); busy.reset(); busy.send([1, 2]); busy.close(); busy.close()
        stuck = open_one(hang); stuck.reset(); stuck.send([1, 2]); stuck.close(timeout=0)
        dead = open_one(kill); dead.reset()
        try:
            dead.step([1, 2])
        except ShoalError:
            dead.close(); dead.close()
        with open_one() as left:
            left.reset()
            left.close()
        from shoal.testing.leaks import look
        assert not look().processes
        """,
        folder=tmp_path,
    )


@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "1 / 0", "del engine"])
@pytest.mark.parametrize("hangs", [False, True])
def test_ends_with_threads_that_may_hang(tmp_path, ending, hangs):
    """They cannot be killed, and do not keep the interpreter."""
    code = f"""
HANGS = {hangs}
faults = [Fault(how=How.HANG, number=2)]
factories = [ScriptedFactory(faults=faults if HANGS and i == 0 else []) for i in range(4)]
engine = Engine(factories, backend="threads")
engine.reset(seed=0)
engine.step(np.arange(4))
engine.send(np.arange(4))
{ending}
"""
    with Script(code, folder=tmp_path) as script:
        exitcode, _, err = script.finish()
        assert exitcode == {"sys.exit(3)": 3, "1 / 0": 1}.get(ending, 0), err
        assert bool(err) == (ending == "1 / 0")
        script.assert_nothing_left()


def test_a_forked_child_of_threads_that_exits_does_no_harm(tmp_path):
    out, _ = run(
        """
import gc
engine = Engine([ScriptedFactory()] * 4, backend="threads")
engine.reset(seed=0)
engine.step(np.arange(4))
for way in ("exit", "collect", "close"):
    engine.send(np.arange(4))
    pid = os.fork()
    if not pid:
        if way == "close":
            engine.close()
        if way == "collect":
            del engine
            gc.collect()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(engine.recv().observation["count",].tolist())
engine.close()
""",
        folder=tmp_path,
    )
    assert out == "[2, 2, 2, 2]\n[3, 3, 3, 3]\n[4, 4, 4, 4]\n"
