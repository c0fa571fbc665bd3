"""The sign of life of one process: a small object under status/, overwritten while the process lives.

It is for people and tools that look at a run from outside; no process of the run ever reads it. A heartbeat
that cannot be written is skipped: telling must never stop the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from dflash_stream import layout
from dflash_stream.store import Store, StoreError

INTERVAL_S = 30.0
CLOSE_S = 3.0  # at the end, how long the last beat may take: a store that is down must not keep the process


def worker_name() -> str:
    """This process among all that work on a run: host and rank on that host."""
    return f"{socket.gethostname()}-{os.environ.get('LOCAL_RANK', '0')}"


class Heartbeat:
    """Publishes the latest figures of a phase every INTERVAL_S seconds, and once more when it is closed."""

    def __init__(self, store: Store, phase: str, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._key = f"{layout.STATUS}{phase}-{worker_name()}.json"
        self._interval_s = interval_s
        self._values: dict[str, Any] = {"phase": phase, "worker": worker_name(), "started": time.time()}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._give_up = threading.Event()
        self._ended_as = "finished"
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def update(self, values: Mapping[str, Any]) -> None:
        """Put these figures into the next beat, over older ones of the same names."""
        with self._lock:
            self._values.update(values)

    def _publish(self, state: str) -> None:
        with self._lock:
            body = json.dumps({**self._values, "state": state, "time": time.time()}, default=str)
        with contextlib.suppress(StoreError):  # the next beat tries again; the work itself reports a lost store
            self._store.put(self._key, body.encode(), give_up=self._give_up)

    def _beat(self) -> None:
        while not self._closed.wait(self._interval_s):
            self._publish("running")
        self._publish(self._ended_as)

    def close(self, state: str) -> None:
        """Publish a last time, with how the process ended ("finished", or what else `state` says)."""
        self._ended_as = state
        self._closed.set()
        self._thread.join(CLOSE_S)
        self._give_up.set()
