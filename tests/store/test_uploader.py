"""The uploader: what it publishes, what it never publishes, and what memory and requests it takes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dflash_stream.config import GiB, MiB, StoreSettings
from dflash_stream.store import NotFound, Store, StoreError, Uploader, open_store
from dflash_stream.store.checksum import crc32c, crc32c_header
from dflash_stream.store.upload import part_size
from tests.store.conftest import PART_BYTES
from tests.store.fault_proxy import FaultProxy, delay, hold, lose_answer, refuse, reset

ROOT = Path(__file__).resolve().parents[2]
PART = "PUT .*[?&]partNumber"
COMPLETE = "POST .*[?]uploadId"
ABORT = "DELETE .*[?]uploadId"


@pytest.fixture
def uploader(store: Store, settings: StoreSettings) -> Iterator[Uploader]:
    with Uploader(store, settings) as running:
        yield running


@pytest.fixture
def sink(s3_server: object) -> Iterator[FaultProxy]:
    """A store that accepts every upload, keeps nothing, and counts; cheap enough for many parts."""
    with FaultProxy() as running:
        yield running


def sink_settings(
    sink: FaultProxy, *, parts: int = 2, threads: int = 2, deadline_s: float = 20
) -> StoreSettings:
    return StoreSettings(
        url="s3://bucket/run",
        endpoint=sink.endpoint,
        part_bytes=PART_BYTES,
        pool_bytes=parts * PART_BYTES,
        max_concurrent_uploads=threads,
        deadline_s=deadline_s,
    )


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# --- what it publishes


def test_an_object_written_in_odd_pieces_arrives_whole(store: Store, uploader: Uploader) -> None:
    data = os.urandom(2 * PART_BYTES + 12345)
    upload = uploader.open("shards/x.tar", size_hint=len(data))
    for start in range(0, len(data), 777_777):
        upload.write(memoryview(data)[start : start + 777_777])
    assert upload.position == len(data)
    assert list(store.list("")) == []  # nothing before finish
    done = upload.finish().result(30)
    assert (done.key, done.size) == ("shards/x.tar", len(data))
    assert store.get("shards/x.tar") == (data, done.etag)
    stats = uploader.stats
    assert (stats.bytes_sent, stats.bytes_in_flight, stats.parts_queued) == (len(data), 0, 0)
    assert (stats.requests, stats.retries) == (5, 0)  # begin, three parts, complete


@pytest.mark.parametrize("size", [0, 1, 1000, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES])
def test_every_size_arrives(store: Store, uploader: Uploader, size: int) -> None:
    data = os.urandom(size)
    upload = uploader.open("k")
    upload.write(data)
    assert upload.finish().result(30).size == size
    assert store.get("k")[0] == data


def test_a_small_object_is_one_request(store: Store, uploader: Uploader) -> None:
    upload = uploader.open("k")
    upload.write(b"small")
    upload.finish().result(10)
    assert uploader.stats.requests == 1


def test_the_callers_memory_may_be_reused_at_once(store: Store, uploader: Uploader) -> None:
    buffer = bytearray(100_000)
    upload = uploader.open("k")
    for n in range(60):
        buffer[:] = bytes([n]) * len(buffer)
        upload.write(buffer)
    upload.finish().result(30)
    assert store.get("k")[0] == b"".join(bytes([n]) * len(buffer) for n in range(60))


def test_views_of_numbers_are_written_as_their_bytes(store: Store, uploader: Uploader) -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    upload = uploader.open("k")
    upload.write(numbers.data)
    upload.write(numbers[:0].data)
    assert upload.position == 48
    upload.finish().result(10)
    assert store.get("k")[0] == numbers.tobytes()


def test_several_objects_are_written_side_by_side(store: Store, uploader: Uploader) -> None:
    bodies = {f"k{n}": os.urandom(PART_BYTES + 1000 * n) for n in range(3)}
    uploads = {key: uploader.open(key) for key in bodies}
    for start in range(0, PART_BYTES + 3000, MiB):
        for key, upload in uploads.items():
            upload.write(bodies[key][start : start + MiB])
    for future in [upload.finish() for upload in uploads.values()]:
        future.result(30)
    assert {key: store.get(key)[0] for key in bodies} == bodies


def test_leaving_the_uploader_waits_for_what_was_finished(store: Store, settings: StoreSettings) -> None:
    with Uploader(store, settings) as uploader:
        upload = uploader.open("k")
        upload.write(bytes(PART_BYTES + 1))
        future = upload.finish()
    assert future.done()
    assert store.head("k").size_bytes == PART_BYTES + 1


def test_lost_requests_are_made_again_and_counted(proxied: StoreSettings, proxy: FaultProxy) -> None:
    store = open_store(proxied)
    data = os.urandom(2 * PART_BYTES + 1)
    proxy.on("POST .*[?]uploads", reset)
    proxy.on(f"{PART}=1", lose_answer)
    proxy.on(f"{PART}=2", refuse(503, "SlowDown"), times=2)
    proxy.on(COMPLETE, lose_answer)
    with Uploader(store, proxied) as uploader:
        upload = uploader.open("k")
        upload.write(data)
        upload.finish().result(30)
        assert uploader.stats.retries == 5
        assert uploader.stats.bytes_sent == len(data)
    assert store.get("k")[0] == data


# --- what it never publishes


def test_an_exception_while_writing_publishes_nothing(store: Store, uploader: Uploader) -> None:
    with pytest.raises(RuntimeError), uploader.open("k") as upload:  # noqa: PT012
        upload.write(bytes(2 * PART_BYTES + 1))
        raise RuntimeError
    assert list(store.list("")) == []
    assert list(store.list_uploads("")) == []


def test_an_object_that_is_forgotten_is_aborted_not_published(store: Store, uploader: Uploader) -> None:
    upload = uploader.open("k")
    upload.write(bytes(2 * PART_BYTES + 1))
    eventually(lambda: uploader.stats.bytes_sent == 2 * PART_BYTES, "parts are sent")
    assert len(list(store.list_uploads(""))) == 1
    del upload
    gc.collect()
    eventually(lambda: not list(store.list_uploads("")), "the upload is aborted")
    assert list(store.list("")) == []
    other = uploader.open("k2")  # its buffers came back
    other.write(bytes(5 * PART_BYTES))
    other.finish().result(30)


def test_closing_aborts_what_is_open(store: Store, settings: StoreSettings) -> None:
    uploader = Uploader(store, settings)
    upload = uploader.open("k")
    upload.write(bytes(PART_BYTES + 1))
    assert uploader.close() == []
    assert list(store.list_uploads("")) == list(store.list("")) == []
    with pytest.raises(StoreError, match="aborted"):
        upload.write(b"more")
    with pytest.raises(StoreError, match="aborted"):
        upload.finish()
    with pytest.raises(StoreError, match="closed"):
        uploader.open("other")
    assert uploader.close() == []


def test_abort_is_idempotent_and_too_late_after_completion(store: Store, uploader: Uploader) -> None:
    upload = uploader.open("k")
    upload.write(b"x")
    upload.finish().result(10)
    upload.abort()
    upload.abort()
    assert store.get("k")[0] == b"x"
    other = uploader.open("other")
    other.abort()
    other.abort()
    with pytest.raises(NotFound):
        store.head("other")


def test_writing_after_finish_is_a_mistake(uploader: Uploader) -> None:
    upload = uploader.open("k")
    upload.finish().result(10)
    with pytest.raises(ValueError, match="after finish"):
        upload.write(b"x")
    with pytest.raises(ValueError, match="twice"):
        upload.finish()


def test_the_first_failure_is_kept_and_leaves_no_upload_behind(
    proxied: StoreSettings, proxy: FaultProxy
) -> None:
    store = open_store(proxied)
    proxy.on(f"{PART}=2", refuse(403, "AccessDenied"))
    with Uploader(store, proxied) as uploader:
        upload = uploader.open("k")
        with pytest.raises(StoreError, match=r"sending part 2 .*AccessDenied") as first:  # noqa: PT012
            for _ in range(100):
                upload.write(bytes(MiB))
                time.sleep(0.01)
        with pytest.raises(StoreError) as again:
            upload.finish()
        assert again.value is first.value
        upload.abort()
    assert list(store.list_uploads("")) == list(store.list("")) == []
    assert proxy.count(COMPLETE) == 0


def test_a_failure_after_finish_is_in_the_future(proxied: StoreSettings, proxy: FaultProxy) -> None:
    store = open_store(proxied)
    release = threading.Event()
    proxy.on(f"{PART}=1", hold(release))
    proxy.on(f"{PART}=2", refuse(403, "AccessDenied"))
    with Uploader(store, proxied) as uploader:
        upload = uploader.open("k")
        upload.write(bytes(PART_BYTES + 1))
        future = upload.finish()
        release.set()
        with pytest.raises(StoreError, match="AccessDenied"):
            future.result(10)
    assert list(store.list_uploads("")) == list(store.list("")) == []
    assert proxy.count(COMPLETE) == 0


def test_a_completion_that_fails_is_aborted(proxied: StoreSettings, proxy: FaultProxy) -> None:
    store = open_store(proxied)
    proxy.on(COMPLETE, refuse(400, "InvalidPart"))
    with Uploader(store, proxied) as uploader:
        upload = uploader.open("k")
        upload.write(bytes(PART_BYTES + 1))
        with pytest.raises(StoreError, match="InvalidPart"):
            upload.finish().result(10)
    assert list(store.list_uploads("")) == list(store.list("")) == []


def test_an_upload_that_was_aborted_behind_its_back_is_a_failure(store: Store, uploader: Uploader) -> None:
    upload = uploader.open("k")
    upload.write(bytes(PART_BYTES + 1))
    eventually(lambda: uploader.stats.bytes_sent == PART_BYTES, "the first part is sent")
    (begun,) = store.list_uploads("")
    store.abort_upload(begun.key, begun.upload_id)
    with pytest.raises(StoreError):
        upload.finish().result(10)
    assert list(store.list("")) == []


# --- memory, requests, waiting


def test_part_sizes() -> None:
    assert part_size(0, 16 * MiB) == 16 * MiB
    assert part_size(9000 * 16 * MiB, 16 * MiB) == 16 * MiB
    assert part_size(9000 * 16 * MiB + 1, 16 * MiB) == 17 * MiB
    assert part_size(40 * 1024 * GiB, 16 * MiB) <= 5 * GiB
    for size in (10**9, 10**12, 10**13, 4 * 10**13):
        assert size <= 9000 * part_size(size, 5 * MiB)


def test_the_producer_waits_when_every_buffer_is_full(sink: FaultProxy) -> None:
    settings = sink_settings(sink, parts=2, threads=4)
    release = threading.Event()
    sink.on(PART, hold(release), times=100)
    with Uploader(open_store(settings), settings) as uploader:
        upload = uploader.open("k")

        def produce() -> None:
            for _ in range(30):
                upload.write(bytes(MiB))

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        eventually(lambda: sink.count(PART) == 2, "two parts are being sent")
        time.sleep(0.2)
        assert producer.is_alive()
        assert upload.position == 2 * PART_BYTES
        assert uploader.stats.bytes_in_flight == 2 * PART_BYTES
        release.set()
        producer.join(20)
        upload.finish().result(20)
        assert uploader.stats.blocked_s > 0.15
        assert uploader.peak_pool_bytes == 2 * PART_BYTES
    assert sum(len(part.body) for part in sink.matching(PART)) == 30 * MiB


def test_no_more_requests_than_allowed_are_in_flight(sink: FaultProxy) -> None:
    settings = sink_settings(sink, parts=6, threads=3)
    sink.on(PART, delay(0.1), times=100)
    with Uploader(open_store(settings), settings) as uploader:
        uploads = [uploader.open(f"k{n}") for n in range(2)]
        data = bytes(PART_BYTES)
        for _ in range(5):
            for upload in uploads:
                upload.write(data)
        for future in [upload.finish() for upload in uploads]:
            future.result(20)
    assert sink.peak(PART) == 3


def test_completions_come_on_top_of_the_requests_allowed(sink: FaultProxy) -> None:
    settings = sink_settings(sink, parts=6, threads=3)
    release = threading.Event()
    sink.on(COMPLETE, hold(release))
    sink.on(PART, delay(0.1), times=100)
    with Uploader(open_store(settings), settings) as uploader:
        slow = uploader.open("slow")
        slow.write(bytes(PART_BYTES))
        first = slow.finish()
        eventually(lambda: sink.count(COMPLETE) == 1, "the first is being completed")
        other = uploader.open("other")
        other.write(bytes(6 * PART_BYTES))
        other.finish().result(20)
        assert not first.done()
        release.set()
        first.result(10)
    assert sink.peak("PUT|POST") == 3


def test_parts_carry_their_checksum_and_are_neither_signed_nor_chunked(sink: FaultProxy) -> None:
    """SHA-256 of a body costs more than sending it, and many stores do not understand checksum trailers."""
    settings = sink_settings(sink)
    data = os.urandom(PART_BYTES + 7)
    with Uploader(open_store(settings), settings) as uploader:
        upload = uploader.open("k")
        upload.write(data)
        upload.finish().result(20)
    parts = sink.matching(PART)
    assert sorted(len(part.body) for part in parts) == [7, PART_BYTES]
    for part in parts:
        headers = {name.lower(): value for name, value in part.headers.items()}
        assert headers["x-amz-checksum-crc32c"] == crc32c_header(crc32c(part.body))
        assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert not {"x-amz-trailer", "content-encoding", "transfer-encoding", "content-md5"} & headers.keys()


def test_completing_an_object_does_not_hold_up_the_next_one(sink: FaultProxy) -> None:
    """A store may take minutes to complete an object."""
    settings = sink_settings(sink, threads=2)
    release = threading.Event()
    sink.on(f"{COMPLETE}", hold(release))
    with Uploader(open_store(settings), settings) as uploader:
        slow, quick = uploader.open("slow"), uploader.open("quick")
        slow.write(bytes(PART_BYTES))
        first = slow.finish()
        eventually(lambda: sink.count(COMPLETE) == 1, "the first is being completed")
        quick.write(bytes(PART_BYTES))
        quick.finish().result(10)
        assert not first.done()
        release.set()
        first.result(10)


def test_more_open_objects_than_buffers_do_not_block_for_ever(sink: FaultProxy) -> None:
    settings = sink_settings(sink, parts=2)
    with Uploader(open_store(settings), settings) as uploader:
        uploads = [uploader.open(f"k{n}") for n in range(4)]
        for _ in range(6):
            for upload in uploads:
                upload.write(bytes(MiB))
        for future in [upload.finish() for upload in uploads]:
            assert future.result(10).size == 6 * MiB
        assert uploader.peak_pool_bytes <= 4 * PART_BYTES  # one buffer for each open object
        last = uploader.open("last")
        last.write(bytes(4 * PART_BYTES))
        last.finish().result(10)


def test_a_large_object_takes_fewer_buffers_of_the_same_pool(sink: FaultProxy) -> None:
    settings = sink_settings(sink, parts=4)
    with Uploader(open_store(settings), settings) as uploader:
        small = uploader.open("small")
        small.write(bytes(4 * PART_BYTES))
        small.finish().result(10)
        large = uploader.open("large", size_hint=9000 * 10 * MiB)
        large.write(bytes(20 * MiB))
        large.finish().result(10)
        assert uploader.peak_pool_bytes <= 4 * PART_BYTES
    assert [len(part.body) for part in sink.matching("/large.*partNumber")] == [10 * MiB, 10 * MiB]


def test_an_upload_copies_its_bytes_once(sink: FaultProxy, tmp_path: Path) -> None:
    settings = StoreSettings(url=tmp_path.as_uri(), part_bytes=PART_BYTES, pool_bytes=2 * PART_BYTES)
    data = bytes(PART_BYTES)
    with Uploader(open_store(settings), settings) as uploader:
        upload = uploader.open("k")
        tracemalloc.start()
        for _ in range(6):
            upload.write(data)
        upload.finish().result(10)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 * PART_BYTES + MiB


def test_a_part_is_sent_from_where_it_lies(s3_url: str) -> None:
    settings = StoreSettings(
        url=s3_url, part_bytes=PART_BYTES, pool_bytes=2 * PART_BYTES, max_concurrent_uploads=2
    )
    store = open_store(settings)
    store.put("warm", b"x")
    with Uploader(store, settings) as uploader:
        upload = uploader.open("k")
        data = bytes(PART_BYTES)
        tracemalloc.start()
        upload.write(data)
        upload.finish().result(30)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < PART_BYTES + 2 * MiB  # one buffer, and what requests take


# --- aborting under trouble


def test_abort_waits_for_parts_in_flight_and_wakes_a_waiting_producer(sink: FaultProxy) -> None:
    settings = sink_settings(sink, parts=2, threads=2)
    release = threading.Event()
    sink.on(PART, hold(release), times=2)
    errors: list[BaseException] = []
    with Uploader(open_store(settings), settings) as uploader:
        upload = uploader.open("k")

        def produce() -> None:
            try:
                upload.write(bytes(4 * PART_BYTES))
            except StoreError as error:
                errors.append(error)

        producer = threading.Thread(target=produce, daemon=True)
        producer.start()
        eventually(lambda: sink.count(PART) == 2, "two parts are being sent, the producer waits")
        aborting = threading.Thread(target=upload.abort, daemon=True)
        aborting.start()
        producer.join(10)
        assert "aborted" in str(errors[0])
        assert aborting.is_alive()  # the parts have not come back yet
        release.set()
        aborting.join(10)
        assert not aborting.is_alive()
        (abort,) = sink.matching(ABORT)
        assert all(part.ended <= abort.began for part in sink.matching(PART))
        other = uploader.open("other")
        other.write(bytes(2 * PART_BYTES))
        other.finish().result(10)


def test_abort_does_not_wait_for_the_deadline_of_a_dead_store(sink: FaultProxy) -> None:
    settings = sink_settings(sink, deadline_s=900)
    sink.on(PART, refuse(500, "InternalError"), times=10**6)
    with Uploader(open_store(settings), settings) as uploader:
        upload = uploader.open("k")
        upload.write(bytes(2 * PART_BYTES))
        eventually(lambda: sink.count(PART) > 4, "parts are being retried")
        began = time.monotonic()
        upload.abort()
        assert time.monotonic() - began < 5
        assert sink.count(ABORT) == 1


def test_closing_in_time_names_what_may_be_left(sink: FaultProxy) -> None:
    settings = sink_settings(sink)
    release = threading.Event()
    sink.on(PART, hold(release), times=2)
    uploader = Uploader(open_store(settings), settings)
    upload = uploader.open("k")
    upload.write(bytes(PART_BYTES))
    eventually(lambda: sink.count(PART) == 1, "a part is being sent")
    began = time.monotonic()
    assert uploader.close(timeout_s=0.3) == ["k"]
    assert time.monotonic() - began < 3
    release.set()


def test_an_upload_that_cannot_be_aborted_is_named(sink: FaultProxy, caplog: pytest.LogCaptureFixture) -> None:
    settings = sink_settings(sink)
    sink.on(ABORT, refuse(403, "ExpiredToken"), times=9)
    uploader = Uploader(open_store(settings), settings)
    upload = uploader.open("k")
    upload.write(bytes(PART_BYTES))
    eventually(lambda: uploader.stats.bytes_sent == PART_BYTES, "the part is sent")
    upload.abort()
    assert uploader.close() == ["k"]
    assert "left behind" in caplog.text
    assert "left behind" in caplog.text


SCRIPT = """
import os, sys
from dflash_stream.config import StoreSettings
from dflash_stream.store import StoreError, Uploader, open_store
settings = StoreSettings(url="s3://bucket/run", endpoint=sys.argv[1], part_bytes=5 << 20, pool_bytes=20 << 20)
uploader = Uploader(open_store(settings), settings)
upload = uploader.open("k")
upload.write(bytes(11 << 20))
{}
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("print('left')", "left"),
        ("sys.exit('stopped')", "stopped"),
        (
            "\n".join(
                [
                    "if os.fork() == 0:",
                    "    try: upload.write(b'x')",
                    "    except StoreError as error: print(error)",
                    "    sys.exit(0)",
                    "os.wait()",
                ]
            ),
            "must make its own",
        ),
    ],
    ids=["end", "exit", "fork"],
)
def test_an_open_upload_neither_holds_up_the_end_of_a_process_nor_publishes(
    sink: FaultProxy, ending: str, said: str
) -> None:
    release = threading.Event()
    sink.on(PART, hold(release), times=9)
    command = [sys.executable, "-c", SCRIPT.format(ending), sink.endpoint]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=15)
    release.set()
    assert said in done.stdout + done.stderr
    assert sink.count(COMPLETE) == 0
