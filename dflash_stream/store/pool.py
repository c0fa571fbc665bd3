"""The memory of uploads: part buffers within a budget, and the waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]


class Pool:
    """Part buffers within `budget_bytes`, allocated when first needed and reused. Safe from many threads.

    A buffer is being filled (by the one object that holds it) or moving (queued or sent). When one is wanted
    that does not fit the budget while none is moving, no wait would ever end: it is allocated all the same. So
    memory is bounded by the budget, or by one part for each open object if that is more.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._free: list[Buffer] = []
        self._held_bytes = 0  # free and in use
        self._moving = 0
        self._changed = threading.Condition()
        self.blocked_s = 0.0  # producers waited, all together
        self.peak_bytes = 0

    def acquire(self, size: int, raise_if_failed: Callable[[], None]) -> Buffer:
        """A buffer of `size` bytes, waiting for one; raises what `raise_if_failed` raises meanwhile."""
        with self._changed:
            found = self._take(size)
            if found is not None:
                return found
            began = time.monotonic()
            try:
                while found is None:
                    raise_if_failed()
                    if self._moving == 0:
                        return self._allocate(size)
                    self._changed.wait()
                    found = self._take(size)
            finally:
                self.blocked_s += time.monotonic() - began
            return found

    def _take(self, size: int) -> Buffer | None:
        for place, buffer in enumerate(self._free):
            if len(buffer) == size:
                return self._free.pop(place)
        while self._free and self._held_bytes + size > self._budget_bytes:
            self._held_bytes -= len(self._free.pop())
        return self._allocate(size) if self._held_bytes + size <= self._budget_bytes else None

    def _allocate(self, size: int) -> Buffer:
        buffer = np.empty(size, np.uint8)
        self._held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return buffer

    def moves(self) -> None:
        """A buffer has been filled and queued."""
        with self._changed:
            self._moving += 1

    def release(self, buffer: Buffer, *, moving: bool) -> None:
        """Give a buffer back."""
        with self._changed:
            self._moving -= moving
            if self._held_bytes > self._budget_bytes:
                self._held_bytes -= len(buffer)
            elif len(buffer):  # an empty object's is none
                self._free.append(buffer)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting producers look at their object's failure."""
        with self._changed:
            self._changed.notify_all()
