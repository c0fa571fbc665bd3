"""A store that shows what is read from it, and answers late or wrongly on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from dflash_stream.store import Store


class WatchedStore:
    """Wraps a store. `ranges` lists (key, start, length) as asked for; `meddle` may delay, damage or raise.

    meddle(key, start, buffer) runs when the buffer has been filled.
    """

    def __init__(self, store: Store, meddle: Callable[[str, int, memoryview], None] | None = None) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.meddle = meddle
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        with self._lock:
            self.ranges.append((key, start, len(buffer)))
        self._store.read_into(key, start, buffer, etag=etag)
        if self.meddle is not None:
            self.meddle(key, start, buffer)

    @property
    def bytes_asked(self) -> int:
        with self._lock:
            return sum(length for _, _, length in self.ranges)


def late(key: str, start: int, buffer: memoryview) -> None:
    """Answers in an order that has nothing to do with the order of the questions."""
    time.sleep((start // 512 * 2654435761 % 97) / 5000)
