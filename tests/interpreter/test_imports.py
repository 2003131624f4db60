"""What is imported, and by whom: the engine is light and its workers are lighter."""

from __future__ import annotations

import pytest
from scripts import run

HEAVY = ("torch", "tensordict", "torchrl", "gymnasium", "multiprocessing.resource_tracker")


def test_the_engine_imports_nothing_heavy():
    out, _ = run(
        f"""
        import shoal.engine, shoal.errors, shoal.testing, sys
        print([name for name in {HEAVY} if name in sys.modules])
        """,
        how="-c",
        preamble="",
    )
    assert out == "[]\n"


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_stay_without_what_the_caller_imported(method, tmp_path):
    for name in HEAVY[:4]:  # stand-ins: the real ones take seconds
        (tmp_path / f"{name}.py").write_text("")
    out, _ = run(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        import torch, tensordict, torchrl, gymnasium, multiprocessing.resource_tracker
        if __name__ == "__main__":
            with Engine([ScriptedFactory()] * 2, num_processes=2, start_method={method!r}) as e:
                for modules in e.call("modules"):
                    print([name for name in {HEAVY} if name in modules])
        """,
        folder=tmp_path,
    )
    assert out == "[]\n[]\n"
