"""Results on the caller's device: what to copy how, and when to wait for it.

The decisions are pure functions of device types, so that they can be tested where
there are no such devices.

Rows are in this process's memory, and what is made of them is fresh memory of its own.
So only two directions exist: actions come from a device to the host, results go from
the host to a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from tensordict import TensorDictBase

__all__ = ["copies_asynchronously", "to_device", "waits_for"]


def copies_asynchronously(source: str, target: str, *, non_blocking: bool) -> bool:
    """Returns whether a copy may be under way when the call returns.

    Args:
        source: type of the device that has the data.
        target: type of the device that gets it.
        non_blocking: what the user allows.
    """
    if not non_blocking or source == target:
        return False
    # To the host it would hand out memory that is not filled yet; and Metal copies out of
    # host memory without holding on to it.
    return source == "cpu" and target != "mps"


def waits_for(source: str, target: str, *, non_blocking: bool) -> Literal["nothing", "target"]:
    """Returns what has to be synchronised after a copy, before the data is used.

    CUDA stages pageable host memory before the call returns, and orders what follows on
    the same stream, so nothing has to be waited for there. Of other devices nothing is
    known, so they are.
    """
    if not copies_asynchronously(source, target, non_blocking=non_blocking):
        return "nothing"
    return "nothing" if target == "cuda" else "target"


def to_device(made: TensorDictBase, device: torch.device, non_blocking: bool) -> TensorDictBase:
    """Returns fresh results on a device."""
    target = device.type
    asynchronous = copies_asynchronously("cpu", target, non_blocking=non_blocking)
    if target == "mps":
        made = made.apply(_narrowed)
    moved: TensorDictBase = made.to(device, non_blocking=asynchronous)
    if waits_for("cpu", target, non_blocking=non_blocking) == "target":
        torch.accelerator.synchronize(device)
    return moved


def _narrowed(value: torch.Tensor) -> torch.Tensor:
    # Metal has no doubles.
    return value.float() if value.dtype == torch.float64 else value
