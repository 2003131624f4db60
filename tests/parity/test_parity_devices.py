"""PARITY 1.11: devices. What needs an accelerator is skipped where there is none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from parity_cases import BOTH, KINDS, acting, column
from parity_envs import Counter, Writer
from tensordict import TensorDict
from torchrl.testing.mocking_classes import NestedCountingEnv

from shoal.torchrl.devices import copies_asynchronously, to_device, waits_for

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
needs_mps = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs MPS")


def specs_of(env: Any) -> Any:
    return [env.input_spec, env.output_spec]


@pytest.mark.parametrize("kind", BOTH)
def test_item_120_the_present_device(kind: str, make: Any) -> None:
    env = make(kind, 2, functools.partial(Counter, device="cpu"))
    specs = specs_of(env)
    assert env.to("cpu") is env
    assert env.to(torch.device("cpu")) is env
    assert all(new is old for new, old in zip(specs_of(env), specs, strict=True))


@pytest.mark.parametrize("kind", BOTH)
def test_item_121_workers_keep_running(kind: str, make: Any) -> None:
    env = make(kind, 2, Counter)
    env.reset()
    env.step(acting(env, 1.0))
    pids = list(env.pid())
    assert env.to("cpu") is env
    assert not env.is_closed
    assert list(env.pid()) == pids
    stepped = env.step(acting(env, 1.0).to("cpu"))
    assert column(stepped["next"]) == [2, 2]
    assert stepped["next"].device == torch.device("cpu")
    assert env.map(lambda child: child.device) == [None, None]  # the children stay


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("child", [Counter, NestedCountingEnv, Writer])
def test_item_122_specs_and_results_move(kind: str, child: Any, make: Any) -> None:
    env = make(kind, 2, child, device=None)
    before = env.rollout(2)
    env.to("cpu")
    for spec in specs_of(env):
        assert spec.device == torch.device("cpu")
    assert env.device == torch.device("cpu")
    assert env.reset().device == torch.device("cpu")
    torch.manual_seed(0)
    after = env.rollout(2)
    assert after.device == torch.device("cpu")
    assert set(after.keys(True, True)) == set(before.keys(True, True))
    assert env.fake_tensordict().device == torch.device("cpu")


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("inside", [None, "cpu"])
@pytest.mark.parametrize("outside", [None, "cpu"])
def test_item_123_pairs_of_devices(kind: str, inside: Any, outside: Any, make: Any) -> None:
    env = make(kind, 2, functools.partial(Counter, device=inside), device=outside)
    expected = outside or inside
    wanted = None if expected is None else torch.device(expected)
    data = env.rollout(3, break_when_any_done=False)
    assert data.device == wanted
    assert data["next", "observation"][..., 0].tolist() == [[1, 2, 3]] * 2


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("inside", ["cpu", "cuda"])
@pytest.mark.parametrize("outside", [None, "cpu", "cuda"])
def test_item_123_and_125_pairs_with_cuda(kind: str, inside: str, outside: Any, make: Any) -> None:
    # A process with CUDA must not be forked.
    more = {"mp_start_method": "forkserver"} if kind == "parallel" else {}
    env = make(kind, 2, functools.partial(Counter, device=inside), device=outside, **more)
    wanted = torch.device(outside or inside)
    data = env.rollout(50, break_when_any_done=False)
    assert data.device.type == wanted.type
    assert data["next", "observation"][..., 0].tolist() == [list(range(1, 51))] * 2
    assert (data["next", "reward"] == data["action"]).all()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", BOTH)
def test_item_122_moving_to_cuda(kind: str, make: Any) -> None:
    more = {"mp_start_method": "forkserver"} if kind == "parallel" else {}
    env = make(kind, 2, Counter, **more)
    env.reset()
    on_host = env.step(acting(env, 3.0))["next"]
    assert env.to("cuda") is env
    env.reset()
    on_device = env.step(acting(env, 3.0).to("cuda"))["next"]
    assert all(spec.device == torch.device("cuda:0") for spec in specs_of(env))
    assert (on_device == on_host.to("cuda")).all()


@pytest.mark.gpu
@needs_mps
@pytest.mark.parametrize("kind", BOTH)
def test_addition_16_mps(kind: str, make: Any) -> None:
    more = {"mp_start_method": "forkserver"} if kind == "parallel" else {}
    env = make(kind, 2, Counter, device="mps", **more)
    data = env.rollout(20, break_when_any_done=False)
    assert data["next", "observation"][..., 0].tolist() == [list(range(1, 21))] * 2


@pytest.mark.parametrize(
    ("source", "target", "non_blocking", "asynchronous", "waited_for"),
    [
        # Devices agree: nothing to wait for.
        ("cpu", "cpu", True, False, "nothing"),
        ("cuda", "cuda", True, False, "nothing"),
        # Copies are blocking: nothing to wait for.
        ("cpu", "cuda", False, False, "nothing"),
        ("cuda", "cpu", False, False, "nothing"),
        ("cpu", "mps", False, False, "nothing"),
        # To the host never asynchronously, so nobody can read what is not there yet.
        ("cuda", "cpu", True, False, "nothing"),
        ("mps", "cpu", True, False, "nothing"),
        # To CUDA the stream orders what follows; unknown devices are waited for.
        ("cpu", "cuda", True, True, "nothing"),
        ("cpu", "xpu", True, True, "target"),
        # Metal copies at once.
        ("cpu", "mps", True, False, "nothing"),
    ],
)
def test_item_124_who_waits_for_whom(
    source: str, target: str, non_blocking: bool, asynchronous: bool, waited_for: str
) -> None:
    assert copies_asynchronously(source, target, non_blocking=non_blocking) is asynchronous
    assert waits_for(source, target, non_blocking=non_blocking) == waited_for


def test_addition_16_metal_has_no_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []

    def record(self: Any, device: Any, **kwargs: Any) -> Any:
        moved.append((self, kwargs))
        return self

    monkeypatch.setattr(TensorDict, "to", record)
    made = TensorDict({"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2).long()}, [2])
    to_device(made, torch.device("mps"), True)
    ((narrowed, kwargs),) = moved
    assert narrowed["a"].dtype == torch.float32
    assert narrowed["b"].dtype == torch.int64
    assert kwargs == {"non_blocking": False}


def test_item_124_results_are_fresh_whatever_the_kind(make: Any) -> None:
    for kind in KINDS:
        env = make(kind, 2, Counter, device="cpu", non_blocking=True)
        first = env.reset()
        env.step(acting(env, 1.0).to("cpu"))
        assert column(first) == [0, 0]
