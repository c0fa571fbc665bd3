"""Being asked to stop: SIGTERM and SIGINT become a note that the training loop acts on at the end of a step.

A launcher often passes a signal on that the process has had already from the terminal, so a repetition within
IMPATIENT_S says nothing new; a later one ends the process at once.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType

IMPATIENT_S = 5.0


class StopSignals:
    """Context manager: within it, `received` is the number of the signal that asks to stop, or None."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.since = 0.0  # time.monotonic() when it came
        self._before: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self.since = number, now
        elif now - self.since > IMPATIENT_S:
            raise SystemExit(128 + number)

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
