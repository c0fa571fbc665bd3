"""Lets stock webdataset read the shards of a run from S3, and notice when they are not what was written.

    register_s3()
    pipeline = wds.WebDataset(shard_urls("s3://bucket/run"), shardshuffle=False).map(decode_sample)

webdataset by itself takes a cut or damaged shard for a short one. The stream that is registered here reads
ahead in parallel ranges, pins the object's etag and size, and compares every sample with its commit record
before its last byte is handed out. Training uses the project's own reader (`dflash_stream.stream`); this is for
everyone else's pipelines.
"""

from __future__ import annotations

import io
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, Literal

import webdataset as wds

from dflash_stream import layout
from dflash_stream.config import MiB, StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards import tar
from dflash_stream.shards.codec import decode
from dflash_stream.shards.index import committed_units, load_index, read_record
from dflash_stream.shards.record import REMAKE, ShardRecord, check_layout
from dflash_stream.shards.writer import SUFFIX
from dflash_stream.store import Store, crc32c, open_store

log = logging.getLogger(__name__)

RANGE_BYTES = 8 * MiB
RANGES_AHEAD = 4  # in flight or waiting to be consumed: 32 MiB of memory for an open shard


def register_s3(settings: StoreSettings | None = None) -> Callable[[int], None]:
    """Make webdataset open s3:// addresses through this module, with these settings (whatever their url).

    Without settings: the standard AWS chain and AWS_ENDPOINT_URL_S3. DataLoader workers need nothing: forked
    ones inherit the registration, spawned ones make it when they import this module for `decode_sample`. Only
    spawned workers that need other settings than the environment's take what is returned as their
    `worker_init_fn`.
    """
    settings = settings or StoreSettings()
    wds.gopen_schemes["s3"] = partial(_open, settings)
    return partial(_register_in_worker, settings)


def _register_in_worker(settings: StoreSettings, worker: int) -> None:
    register_s3(settings)


def shard_urls(
    store_url: str, split: Literal["train", "validation"] = "train", *, settings: StoreSettings | None = None
) -> list[str]:
    """The addresses of the committed shards of a run's split, in order of their units.

    Reads the index and compares it with the sample table. UserError when there is no run or no committed shard.
    """
    store = open_store((settings or StoreSettings()).model_copy(update={"url": store_url}))
    try:
        run = Run.open(store)
        held_out = run.identity.validation.units
        expected = range(held_out) if split == "validation" else range(held_out, run.identity.units)
        committed = committed_units(store)
        units = [unit for unit in expected if unit in committed]
        if not units:
            raise UserError(f"{store.url} has no committed {split} shard: run extract.py first")
        if len(units) < len(expected):
            log.warning("%s: %d of %d %s shards are committed", store.url, len(units), len(expected), split)
        index = load_index(store, run, units)
        return [f"{store.url}/{index.objects[unit][0]}" for unit in units]
    finally:
        store.close()


def decode_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample as webdataset yields it → `__key__`, `__url__` and its tensors by name (see `tensors.RULES`)."""
    named = {name: value for name, value in sample.items() if name.startswith("__")}
    body = sample.get(SUFFIX[1:])
    if body is None:
        raise UserError(
            f"{named.get('__key__')} of {named.get('__url__')} has no {SUFFIX}: it is no sample of a run"
        )
    return named | decode(body, f"sample {named.get('__key__')} of {named.get('__url__')}")


# --- streams


def _open(settings: StoreSettings, url: str, mode: str = "rb", bufsize: int = 0) -> io.BufferedReader:
    """webdataset's `gopen` for s3://. A shard must be the one its unit's commit record names."""
    if not mode.startswith("r"):
        raise UserError(f"{url} can only be read: shards are written by extract.py")
    address, separator, rest = url.rpartition(f"/{layout.SHARDS}")
    unit = layout.unit_of_shard(layout.SHARDS + rest) if separator else None
    if unit is not None:
        store = _store(settings.model_copy(update={"url": address}), os.getpid())
        record = read_record(store, unit)
        if record.object != layout.SHARDS + rest:
            raise UserError(
                f"{url} is not the shard of unit {unit}: that is {record.object}. List them with shard_urls"
            )
        check_layout(record, f"{address}/{layout.record(unit)}")
        stream = ObjectStream(store, record.object, record.size, record.etag, ShardCheck(record, url).feed)
    else:  # some other object: nothing is known of its content, but it is read whole, and from one version
        bucket, _, key = url.removeprefix("s3://").partition("/")
        store = _store(settings.model_copy(update={"url": f"s3://{bucket}"}), os.getpid())
        info = store.head(key)
        stream = ObjectStream(store, key, info.size_bytes, info.etag)
    return io.BufferedReader(stream, MiB)


@lru_cache(maxsize=64)
def _store(settings: StoreSettings, pid: int) -> Store:
    """One store a run and process: a forked worker opens its own."""
    return open_store(settings)


class ObjectStream(io.RawIOBase):
    """One version of an object as a stream of bytes, read ahead in parallel ranges. Use from one thread.

    `check` sees the bytes in order before they are handed out, raises when they are wrong. Errors are final.
    """

    def __init__(
        self, store: Store, key: str, size: int, etag: str, check: Callable[[memoryview], None] | None = None
    ) -> None:
        super().__init__()
        self.name = f"{store.url}/{key}"
        self._check = check
        self._read = partial(store.read_into, key, etag=etag)
        self._size = size
        self._asked = 0
        self._current = memoryview(b"")
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(RANGES_AHEAD, thread_name_prefix="shard-stream")
        self._ahead: deque[Future[memoryview]] = deque()
        for _ in range(RANGES_AHEAD):
            self._ask(bytearray(min(RANGE_BYTES, size - self._asked)))

    def _ask(self, buffer: bytearray) -> None:
        """Ask for the next range; the buffers go round."""
        length = min(len(buffer), self._size - self._asked)
        if length > 0:
            self._ahead.append(self._pool.submit(self._fetch, self._asked, memoryview(buffer)[:length]))
            self._asked += length
        if self._asked == self._size:
            self._pool.shutdown(wait=False)  # its threads end by themselves once they have read what was asked

    def _fetch(self, start: int, buffer: memoryview) -> memoryview:
        self._read(start, buffer)
        return buffer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, or less of it; 0 at the end. Raises StoreError, or what `check` raises."""
        if self._failure is not None:
            raise self._failure
        try:
            if not self._current and self._ahead:
                self._current = self._ahead[0].result()
                if self._check is not None:
                    self._check(self._current)
                self._ahead.popleft()
        except BaseException as error:
            self._failure = error
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise
        count = min(len(buffer), len(self._current))
        memoryview(buffer).cast("B")[:count] = self._current[:count]
        consumed, self._current = self._current, self._current[count:]
        if count and not self._current:
            self._ask(consumed.obj)  # type: ignore[arg-type]
        return count

    def close(self) -> None:
        if not self.closed:
            self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()


class ShardCheck:
    """Compares a shard's bytes, given in order, with its record: headers exactly, payloads by CRC32C.

    What follows the last payload holds no sample and is not compared.
    """

    def __init__(self, record: ShardRecord, url: str) -> None:
        self._url = url
        self._parts = self._expected(record)
        self._left = 0
        self._next()

    @staticmethod
    def _expected(record: ShardRecord) -> Iterator[tuple[str, int, bytes | int]]:
        """(sample, bytes, these bytes themselves or their CRC32C), from the first byte on."""
        before = b""
        for sample in record.samples:
            yield (
                sample.key,
                len(before) + tar.BLOCK_BYTES,
                before + tar.header(sample.key + SUFFIX, sample.size),
            )
            yield sample.key, sample.size, sample.crc32c
            before = tar.padding(sample.size)

    def _next(self) -> None:
        self._key, self._left, self._expectation = next(self._parts, ("", 0, 0))
        self._crc32c = 0

    def feed(self, data: memoryview) -> None:
        """UserError when `data`, which follows what was fed before, is not as recorded."""
        while len(data) and self._left:
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            if isinstance(self._expectation, bytes):
                expected = self._expectation[: len(piece)]
                self._expectation = self._expectation[len(piece) :]
                if piece != expected:
                    raise UserError(f"{self._url} is damaged at the tar header of {self._key}. {REMAKE}")
            else:
                self._crc32c = crc32c(piece, self._crc32c)
                if not self._left and self._crc32c != self._expectation:
                    raise UserError(
                        f"sample {self._key} of {self._url} is damaged, in the store or on the way here: its "
                        f"CRC32C is {self._crc32c:08x}, recorded was {self._expectation:08x}. {REMAKE}"
                    )
            if not self._left:
                self._next()


wds.gopen_schemes.setdefault("s3", partial(_open, StoreSettings()))  # for spawned workers; see register_s3
