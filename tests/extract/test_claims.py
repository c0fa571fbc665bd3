"""Claims keep processes apart, and never for longer than a dead one is waited for; on S3 and on a directory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dflash_stream import layout
from dflash_stream.config import StoreSettings
from dflash_stream.errors import Interrupted
from dflash_stream.extract.claims import Claims
from dflash_stream.store import NotFound, Store, open_store

TTL_S = 60.0


class Clock:
    """The time, and a jump."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = request.getfixturevalue("s3_url") if request.param == "s3" else f"file://{tmp_path}/run"
    return open_store(StoreSettings(url=url))


def race(runners: int, unit: int, make: Callable[[], Claims]) -> list[bool]:
    """Who wins when several take the same unit at once; all keep their claims until the last has tried."""
    gate = threading.Barrier(runners)

    def run(_: int) -> bool:
        with make() as claims:
            gate.wait()
            won = claims.take(unit)
            gate.wait()
        return won

    with ThreadPoolExecutor(runners) as pool:
        return list(pool.map(run, range(runners)))


def test_two_processes_win_a_race(store: Store) -> None:
    for unit in range(3):
        won = race(6, unit, lambda: Claims(store, TTL_S))
        assert sorted(won) == [False] * 5 + [True]


def test_a_live_claim_is_taken_over_and_a_lapsed_one_is_not(store: Store) -> None:
    late = Clock()
    with Claims(store, TTL_S) as dead, Claims(store, TTL_S, clock=late) as heir:
        assert dead.take(3)
        assert not heir.take(3)
        assert heir.open_units([3, 4], 4) == [4]
        late.ahead_s = TTL_S + 5
        assert heir.open_units([3, 4], 4) == [3, 4]
        assert heir.take(3)
        assert heir.held == {3}
        dead.renew()  # it was only slow: it notices, and leaves the claim to its heir
        assert dead.held == set()
        dead.release(3)
        with Claims(store, TTL_S, clock=late) as third:
            assert not third.take(3)


def test_two_heirs_take_over_one_lapsed_claim(store: Store) -> None:
    late = Clock()
    dead = Claims(store, TTL_S)
    assert dead.take(0)
    late.ahead_s = TTL_S + 5
    won = race(4, 0, lambda: Claims(store, TTL_S, clock=late))
    assert sorted(won) == [False, False, False, True]


def test_a_claim_lapses_under_a_working_process(store: Store) -> None:
    with Claims(store, 1.5) as working, Claims(store, 1.5) as other:
        assert working.take(1)
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            assert not other.take(1)
            time.sleep(0.2)


def test_a_released_unit_stays_claimed(store: Store) -> None:
    first = Claims(store, TTL_S)
    assert first.take(1)
    assert first.take(2)
    first.release(1)
    with Claims(store, TTL_S) as second:
        assert second.open_units([1, 2, 3], 3) == [1, 3]
        assert second.take(1)
        first.close()
        assert second.take(2)
    assert list(store.list(layout.CLAIMS)) == []


def test_open_units_list_more_than_asked_for_or_out_of_order(store: Store) -> None:
    with Claims(store, TTL_S) as claims, Claims(store, TTL_S) as other:
        assert claims.take(0)
        assert other.take(2)
        assert claims.open_units([0, 1, 2, 3, 4, 5], 2) == [1, 3]
        assert claims.open_units([], 2) == []


def test_a_claim_names_its_process(store: Store) -> None:
    with Claims(store, TTL_S) as claims:
        claims.take(7)
        body, _ = store.get(layout.claim(7))
        assert set(json.loads(body)) == {"token", "expires"}


def test_a_claim_that_cannot_be_read_blocks_its_unit(store: Store) -> None:
    store.put(layout.claim(0), b"{")
    with Claims(store, TTL_S) as claims:
        assert claims.take(0)


def test_a_claim_that_was_deleted_is_still_thought_held(store: Store) -> None:
    with Claims(store, TTL_S) as claims:
        claims.take(0)
        store.delete([layout.claim(0)])
        claims.renew()
        assert claims.held == set()
        with pytest.raises(NotFound):
            store.get(layout.claim(0))


@pytest.mark.parametrize("action", ["put", "delete"])
def test_an_interrupt_between_store_and_note_leaves_a_claim(
    tmp_path: Path, monkeypatch: Any, action: str
) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}/run"))
    claims = Claims(store, TTL_S)
    claims.take(0)
    inner = getattr(store, action)

    def interrupted(*args: Any, **options: Any) -> None:
        if action == "put":  # it reached the store, its answer was not noted
            inner(*args, **options)
        monkeypatch.setattr(store, action, inner)
        raise Interrupted(15)

    monkeypatch.setattr(store, action, interrupted)
    with pytest.raises(Interrupted):
        claims.take(1) if action == "put" else claims.release(0)
    claims.close()
    assert list(store.list(layout.CLAIMS)) == []
