"""Scripts as people write them: no guard, lambdas, closures, classes of their own."""

from __future__ import annotations

import pytest
from scripts import run

USES = """
print("begins")

class Mine:
    spec = ScriptedFactory()().spec

class MyFactory:
    def __init__(self, env):
        self.env = env
    def __call__(self):
        return self.env()

def make(length):
    def build():
        return ScriptedFactory(episode_length=length)()
    return build

factories = [make(3), lambda: ScriptedFactory()(), MyFactory(ScriptedFactory()), ScriptedFactory()]
with Engine(factories, num_processes=2, **OPTIONS) as engine:
    engine.reset(seed=0)
    print(engine.step(np.arange(4)).observation["count",].tolist())
    print(engine.call("echo", Mine())[3].__class__ is Mine)
    print(engine.call("echo", lambda: 5)[0]())
print("ends")
"""
EXPECTED = "begins\n[1, 1, 1, 1]\nTrue\n5\nends\n"


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_no_guard_is_needed(tmp_path, how, method):
    if method != "forkserver" and how == "-c":
        pytest.skip("covered by the default method")
    code = f"OPTIONS = {{'start_method': {method!r}}}\n" + USES
    out, err = run(code, how=how, folder=tmp_path)
    assert out == EXPECTED
    assert err == ""


def test_prints_of_envs_do_no_harm(tmp_path):
    out, _ = run(
        """
        faults = [Fault(how=How.PRINT, at=verb) for verb in ("build", "reset", "step", "close")]
        with Engine([ScriptedFactory(faults=faults)], num_processes=1) as engine:
            engine.reset(seed=0)
            print(engine.step([1]).observation["count",].tolist())
        """,
        folder=tmp_path,
    )
    assert "[1]" in out.splitlines()
    assert "env at step 1 says hello" in out.splitlines()
    assert out.count("writes to the descriptor") == 4


def test_a_closed_stdout_does_no_harm(tmp_path):
    run(
        """
        os.close(1)
        faults = [Fault(how=How.PRINT, at="close")]
        with Engine([ScriptedFactory(faults=faults)] * 2, num_processes=2) as engine:
            engine.reset(seed=0)
            assert len(engine.step([1, 2])) == 2
        sys.stdout = None
        """,
        folder=tmp_path,
    )


def test_fork_neither_repeats_output_nor_exit_handlers(tmp_path):
    """Workers forked from the caller leave his buffers, files and exit handlers alone."""
    out, _ = run(
        """
        import atexit, tempfile
        folder = tempfile.TemporaryDirectory()
        atexit.register(print, "exits")
        sys.stdout.write("once\\n")  # stays in the buffer: stdout is a pipe
        with Engine([ScriptedFactory()] * 4, num_processes=2, start_method="fork") as engine:
            engine.reset(seed=0)
        print(os.path.isdir(folder.name))
        folder.cleanup()
        """,
        folder=tmp_path,
    )
    assert out == "once\nTrue\nexits\n"


def test_the_environment_of_workers_is_the_callers(tmp_path):
    out, _ = run(
        """
        os.environ["MINE"] = "yes"
        os.environ.pop("OMP_NUM_THREADS", None)
        class Factory(ScriptedFactory):
            def __call__(self):
                env = super().__call__()
                env.variables = [os.environ.get("MINE"), os.environ.get("OMP_NUM_THREADS")]
                return env
        with Engine([Factory()], num_processes=1) as engine:
            print(engine.call("variables"))
        """,
        folder=tmp_path,
    )
    assert out == "[['yes', None]]\n"
