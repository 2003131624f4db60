"""Tools to test environments, engines and backends with. Public, and free of any framework.

`scripted`: envs that misbehave on order. `gates`: points that an env reaches and a test
opens. `leaks`: what a block of code left behind. `conformance`: what every backend
must do.

Knows the public names of `shoal.engine`; knows no front, adapter or test runner.
"""

from shoal.testing.conformance import CHECKS, MakeEngine
from shoal.testing.gates import Gate, GateClosed
from shoal.testing.leaks import LeakError, no_leaks
from shoal.testing.scripted import Fault, How, ScriptedEnv, ScriptedFactory

__all__ = [
    "CHECKS",
    "Fault",
    "Gate",
    "GateClosed",
    "How",
    "LeakError",
    "MakeEngine",
    "ScriptedEnv",
    "ScriptedFactory",
    "no_leaks",
]
