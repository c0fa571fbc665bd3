"""How a process ends before its work does: by SIGTERM, which the death of its launcher sends too, or SIGINT.

The first signal raises Interrupted in the main thread, wherever that is (it may be waiting for the store);
what is open is then closed on the way out. Launchers kill 30 s after they ask, so a process that has not
managed within its grace time ends by force, and says what it may leave behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from dflash_stream.entry import SIGNALS
from dflash_stream.errors import Interrupted


class Lifetime:
    """Context manager of the main thread: a signal raises Interrupted inside it, once."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._deadline: float | None = None  # on the monotonic clock, once a signal came
        self._before: dict[int, object] = {}
        self._closed = threading.Event()

    def remaining_s(self) -> float:
        """Seconds of the grace time left; all of it when no signal came."""
        return self._grace_s if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def __enter__(self) -> Lifetime:
        self._before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._deadline is not None:  # a launcher passes on what the terminal has sent already
            return
        self._deadline = time.monotonic() + self._grace_s
        threading.Thread(target=self._end_by_force, args=(number,), name="grace", daemon=True).start()
        raise Interrupted(number)

    def _end_by_force(self, number: int) -> None:
        if not self._closed.wait(self._grace_s):
            print(
                f"error: could not stop in order within {self._grace_s:g} s; parts of an unfinished shard "
                "may be left in the store. They are no part of the run; the store's rule for unfinished "
                "multipart uploads removes them.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(128 + number)
