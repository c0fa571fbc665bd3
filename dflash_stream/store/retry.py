"""The retry loop of a store: full jitter, a deadline, fewer requests in flight when the store asks for that.

It knows nothing of S3: a `classify` function turns an exception into a `Fault`. botocore's own retries are
off, since their quota belongs to the client: of 64 threads that all meet a 503, most would give up after a
retry or two.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from dflash_stream.store.base import StoreError, Traffic

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 20.0
FEW_ATTEMPTS = 5
SAID_FROM_FAILURES = 8  # some ten seconds: before that a fault is nobody's business


class Kind(Enum):
    """What can be done about a fault."""

    FINAL = "another attempt would end the same way"
    FEW = "probably final, worth a few attempts"
    TRANSIENT = "try again until the deadline"
    THROTTLED = "try again until the deadline, with fewer requests in flight"


@dataclass(frozen=True)
class Fault:
    """One failed attempt. `cause` and `remedy` are for the user and hold no secrets."""

    kind: Kind
    cause: str
    remedy: str = ""
    error: type[StoreError] = StoreError
    may_have_acted: bool = False  # the answer was lost: the store may have done what was asked

    def final(self, what: str) -> StoreError:
        """The error of an operation that ends with this fault."""
        return self.error(". ".join(part for part in (f"{what}: {self.cause}", self.remedy) if part))


def delay_s(failures: int, uniform: Callable[[float, float], float] = random.uniform) -> float:
    """Wait after that many failures in a row: uniform up to a ceiling that doubles (full jitter)."""
    return uniform(0.0, min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 30)))


def wait(seconds: float, event: threading.Event | None) -> None:
    """Sleep, or return early once the event is set."""
    (event or threading.Event()).wait(seconds)


@dataclass(frozen=True)
class Clock:
    """Time and chance, replaceable in tests."""

    now: Callable[[], float] = time.monotonic
    wait: Callable[[float, threading.Event | None], None] = wait
    uniform: Callable[[float, float], float] = random.uniform


class Gate:
    """A limit on requests in flight: halved when the store throttles, raised by one a round trip after that.

    A burst of refusals counts once: only a request that began after the last cut may cause the next one.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._limit = float(ceiling)
        self._in_flight = 0
        self._cuts = 0
        self._freed = threading.Condition()

    @property
    def limit(self) -> int:
        """Requests allowed in flight now."""
        return max(1, int(self._limit))

    @contextmanager
    def slot(self) -> Iterator[int]:
        """Hold one request's place, waiting for it; yields what `throttled` wants."""
        with self._freed:
            self._freed.wait_for(lambda: self._in_flight < self.limit)
            self._in_flight += 1
            ticket = self._cuts
        try:
            yield ticket
        finally:
            with self._freed:
                self._in_flight -= 1
                self._freed.notify_all()

    def throttled(self, ticket: int) -> None:
        """The request of this ticket was refused as one too many."""
        with self._freed:
            if ticket == self._cuts:
                self._cuts += 1
                self._limit = max(1.0, min(self._limit, self._in_flight) / 2)

    def succeeded(self) -> None:
        """A request went through."""
        with self._freed:
            if self._limit < self._ceiling:
                self._limit = min(self._ceiling, self._limit + 1 / self._limit)
                self._freed.notify_all()


@dataclass
class Attempts:
    """The history of one operation, shared between the loop and the operation."""

    number: int = 0  # attempts begun
    failures: int = 0  # in a row, without progress between them
    may_have_acted: bool = False  # some attempt lost its answer
    since: float = 0.0  # of the first attempt, or of the last progress
    note: str = ""  # where the operation stands, for the error

    def progressed(self, now: float) -> None:
        """Bytes arrived: the deadline and the delays begin anew."""
        self.failures = 0
        self.since = now


@dataclass(frozen=True)
class Retrier:
    """Runs operations of one store. `gate` and `clock` are shared by all of them."""

    deadline_s: float
    gate: Gate
    classify: Callable[[Exception], Fault]
    clock: Clock = field(default_factory=Clock)

    def run(
        self,
        what: str,
        action: Callable[[], T],
        traffic: Traffic,
        *,
        attempts: Attempts | None = None,
        give_up: threading.Event | None = None,
    ) -> T:
        """The result of `action`, tried until it succeeds, fails for good, or `deadline_s` pass without progress.

        `what` names operation and object. Raises the StoreError of the last fault. Once `give_up` is set there
        is no further attempt.
        """
        attempts = attempts or Attempts()
        attempts.since = self.clock.now()
        while True:
            attempts.number += 1
            with self.gate.slot() as ticket:
                try:
                    result = action()
                except Exception as error:
                    fault = self.classify(error)
                    cause = error
                    if fault.kind is Kind.THROTTLED:
                        self.gate.throttled(ticket)
                else:
                    self.gate.succeeded()
                    traffic.add(requests=1)
                    return result
            attempts.failures += 1
            attempts.may_have_acted |= fault.may_have_acted
            traffic.add(requests=1, throttled=int(fault.kind is Kind.THROTTLED))
            pause = delay_s(attempts.failures, self.clock.uniform)
            if self._is_over(fault, attempts, pause, give_up):
                raise self._error(what, fault, attempts) from cause
            traffic.add(retries=1)
            if attempts.failures >= SAID_FROM_FAILURES and attempts.failures.bit_count() == 1:
                spent = self.clock.now() - attempts.since
                log.warning(
                    "%s: failing for %.0f s of %.0f s, trying on: %s", what, spent, self.deadline_s, fault.cause
                )
            self.clock.wait(pause, give_up)
            if give_up is not None and give_up.is_set():
                raise self._error(what, fault, attempts) from cause

    def _is_over(self, fault: Fault, attempts: Attempts, pause: float, give_up: threading.Event | None) -> bool:
        if fault.kind is Kind.FINAL or (fault.kind is Kind.FEW and attempts.failures >= FEW_ATTEMPTS):
            return True
        if give_up is not None and give_up.is_set():
            return True
        return self.clock.now() - attempts.since + pause > self.deadline_s

    def _error(self, what: str, fault: Fault, attempts: Attempts) -> StoreError:
        if fault.kind is Kind.FINAL and attempts.number == 1:
            return fault.final(what)
        elapsed = self.clock.now() - attempts.since
        tried = f"{what}: failed after {attempts.number} attempts, {elapsed:.1f} s without progress"
        return fault.final(tried + (f" ({attempts.note})" if attempts.note else ""))
