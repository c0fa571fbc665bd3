"""Stores to test with: both kinds through the same tests, and S3 behind a proxy that injects faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dflash_stream.config import MiB, StoreSettings
from dflash_stream.store import Store, open_store
from dflash_stream.store.retry import Clock
from launch.s3_server import S3Server
from tests.store.fault_proxy import FaultProxy

PART_BYTES = 5 * MiB  # the smallest that S3 takes


@dataclass
class FakeClock:
    """Time that passes only in waits; every jittered wait is the longest possible one."""

    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)

    def clock(self) -> Clock:
        return Clock(now=lambda: self.seconds, wait=self._wait, uniform=lambda low, high: high)

    def _wait(self, delay: float, event: threading.Event | None) -> None:
        self.waits.append(delay)
        self.seconds += delay


@pytest.fixture
def fake_clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["s3", "file"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSettings:
    """Settings of an empty store, of each kind in turn."""
    url = request.getfixturevalue("s3_url") if request.param == "s3" else (tmp_path / "store").as_uri()
    return StoreSettings(url=url, part_bytes=PART_BYTES, pool_bytes=4 * PART_BYTES, max_concurrent_uploads=4)


@pytest.fixture
def store(settings: StoreSettings) -> Iterator[Store]:
    opened = open_store(settings)
    yield opened
    opened.close()


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[FaultProxy]:
    """A proxy before the real S3 server."""
    with FaultProxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def proxied(proxy: FaultProxy, s3_url: str) -> StoreSettings:
    """Settings of an empty S3 store behind the proxy."""
    return StoreSettings(
        url=s3_url,
        endpoint=proxy.endpoint,
        part_bytes=PART_BYTES,
        pool_bytes=4 * PART_BYTES,
        max_concurrent_uploads=4,
        timeout_s=5,
        deadline_s=20,
    )
