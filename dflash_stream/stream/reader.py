"""The range engine: rows of the sample table in, checked samples out, in the same order.

Samples are read ahead by threads, up to a budget of bytes, with ranged GETs: a large sample in several,
neighbours in a shard in one. Each sample's length and CRC32C are compared with the shard's index before it is
handed out. There are no processes, no cache and no state; what is read next is the caller's business (`order`,
`loader`), and trying again after a fault is the store's.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from dflash_stream.config import StreamSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards.codec import decode
from dflash_stream.shards.index import Location, ShardIndex
from dflash_stream.shards.record import REMAKE
from dflash_stream.store import ObjectChanged, Store, crc32c
from dflash_stream.stream.ranges import cut, plan_reads
from dflash_stream.stream.sample import Sample

_MAX_AHEAD = 4096  # places of the order held at once: looking ahead ends even where nothing is to be read
_JOIN_S = 5.0  # on ending, how long to wait for requests in flight; a thread stuck longer ends by itself

log = logging.getLogger(__name__)


@dataclass
class Counters:
    """What a reader has done so far; `prefetched_bytes` is what it holds or has under way at the moment."""

    bytes_read: int = 0
    requests: int = 0
    samples: int = 0
    rereads: int = 0  # samples read again because their checksum was wrong
    retries: int = 0  # requests that the store tried again, this reader's and others'
    wait_s: float = 0.0  # the consumer waited for the next sample
    prefetched_bytes: int = 0


@dataclass
class _Entry:
    """One place of the order, on its way from the plan to the consumer."""

    row: int
    epoch: int
    where: Location | None
    cost: int  # bytes of the budget, from being scheduled to being handed out
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    missing: int = 0  # ranges still under way
    sample: Sample | None = None
    error: BaseException | None = None


@dataclass(frozen=True)
class _Range:
    """One request: fill `buffer` from byte `start` of the object that holds `entries`."""

    start: int
    buffer: memoryview
    entries: list[_Entry]

    @property
    def where(self) -> Location:
        where = self.entries[0].where
        assert where is not None
        return where


class SampleReader:
    """Reads samples of a run through its index. Use from one thread; several `read` may be open at once.

    `index` must cover the rows that are asked for. `counters` sums over all reads.
    """

    def __init__(self, store: Store, run: Run, index: ShardIndex, settings: StreamSettings) -> None:
        self.counters = Counters()
        self._store = store
        self._run = run
        self._index = index
        self._settings = settings

    def read(self, requests: Iterable[tuple[int, int] | None]) -> Generator[Sample | None, None, None]:
        """Samples of (row, epoch) pairs, one for one, in order; None for a refused sample or a request of None.

        `requests` may be endless; it is consumed as far ahead as `prefetch_bytes` allows, in the calling
        thread. A single sample larger than that goes through alone. Ending the iteration in any way ends its
        threads. The tensors own their memory: they stay valid as long as they are held. Raises UserError naming
        the shard and the sample.
        """
        fetch = _Fetch(self._store, self._run, self._index, self._settings, self.counters, iter(requests))
        try:
            while (entry := fetch.next()) is not None:
                yield entry.sample
                del entry  # so that the sample is not kept while the next one is waited for
        finally:
            fetch.close()


class _Fetch:
    """One `read` under way: the places scheduled but not handed out, and the threads that fill them.

    What is scheduled is always a contiguous piece of the order, so the budget can never be held by later
    samples while an earlier one has no room.
    """

    def __init__(
        self,
        store: Store,
        run: Run,
        index: ShardIndex,
        settings: StreamSettings,
        counters: Counters,
        requests: Iterator[tuple[int, int] | None],
    ) -> None:
        self._store = store
        self._table = run.samples
        self._taps = (len(run.identity.layers), run.identity.target.hidden_size)
        # No codec makes states smaller than half, so this is what they take at most once they are decoded.
        self._growth = 1 if run.identity.codec == "bf16" else 2
        self._index = index
        self._settings = settings
        self._counters = counters
        self._requests = requests
        self._peeked: _Entry | None = None
        self._ended = False
        self._retries_before = store.reads.retries - counters.retries
        self._entries: deque[_Entry] = deque()
        self._scheduled_bytes = 0
        self._todo: queue.SimpleQueue[_Range | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._in_flight: dict[int, tuple[_Range, float]] = {}
        self._changed = threading.Condition()
        self._closed = False

    # --- the consumer's side

    def next(self) -> _Entry | None:
        """The next place of the order, read and checked; None at the end. What follows is then under way."""
        self._top_up()
        if not self._entries:
            return None
        entry = self._entries[0]
        self._wait(entry)
        self._counters.retries = self._store.reads.retries - self._retries_before
        if entry.error is not None:
            raise entry.error
        self._entries.popleft()
        self._account(-entry.cost)
        if entry.sample is not None:
            self._counters.samples += 1
        self._top_up()
        return entry

    def close(self) -> None:
        """Give up what is not begun, and end the threads."""
        self._closed = True
        while True:
            try:
                self._todo.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
            self._todo.put(None)
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._account(-self._scheduled_bytes)
        self._entries.clear()

    def _account(self, size: int) -> None:
        self._scheduled_bytes += size
        self._counters.prefetched_bytes += size

    def _peek(self) -> _Entry | None:
        """The first place that is not scheduled."""
        if self._peeked is None and not self._ended:
            try:
                request = next(self._requests)
            except StopIteration:
                self._ended = True
                return None
            row, epoch = request or (-1, 0)
            where = self._index.locate(row) if request else None
            self._peeked = _Entry(row, epoch, where, where.size * self._growth if where else 0)
        return self._peeked

    def _top_up(self) -> None:
        """Schedule what fits, once a quarter of the budget is free: enough to bring neighbours together."""
        budget = self._settings.prefetch_bytes
        if self._entries and (
            self._scheduled_bytes > budget - budget // 4 or len(self._entries) > _MAX_AHEAD - _MAX_AHEAD // 4
        ):
            return
        wave: list[_Entry] = []
        while (entry := self._peek()) is not None and len(self._entries) < _MAX_AHEAD:
            if self._entries and self._scheduled_bytes + entry.cost > budget:
                break
            self._peeked = None
            self._entries.append(entry)
            self._account(entry.cost)
            wave.append(entry)
        self._schedule(wave)

    def _schedule(self, wave: list[_Entry]) -> None:
        for read in plan_reads([entry.where for entry in wave], self._settings.range_bytes):
            buffer = np.empty(read.stop - read.start, np.uint8).data
            entries = [wave[place] for place in read.places]
            for entry in entries:
                assert entry.where is not None
                entry.payload = buffer[entry.where.offset - read.start :][: entry.where.size]
            ranges = cut(read.start, read.stop, self._settings.range_bytes)
            for entry in entries:
                entry.missing = len(ranges)
            for start, stop in ranges:
                self._todo.put(_Range(start, buffer[start - read.start : stop - read.start], entries))
                self._start_thread()

    def _start_thread(self) -> None:
        if len(self._threads) < self._settings.threads:
            torch.get_num_threads()  # the caller's number is fixed by this, before ours are set to one
            name = f"sample-reader-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _wait(self, entry: _Entry) -> None:
        """Until the entry is complete; says what is under way whenever that takes `stall_s`."""
        began = now = time.monotonic()
        alarm = began + self._settings.stall_s
        with self._changed:
            while entry.missing:
                self._changed.wait(max(0.0, alarm - now))
                now = time.monotonic()
                if now >= alarm and entry.missing:
                    log.warning(self._stalled(entry, now - began))
                    alarm = now + self._settings.stall_s
        self._counters.wait_s += now - began

    def _stalled(self, entry: _Entry, waited_s: float) -> str:
        now = time.monotonic()
        lines = [
            f"  {request.where.object} {_bytes(request.start, len(request.buffer))}: {now - since:.0f} s"
            for request, since in sorted(self._in_flight.copy().values(), key=lambda item: item[1])
        ]
        return (
            f"no sample for {waited_s:.0f} s: waiting for {self._name(entry)} from {self._store.url}. "
            f"{self._todo.qsize()} requests queued, {len(lines)} in flight:\n" + "\n".join(lines)
        )

    # --- the threads' side

    def _work(self) -> None:
        torch.set_num_threads(1)  # else decoding would start a team of OpenMP threads for each of ours
        me = threading.get_ident()
        while (request := self._todo.get()) is not None and not self._closed:
            self._in_flight[me] = (request, time.monotonic())
            error: BaseException | None = None
            try:
                self._fill(request.where, request.start, request.buffer)
            except BaseException as raised:  # whatever it is, it belongs to the consumer
                error = raised
            finally:
                del self._in_flight[me]
            for entry in request.entries:
                self._arrived(entry, error)
            del request

    def _fill(self, where: Location, start: int, buffer: memoryview) -> None:
        self._store.read_into(where.object, start, buffer, etag=where.etag)
        with self._changed:
            self._counters.requests += 1
            self._counters.bytes_read += len(buffer)

    def _arrived(self, entry: _Entry, error: BaseException | None) -> None:
        """One range of the entry is there, or will never be; the last one checks and decodes."""
        with self._changed:
            if error is not None and entry.error is None:
                entry.error = self._explain(entry, error)
            complete = entry.missing == 1
            if not complete:
                entry.missing -= 1
                return
        if entry.error is None and not self._closed:
            try:
                self._check(entry)
                entry.sample = self._decode(entry)
            except BaseException as raised:
                entry.error = raised
        entry.payload = memoryview(b"")
        with self._changed:
            entry.missing = 0
            self._changed.notify_all()

    def _check(self, entry: _Entry) -> None:
        """The payload is what the index says; one that is not is read again: it may be the network."""
        where = entry.where
        assert where is not None
        if crc32c(entry.payload) == where.crc32c:
            return
        with self._changed:
            self._counters.rereads += 1
        self._fill(where, where.offset, entry.payload)
        found = crc32c(entry.payload)
        if found != where.crc32c:
            raise UserError(
                f"{self._place(entry)} is damaged: CRC32C {found:08x}, the index says {where.crc32c:08x} "
                f"(read twice). {REMAKE}"
            )

    def _decode(self, entry: _Entry) -> Sample:
        where = self._place(entry)
        sample = _sample(self._table.key[entry.row], entry.row, entry.epoch, decode(entry.payload, where))
        tokens = int(self._table.tokens[entry.row])
        for name, shape in (
            ("input_ids", (tokens,)),
            ("loss_mask", (tokens,)),
            ("hidden_states", (tokens, *self._taps)),
        ):
            found = tuple(getattr(sample, name).shape)
            if found != shape:
                raise UserError(f"{where} has {name} of shape {found}, the run says {shape}")
        return sample

    def _explain(self, entry: _Entry, error: BaseException) -> BaseException:
        if isinstance(error, ObjectChanged):
            return UserError(
                f"{self._place(entry)} was replaced after the index was read: {error}. "
                "Start again, to read the new index"
            )
        if isinstance(error, UserError):
            explained = UserError(f"{self._place(entry)} cannot be read: {error}")
            explained.__cause__ = error
            return explained
        return error

    def _name(self, entry: _Entry) -> str:
        return f"sample {self._table.key[entry.row]} (row {entry.row})"

    def _place(self, entry: _Entry) -> str:
        where = entry.where
        assert where is not None
        return f"{self._name(entry)} in {self._store.url}/{where.object}, {_bytes(where.offset, where.size)}"


def _bytes(start: int, length: int) -> str:
    return f"bytes {start}-{start + length - 1}"


def _sample(key: str, row: int, epoch: int, tensors: dict[str, torch.Tensor]) -> Sample:
    greedy = "greedy.input_ids" in tensors
    return Sample(
        key=key,
        row=row,
        epoch=epoch,
        input_ids=tensors["input_ids"].long(),
        loss_mask=tensors["loss_mask"].bool(),
        hidden_states=tensors["hidden_states"],
        greedy_input_ids=tensors["greedy.input_ids"].long() if greedy else None,
        greedy_hidden_states=tensors["greedy.hidden_states"] if greedy else None,
        greedy_prompt_tokens=int(tensors["greedy.prompt_tokens"]) if greedy else 0,
    )
