"""The upload of objects that are written as a stream: a fixed pool of part buffers, and a fixed number of requests.

One copy, from the caller's memory into a part buffer, which is sent from where it lies. When the pool is empty
the producer waits: that bounds the memory, and slows the producer down to the store. The first failure of an
object is kept: the next write raises it, the upload is aborted, and complete is never called. An object that
fits in one part is sent by a single put. Nothing but `finish` publishes: a finalizer aborts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType

import numpy as np

from dflash_stream.config import MiB, StoreSettings
from dflash_stream.store.base import Part, Store, StoreError
from dflash_stream.store.checksum import crc32c
from dflash_stream.store.pool import Buffer, Pool

log = logging.getLogger(__name__)

COMFORTABLE_PARTS = 9_000  # S3 allows 10,000: the rest is for a size that was estimated too low
MAX_PARTS = 10_000
MAX_PART_BYTES = 5 << 30


def part_size(size_hint: int, part_bytes: int) -> int:
    """The part size for about `size_hint` bytes: `part_bytes`, or more if that were over 9,000 parts."""
    needed = -(-size_hint // COMFORTABLE_PARTS)
    rounded = -(-needed // MiB) * MiB
    return min(max(part_bytes, rounded), MAX_PART_BYTES)


@dataclass(frozen=True)
class UploadedObject:
    """An object that is in the store."""

    key: str
    size: int  # bytes
    etag: str


@dataclass(frozen=True)
class UploadStats:
    """What an Uploader has done and is doing; a snapshot."""

    bytes_sent: int
    bytes_in_flight: int  # of parts that are being sent now
    parts_queued: int  # full, and waiting for a thread
    requests: int  # writing requests of this process's store
    retries: int
    blocked_s: float  # producers waited for a buffer


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    """A part thread: runs jobs until it meets None. It does not hold the Uploader, so that can be collected."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _end_threads(jobs: SimpleQueue[Callable[[], None] | None], count: int) -> None:
    for _ in range(count):
        jobs.put(None)


class Uploader:
    """Uploads of one process, sharing `pool_bytes` of part buffers and `max_concurrent_uploads` requests.

    All threads are daemons: neither a fork nor an exit waits for them. `left_behind` lists keys whose
    multipart upload could not be aborted.
    """

    def __init__(self, store: Store, settings: StoreSettings) -> None:
        self._store = store
        self._part_bytes = settings.part_bytes
        self._pool = Pool(max(settings.pool_bytes, 2 * settings.part_bytes))
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: weakref.WeakSet[ObjectUpload] = weakref.WeakSet()
        self._closed = False
        # Parts and completions share the requests allowed. Completions have threads of their own: a store may take
        # minutes over one, and no part thread waits for that.
        self._requests = threading.Semaphore(settings.max_concurrent_uploads)
        self._bytes_sent = self._bytes_in_flight = self._parts_queued = 0
        self._requests_before, self._retries_before = store.writes.requests, store.writes.retries
        self.left_behind: list[str] = []
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"upload-{n}", daemon=True)
            for n in range(settings.max_concurrent_uploads)
        ]
        for thread in self._threads:
            thread.start()
        self._end_threads = weakref.finalize(self, _end_threads, self._jobs, len(self._threads))

    def open(self, key: str, *, size_hint: int = 0) -> ObjectUpload:
        """Begin an object; `size_hint` is its expected size in bytes. Nothing is sent until a part is full."""
        self._check_process()
        upload = ObjectUpload(self, key, part_size(size_hint, self._part_bytes))
        with self._lock:
            if self._closed:
                raise StoreError(f"writing {key}: the uploader has been closed")
            self._open.add(upload)
        return upload

    @property
    def stats(self) -> UploadStats:
        """A snapshot of the counters."""
        with self._lock:
            return UploadStats(
                self._bytes_sent,
                self._bytes_in_flight,
                self._parts_queued,
                self._store.writes.requests - self._requests_before,
                self._store.writes.retries - self._retries_before,
                self._pool.blocked_s,
            )

    @property
    def peak_pool_bytes(self) -> int:
        """The most memory the part buffers ever took."""
        return self._pool.peak_bytes

    def close(self, *, timeout_s: float | None = None) -> list[str]:
        """Abort every object that is not complete and end the threads, waiting `timeout_s` at most.

        Returns the keys whose multipart upload may still be in the store, for the user to be told.
        """
        if os.getpid() != self._pid:
            return []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        with self._lock:
            self._closed = True
            uploads = list(self._open)
        for upload in uploads:
            upload._begin_abort()
        unsettled = [upload.key for upload in uploads if not upload._settled.wait(left())]
        self._end_threads()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(left())
        return self.left_behind + unsettled

    def __enter__(self) -> Uploader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for what was finished, unless an exception passes; then close."""
        if kind is None:
            with self._lock:
                finishing = [upload for upload in self._open if upload._future is not None]
            for upload in finishing:
                upload._settled.wait()
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"this uploader belongs to process {self._pid}: a forked process must make its own"
            )

    def _count(self, *, sent: int = 0, in_flight: int = 0, queued: int = 0) -> None:
        with self._lock:
            self._bytes_sent += sent
            self._bytes_in_flight += in_flight
            self._parts_queued += queued


class ObjectUpload:
    """One object that is being written. `write` from one thread at a time; `abort` from any."""

    def __init__(self, uploader: Uploader, key: str, part_bytes: int) -> None:
        self.key = key
        self.position = 0  # bytes written
        self._uploader = uploader
        self._part_bytes = part_bytes
        self._writing = threading.RLock()  # while the buffer is being filled: abort must not give it away
        self._buffer: Buffer | None = None
        self._filled = 0
        self._parts_begun = 0

        self._state = threading.Lock()  # guards the rest
        self._error: BaseException | None = None  # the first failure, or the abort
        self._outstanding = 0  # parts queued or sent
        self._parts: list[Part] = []
        self._whole_etag: str | None = None  # of an object that went in a single put
        self._future: Future[UploadedObject] | None = None
        self._settling = False

        self._creating = threading.Lock()
        self._upload_id: str | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append contiguous bytes. Waits while the pool is empty; raises the object's first failure.

        `data` has been copied when this returns.
        """
        self._uploader._check_process()
        view = memoryview(data)
        if not view.nbytes:
            return
        source = np.frombuffer(view.cast("B"), np.uint8)
        with self._writing:
            self._raise_if_failed()
            if self._future is not None:
                raise ValueError(f"{self.key}: write after finish")
            begin = 0
            while begin < len(source):
                if self._buffer is None:
                    self._buffer = self._uploader._pool.acquire(self._part_bytes, self._raise_if_failed)
                    self._filled = 0
                count = min(len(source) - begin, self._part_bytes - self._filled)
                piece = source[begin : begin + count]
                self._buffer[self._filled : self._filled + count] = piece  # without the GIL
                self._filled += count
                begin += count
                self.position += count
                if self._filled == self._part_bytes:
                    self._queue_part()

    def finish(self) -> Future[UploadedObject]:
        """No more bytes: the object is completed when all parts are in. Returns at once.

        The future holds the object or the error. A failure that is known already is raised here.
        """
        self._uploader._check_process()
        with self._writing:
            with self._state:
                if self._error is not None:
                    raise self._error
                if self._future is not None:
                    raise ValueError(f"{self.key}: finished twice")
                self._future = Future()
                self._future.set_running_or_notify_cancel()
                self._outstanding += 1  # keeps the object from settling before its last part is queued
            if self._parts_begun == 0:
                self._queue_whole()
            elif self._filled:
                self._queue_part()
            future = self._future
        self._returned()
        return future

    def abort(self) -> None:
        """Drop the object: wait for its parts in flight, abort the upload. No effect once it is complete."""
        if os.getpid() != self._uploader._pid:
            return
        self._begin_abort()
        self._settled.wait()

    def __enter__(self) -> ObjectUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort, unless `finish` was called and no exception passes."""
        if kind is not None or self._future is None:
            self.abort()

    def __del__(self) -> None:
        # May run anywhere, even inside one of these locks: it only leaves a job, as SimpleQueue always allows.
        if not self._settled.is_set() and os.getpid() == self._uploader._pid:
            self._uploader._jobs.put(self._begin_abort)

    def _begin_abort(self) -> None:
        self._fail(StoreError(f"the upload of {self.key} was aborted"))
        with self._writing:  # the writer, if it waits for a buffer, has been woken by the failure
            if self._buffer is not None:
                self._uploader._pool.release(self._buffer, moving=False)
                self._buffer = None
        self._settle_if_idle()

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        """Keep the first failure; too late once the object is being completed."""
        with self._state:
            if self._error is None and not self._settling:
                self._error = error
        self._stop.set()
        self._uploader._pool.wake()

    def _queue_part(self) -> None:
        assert self._buffer is not None
        self._parts_begun += 1
        if self._parts_begun > MAX_PARTS:
            limit = f"more than {MAX_PARTS} parts of {self._part_bytes} bytes"
            self._fail(StoreError(f"writing {self.key}: {limit}. Raise --store.part_bytes"))
            self._raise_if_failed()
        buffer, filled, number = self._buffer, self._filled, self._parts_begun
        self._queue(lambda: self._send(lambda view: self._send_part(number, view), buffer, filled))

    def _queue_whole(self) -> None:
        buffer = np.empty(0, np.uint8) if self._buffer is None else self._buffer
        filled = self._filled
        self._queue(lambda: self._send(self._send_whole, buffer, filled))

    def _queue(self, job: Callable[[], None]) -> None:
        with self._state:
            self._outstanding += 1
        self._buffer = None
        self._filled = 0
        self._uploader._pool.moves()
        self._uploader._count(queued=1)
        self._uploader._jobs.put(job)

    def _send(self, send: Callable[[memoryview], None], buffer: Buffer, filled: int) -> None:
        """In a part thread: send a part, or the whole of a small object. Skipped once the object has failed."""
        uploader = self._uploader
        with uploader._requests:
            uploader._count(queued=-1, in_flight=filled)
            sent = 0
            try:
                if self._error is None:
                    send(buffer.data[:filled])
                    sent = filled
            except BaseException as error:
                self._fail(error)
            finally:
                uploader._count(in_flight=-filled, sent=sent)
        uploader._pool.release(buffer, moving=True)
        self._returned()

    def _send_part(self, number: int, view: memoryview) -> None:
        store = self._uploader._store
        with self._creating:
            if self._upload_id is None:
                self._upload_id = store.create_upload(self.key, part_bytes=self._part_bytes, give_up=self._stop)
        part = store.put_part(self.key, self._upload_id, number, view, crc32c(view), give_up=self._stop)
        with self._state:
            self._parts.append(part)

    def _send_whole(self, view: memoryview) -> None:
        self._whole_etag = self._uploader._store.put(self.key, view, give_up=self._stop)

    def _returned(self) -> None:
        with self._state:
            self._outstanding -= 1
        self._settle_if_idle()

    def _settle_if_idle(self) -> None:
        """Nothing is outstanding: complete what was finished, abort what has failed, on a thread of its own."""
        with self._state:
            ended = self._future is not None or self._error is not None
            if self._outstanding or self._settling or not ended:
                return
            self._settling = True
        threading.Thread(target=self._settle, name=f"end of {self.key}", daemon=True).start()

    def _settle(self) -> None:
        error = self._error
        etag = self._whole_etag
        if error is None and etag is None:
            assert self._upload_id is not None
            try:
                parts = sorted(self._parts, key=lambda part: part.number)
                with self._uploader._requests:
                    etag = self._uploader._store.complete_upload(
                        self.key, self._upload_id, parts, give_up=self._stop
                    )
            except BaseException as failure:
                error = self._error = failure
        if error is not None and self._upload_id is not None:
            self._abort_remotely(self._upload_id)
        with self._uploader._lock:
            self._uploader._open.discard(self)
        self._settled.set()
        if self._future is None:
            return
        if error is not None:
            self._future.set_exception(error)
        else:
            assert etag is not None
            self._future.set_result(UploadedObject(self.key, self.position, etag))

    def _abort_remotely(self, upload_id: str) -> None:
        try:
            self._uploader._store.abort_upload(self.key, upload_id)
        except Exception as error:
            with self._uploader._lock:
                self._uploader.left_behind.append(self.key)
            log.warning(
                "an unfinished upload of %s is left behind; the store's rule for unfinished uploads removes it: %s",
                self.key,
                error,
            )
