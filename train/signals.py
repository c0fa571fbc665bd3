"""Being asked to stop: SIGTERM and SIGINT become a note that the training loop acts on at the end of a step.

A launcher often passes a signal on that the process has had already from the terminal, so a repetition within
IMPATIENT_S says nothing new; a later one ends the process at once. So does the end of the grace time, when no step
has ended by then: a store that does not answer must not keep a process alive until its launcher kills it.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from types import FrameType, TracebackType

from dflash_stream.entry import SIGNALS

IMPATIENT_S = 5.0

log = logging.getLogger(__name__)


class StopSignals:
    """Context manager: within it, `received` is the number of the signal that asks to stop, or None.

    grace_s: time from the signal to the end of the process, unless the loop calls `heed` before.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.received: int | None = None
        self.since = 0.0  # time.monotonic() when it came
        self._before: dict[int, object] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self.since = number, now
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        elif now - self.since > IMPATIENT_S:
            raise SystemExit(128 + number)

    def _end(self, number: int, frame: FrameType | None) -> None:
        log.warning(
            "no step ended within %g s of the signal: stopping without a checkpoint of the steps since the newest",
            self._grace_s,
        )
        raise SystemExit(128 + (self.received or number))

    def heed(self, number: int) -> None:
        """The loop stops now, because of this signal, which came to this process or to another one."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self.received is None:
            self.received, self.since = number, time.monotonic()

    @property
    def left_s(self) -> float:
        """What is left of the grace time; infinite without a signal."""
        return math.inf if self.received is None else max(0.0, self.since + self._grace_s - time.monotonic())

    def __enter__(self) -> StopSignals:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
