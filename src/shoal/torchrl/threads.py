"""Torch threads of this process while batched envs ask for fewer; put back afterwards.

Knows torch's one global count. The envs may end in any order.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["ThreadLimits"]


class ThreadLimits:
    """Who has asked for which number of threads; the latest one that still runs decides."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limits: dict[int, int] = {}
        self._before = 0
        self._next_key = 0

    def set(self, num_threads: int) -> int:
        """Sets the number of threads; returns a key for `release`."""
        with self._lock:
            if not self._limits:
                self._before = torch.get_num_threads()
            self._next_key += 1
            self._limits[self._next_key] = num_threads
            torch.set_num_threads(num_threads)
            return self._next_key

    def release(self, key: int) -> None:
        """Takes one request back; after the last one the count is as it was before."""
        with self._lock:
            if self._limits.pop(key, None) is not None:
                torch.set_num_threads(next(reversed(self._limits.values()), self._before))
