"""What the tests of TorchRL children share: ways to run them, comparisons, logs."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection
from tensordict.base import is_non_tensor
from torchrl.envs import SerialEnv as TorchRLSerialEnv

from shoal.torchrl import ParallelEnv, SerialEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SEED = 7
N = 3

# A fork of this process starts ten times as fast as an interpreter that imports torchrl.
_FORKED: dict[str, Any] = {"mp_start_method": "fork"}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "serial": (SerialEnv, {}),
    "1 process": (ParallelEnv, {"num_processes": 1, **_FORKED}),
    "2 processes": (ParallelEnv, {"num_processes": 2, **_FORKED}),
    "one each": (ParallelEnv, {"num_processes": N, **_FORKED}),
    "a fresh interpreter": (ParallelEnv, {"num_processes": 2}),
}


def open_ours(way: str, makers: Any, **options: Any) -> Any:
    kind, more = WAYS[way]
    count = options.pop("num_envs", len(makers) if isinstance(makers, list) else N)
    return kind(count, makers, **{**more, **options})


def open_oracle(makers: Any, **options: Any) -> Any:
    """Returns TorchRL's own serial env over the same children."""
    count = options.pop("num_envs", len(makers) if isinstance(makers, list) else N)
    return TorchRLSerialEnv(count, makers, **options)


# --- comparisons ---------------------------------------------------------------------


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Checks that two results agree in every bit, and in what they say about themselves.

    Whether a stack is lazy is seen by those entries only that have no dense form.
    """
    if is_non_tensor(expected) or is_non_tensor(actual):
        assert is_non_tensor(actual), f"{where}: {actual} is not data"
        assert is_non_tensor(expected), f"{where}: {actual} should be {expected}"
        assert actual.batch_size == expected.batch_size, where
        assert same_objects(actual.tolist(), expected.tolist()), (
            f"{where}: {actual.tolist()} should be {expected.tolist()}"
        )
        return
    if is_tensor_collection(expected):
        _assert_same_collections(actual, expected, where)
        return
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), where
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: {actual.shape}, not {expected.shape}"
        assert actual.device == expected.device, f"{where}: {actual.device}, {expected.device}"
        same = torch.equal(actual, expected) or bool(
            ((actual == expected) | ((actual != actual) & (expected != expected))).all()
        )
        assert same, f"{where}:\n{actual}\nshould be\n{expected}"
        return
    assert same_objects(actual, expected), f"{where}: {actual} should be {expected}"


def _assert_same_collections(actual: Any, expected: Any, where: str) -> None:
    assert is_tensor_collection(actual), where
    assert actual.batch_size == expected.batch_size, (
        f"{where}: {actual.batch_size} should be {expected.batch_size}"
    )
    assert actual.device == expected.device, f"{where}: {actual.device}, {expected.device}"
    lazy = next((td for td in (actual, expected) if isinstance(td, LazyStackedTensorDict)), None)
    if lazy is not None:
        if isinstance(actual, LazyStackedTensorDict) and isinstance(
            expected, LazyStackedTensorDict
        ):
            assert actual.stack_dim == expected.stack_dim, where
        rows = zip(actual.unbind(lazy.stack_dim), expected.unbind(lazy.stack_dim), strict=True)
        for k, (left, right) in enumerate(rows):
            assert_same(left, right, f"{where}[{k}]")
        return
    if isinstance(expected, TensorDictBase):
        assert actual.names == expected.names, where
    else:
        assert type(actual) is type(expected), where
    left, right = set(actual.keys()), set(expected.keys())
    assert left == right, f"{where}: too many {left - right}, too few {right - left}"
    for key in sorted(right):
        assert_same(actual.get(key), expected.get(key), f"{where}/{key}")


def same_objects(left: Any, right: Any) -> bool:
    """Returns whether two Python objects of any nesting hold the same."""
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return (
            np.asarray(left).dtype == np.asarray(right).dtype
            and np.shape(left) == np.shape(right)
            and np.array_equal(left, right)
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_objects(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same_objects, left, right))
    return type(left) is type(right) and bool(left == right)


# --- scripts and what they got -------------------------------------------------------


class Log:
    """What a script got, and copies of it from that very moment."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any, Any]] = []

    def add(self, what: str, value: Any) -> Any:
        is_data = is_tensor_collection(value)
        # Shallow: the script may add entries of its own, but the tensors are the env's.
        kept, copied = (value.copy(), value.clone()) if is_data else (value, value)
        self.entries.append((f"{len(self.entries)} {what}", kept, copied))
        return value

    def let_go(self) -> Log:
        """Forgets everything but the copies."""
        self.entries = [(what, None, copied) for what, _, copied in self.entries]
        return self

    def assert_untouched(self) -> None:
        """Checks that nothing that was returned has changed since, or is shared."""
        for what, value, copied in self.entries:
            if is_tensor_collection(value):
                assert_same(value, copied, f"changed later: {what}")
                assert not value.is_shared(), what


def play(env: Any, script: Callable[[Any, Log], None]) -> Log:
    log = Log()
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    script(env, log)
    return log


def assert_same_logs(actual: Log, expected: Log) -> None:
    assert [what for what, _, _ in actual.entries] == [what for what, _, _ in expected.entries]
    for (what, _, copied), (_, _, wanted) in zip(actual.entries, expected.entries, strict=True):
        assert_same(copied, wanted, what)
    actual.assert_untouched()


@dataclass
class Case:
    """Children, and which scripts suit them.

    Attributes:
        makers: one for all, or a list.
        options: of the batched env.
        without: scripts that TorchRL's own serial env cannot play with these children, or
            plays wrongly.
        wrap: what to put around the batched env.
    """

    makers: Any
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    wrap: Callable[[Any], Any] | None = None

    def wrapped(self, env: Any) -> Any:
        return env if self.wrap is None else self.wrap(env)

    def ours(self, way: str) -> Any:
        return self.wrapped(open_ours(way, self.makers, **self.options))

    def oracle(self) -> Any:
        return self.wrapped(open_oracle(self.makers, **self.options))


def wanted_logs(case: Case, scripts: Sequence[Callable[[Any, Log], None]]) -> dict[Any, Any]:
    """Returns what the oracle gives for each script: a log, or the error that it raised."""
    found: dict[Any, Any] = {}
    for script in scripts:
        env = case.oracle()
        try:
            found[script] = play(env, script).let_go()
        except Exception as exc:  # noqa: BLE001 - shown by the test that asks for it
            found[script] = RuntimeError(f"the oracle raised {exc!r}").with_traceback(None)
        finally:
            env.close(raise_if_closed=False)
    return found


def assert_plays_alike(env: Any, wanted: dict[Any, Any]) -> None:
    """Plays the scripts one after another, and says of each how it differs.

    Args:
        env: gets closed.
        wanted: as `wanted_logs` returns it.
    """
    failed: list[str] = []
    try:
        for script, expected in wanted.items():
            try:
                if isinstance(expected, Exception):
                    raise expected
                assert_same_logs(play(env, script), expected)
            except Exception as exc:  # noqa: BLE001 - told at the end, with the others
                last = traceback.extract_tb(exc.__traceback__)[-1]
                failed.append(f"{script.__name__}: {type(exc).__name__} at {last.name}: {exc}")
    finally:
        env.close(raise_if_closed=False)
    assert not failed, "\n".join(failed)
