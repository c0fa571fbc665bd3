"""The retry loop by itself: no store, no network, time that only passes in waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from dflash_stream.store import NotFound, StoreError, Traffic
from dflash_stream.store.retry import (
    FEW_ATTEMPTS,
    LONGEST_DELAY_S,
    Attempts,
    Fault,
    Gate,
    Kind,
    Retrier,
    delay_s,
)
from tests.store.conftest import FakeClock


class Trouble(Exception):  # noqa: N818
    def __init__(self, fault: Fault) -> None:
        self.fault = fault


def retrier(clock: FakeClock, *, deadline_s: float = 100.0, gate: Gate | None = None) -> Retrier:
    def classify(error: Exception) -> Fault:
        if isinstance(error, Trouble):
            return error.fault
        raise error

    return Retrier(deadline_s, gate or Gate(8), classify, clock.clock())


def failing(kind: Kind, times: int, may_have_acted: bool = False) -> Callable[[], str]:
    """An action that fails `times` times, then succeeds."""
    left = [times]

    def action() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise Trouble(Fault(kind, "broken", "Mend it", may_have_acted=may_have_acted))
        return "done"

    return action


def test_delays_double_to_a_ceiling_and_are_jittered_from_zero() -> None:
    ceilings = [delay_s(n, lambda low, high: high) for n in range(1, 40)]
    assert ceilings[:3] == [0.1, 0.2, 0.4]
    assert max(ceilings) == LONGEST_DELAY_S
    assert ceilings == sorted(ceilings)
    assert delay_s(5, lambda low, high: low) == 0.0


def test_a_passing_fault_is_outlived_and_counted(fake_clock: FakeClock) -> None:
    traffic = Traffic()
    assert retrier(fake_clock).run("asking", failing(Kind.TRANSIENT, 3), traffic) == "done"
    assert (traffic.requests, traffic.retries, traffic.throttled) == (4, 3, 0)
    assert fake_clock.waits == [0.1, 0.2, 0.4]


def test_a_final_fault_is_not_tried_again(fake_clock: FakeClock) -> None:
    traffic = Traffic()
    with pytest.raises(StoreError, match=r"^asking: broken\. Mend it$"):
        retrier(fake_clock).run("asking", failing(Kind.FINAL, 1), traffic)
    assert (traffic.requests, traffic.retries) == (1, 0)


def test_the_loop_ends_at_the_deadline_and_says_how_long_it_tried(fake_clock: FakeClock) -> None:
    with pytest.raises(StoreError, match=r"failed after \d+ attempts, .* s without progress: broken\. Mend it"):
        retrier(fake_clock, deadline_s=100).run("asking", failing(Kind.TRANSIENT, 10**9), Traffic())
    assert 100 - LONGEST_DELAY_S < fake_clock.seconds <= 100


def test_a_long_trouble_is_said_and_a_short_one_is_not(
    fake_clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    retrier(fake_clock).run("asking", failing(Kind.TRANSIENT, 5), Traffic())
    assert caplog.text == ""
    with pytest.raises(StoreError):
        retrier(fake_clock, deadline_s=900).run("asking", failing(Kind.TRANSIENT, 10**9), Traffic())
    assert "asking: failing for" in caplog.text
    assert len(caplog.records) < 5


def test_a_doubtful_fault_is_tried_a_few_times(fake_clock: FakeClock) -> None:
    traffic = Traffic()
    with pytest.raises(StoreError):
        retrier(fake_clock).run("asking", failing(Kind.FEW, 10**9), traffic)
    assert traffic.requests == FEW_ATTEMPTS


def test_progress_moves_the_deadline(fake_clock: FakeClock) -> None:
    """A read of hours over a line that is cut every minute must not run into the deadline of one request."""
    attempts = Attempts()
    left = [50]

    def action() -> str:
        fake_clock.seconds += 60
        attempts.progressed(fake_clock.seconds)
        left[0] -= 1
        if left[0]:
            raise Trouble(Fault(Kind.TRANSIENT, "cut"))
        return "done"

    assert retrier(fake_clock).run("reading", action, Traffic(), attempts=attempts) == "done"
    assert set(fake_clock.waits) == {0.1}


def test_the_kind_of_error_and_its_cause_survive_retries(fake_clock: FakeClock) -> None:
    left = [2]

    def action() -> None:
        left[0] -= 1
        fault = Fault(Kind.TRANSIENT, "cut") if left[0] else Fault(Kind.FINAL, "not there", error=NotFound)
        raise Trouble(fault)

    with pytest.raises(NotFound, match="not there") as raised:
        retrier(fake_clock).run("asking", action, Traffic())
    assert isinstance(raised.value.__cause__, Trouble)


def test_an_operation_learns_that_an_earlier_attempt_may_have_acted(fake_clock: FakeClock) -> None:
    attempts = Attempts()
    retrier(fake_clock).run("a", failing(Kind.TRANSIENT, 1, may_have_acted=True), Traffic(), attempts=attempts)
    assert attempts.may_have_acted
    attempts = Attempts()
    retrier(fake_clock).run("a", failing(Kind.TRANSIENT, 1), Traffic(), attempts=attempts)
    assert not attempts.may_have_acted


def test_giving_up_ends_the_retries_at_once(fake_clock: FakeClock) -> None:
    give_up = threading.Event()
    give_up.set()
    traffic = Traffic()
    with pytest.raises(StoreError, match="broken"):
        retrier(fake_clock).run("asking", failing(Kind.TRANSIENT, 9), traffic, give_up=give_up)
    assert (traffic.requests, fake_clock.waits) == (1, [])


def test_giving_up_wakes_a_real_wait() -> None:
    give_up = threading.Event()
    threading.Timer(0.1, give_up.set).start()
    slow = Retrier(900, Gate(1), lambda error: Fault(Kind.TRANSIENT, "broken"))
    with pytest.raises(StoreError):
        slow.run("asking", failing(Kind.TRANSIENT, 10**9), Traffic(), give_up=give_up)


def test_a_bug_is_no_fault(fake_clock: FakeClock) -> None:
    with pytest.raises(ZeroDivisionError):
        retrier(fake_clock).run("asking", lambda: 1 // 0, Traffic())
    gate = Gate(1)
    with pytest.raises(ZeroDivisionError):
        retrier(fake_clock, gate=gate).run("asking", lambda: 1 // 0, Traffic())
    with gate.slot():  # the place has been given back
        pass


def test_throttling_halves_the_requests_in_flight_once_a_burst_and_success_raises_them() -> None:
    gate = Gate(64)
    slots = [gate.slot() for _ in range(16)]
    tickets = [slot.__enter__() for slot in slots]
    for ticket in tickets:
        gate.throttled(ticket)
    assert gate.limit == 8  # half of what was in flight, for sixteen refusals of one burst
    for slot in slots:
        slot.__exit__(None, None, None)
    with gate.slot() as ticket:
        gate.throttled(ticket)
    assert gate.limit == 1
    for _ in range(3):
        gate.succeeded()
    assert gate.limit == 2
    for _ in range(10_000):
        gate.succeeded()
    assert gate.limit == 64


def test_no_more_requests_are_in_flight_than_the_gate_allows() -> None:
    gate = Gate(3)
    lock = threading.Lock()
    now, peak = 0, 0

    def work() -> None:
        nonlocal now, peak
        for _ in range(50):
            with gate.slot():
                with lock:
                    now += 1
                    peak = max(peak, now)
                threading.Event().wait(0.0005)
                with lock:
                    now -= 1

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peak == 3
