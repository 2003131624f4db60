"""What the machine is: its processor, the memory of a process, package versions.

Reads files and asks the operating system; knows nothing of environments.
"""

from __future__ import annotations

import platform
import sys
from importlib import metadata
from pathlib import Path

__all__ = ["cpu_model", "memory_mb", "package_versions"]

_PACKAGES = (
    "shoal",
    "numpy",
    "torch",
    "torchrl",
    "tensordict",
    "gymnasium",
    "stable_baselines3",
    "envpool",
    "ale-py",
    "mujoco",
)


def memory_mb(pid: int) -> dict[str, float]:
    """Returns the memory of a process in MB, by the names of `smaps_rollup`.

    ``Pss`` counts shared pages by their share, ``Private`` only what would be freed
    if the process ended.
    """
    kilobytes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        kilobytes[name] = int(rest.split()[0])
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {
        "Rss": kilobytes["Rss"] / 1024,
        "Pss": kilobytes["Pss"] / 1024,
        "Private": private / 1024,
    }


def cpu_model() -> str:
    """Returns the processor's name, as well as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def package_versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages that matter; ``None``: not installed."""
    versions: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions
