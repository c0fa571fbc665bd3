"""S3 behind a proxy that loses answers, cuts bodies and refuses: what a network and a busy store do."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dflash_stream.config import StoreSettings
from dflash_stream.store import (
    NotFound,
    ObjectChanged,
    PreconditionFailed,
    Store,
    StoreError,
    crc32c,
    open_store,
)
from dflash_stream.store.s3 import S3Store
from tests.store.conftest import PART_BYTES, FakeClock
from tests.store.fault_proxy import FaultProxy, Reply, Request, answer, change, cut, lose_answer, refuse, reset

MIB = 1 << 20


@pytest.fixture
def faulty(proxied: StoreSettings, proxy: FaultProxy) -> Store:
    return open_store(proxied)


# --- reads


def test_a_read_that_is_cut_goes_on_at_the_byte_it_reached(faulty: Store, proxy: FaultProxy) -> None:
    data = os.urandom(3 * MIB)
    etag = faulty.put("k", data)
    proxy.on("GET /.*/k", cut(MIB + 17))
    proxy.on("GET /.*/k", cut(MIB))
    buffer = bytearray(len(data) - 100)
    faulty.read_into("k", 100, memoryview(buffer))
    assert buffer == data[100:]
    gets = proxy.matching("GET /.*/k")
    assert sum(get.served for get in gets) == len(buffer)  # not a byte twice
    assert [get.headers["Range"] for get in gets] == [
        f"bytes=100-{len(data) - 1}",
        f"bytes={100 + MIB + 17}-{len(data) - 1}",
        f"bytes={100 + 2 * MIB + 17}-{len(data) - 1}",
    ]
    assert gets[1].headers["If-Match"] == etag  # the rest must be of the same object
    assert faulty.reads.retries == 2


def test_a_read_from_the_end_goes_on_at_the_byte_it_reached(faulty: Store, proxy: FaultProxy) -> None:
    data = os.urandom(MIB)
    faulty.put("k", data)
    proxy.on("GET /.*/k", cut(1000))
    assert faulty.get_range("k", -5000, 5000) == data[-5000:]
    assert proxy.matching("GET /.*/k")[1].headers["Range"] == f"bytes={MIB - 4000}-{MIB - 1}"


def test_an_object_replaced_between_two_halves_of_a_read_is_noticed(faulty: Store, proxy: FaultProxy) -> None:
    faulty.put("k", b"a" * 1000)

    def cut_and_replace(request: Request, forward: object) -> tuple[Reply, int]:
        reply = forward()  # type: ignore[operator]
        faulty.put("k", b"b" * 1000)
        return reply, 500

    proxy.on("GET /.*/k", cut_and_replace)
    with pytest.raises(ObjectChanged):
        faulty.get_range("k", 0, 1000)


@pytest.mark.parametrize("fault", [reset, lose_answer, refuse(500, "InternalError"), answer(502), cut(0)])
def test_reads_outlive_passing_faults(faulty: Store, proxy: FaultProxy, fault: object) -> None:
    faulty.put("k", b"0123456789")
    proxy.on("GET /.*/k", fault, times=2)  # type: ignore[arg-type]
    assert faulty.get("k")[0] == b"0123456789"
    proxy.on("GET /.*/k", fault, times=2)  # type: ignore[arg-type]
    assert faulty.get_range("k", 2, 3) == b"234"
    proxy.on("GET /.*[?&]list-type", fault, times=1)  # type: ignore[arg-type]
    assert [info.key for info in faulty.list("")] == ["k"]  # an answer without its body is no empty listing


def test_a_whole_object_that_is_cut_is_read_again(faulty: Store, proxy: FaultProxy) -> None:
    data = os.urandom(10_000)
    faulty.put("k", data)
    proxy.on("GET /.*/k", cut(6000))
    assert faulty.get("k")[0] == data


def test_a_store_that_ignores_ranges_is_named_and_not_believed(faulty: Store, proxy: FaultProxy) -> None:
    faulty.put("k", b"0123456789")
    proxy.on("GET /.*/k", answer(200, b"0123456789", ETag='"x"'))
    with pytest.raises(StoreError, match="ignores ranged reads"):
        faulty.get_range("k", 2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        answer(206, b"345", Content_Range="bytes 3-5/10", ETag='"x"'),
        answer(206, b"23", Content_Range="bytes 2-3/10", ETag='"x"'),
        answer(206, b"234", ETag='"x"'),
        answer(206, b"", Content_Range="bytes 2-4/10", ETag='"x"'),
    ],
    ids=["other range", "shorter", "unnamed", "empty"],
)
def test_an_answer_with_other_bytes_than_asked_is_tried_again(
    faulty: Store, proxy: FaultProxy, wrong: object
) -> None:
    faulty.put("k", b"0123456789")
    proxy.on("GET /.*/k", wrong, times=2)  # type: ignore[arg-type]
    assert faulty.get_range("k", 2, 3) == b"234"
    proxy.on("GET /.*/k", wrong, times=1000)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="3 bytes from byte 2"):
        faulty.get_range("k", 2, 3)


# --- conditional puts


@pytest.mark.parametrize(
    "fault", [lose_answer, change(lambda reply: Reply(502)), change(lambda reply: Reply(503))]
)
def test_a_first_put_whose_answer_was_lost_is_a_success(
    faulty: Store, proxy: FaultProxy, fault: object
) -> None:
    proxy.on("PUT /.*/k", fault)  # type: ignore[arg-type]
    etag = faulty.put("k", b"mine, token 1", if_none_match=True)
    assert faulty.get("k") == (b"mine, token 1", etag)
    assert proxy.count("PUT /.*/k") == 2


def test_a_replacement_whose_answer_was_lost_is_a_success(faulty: Store, proxy: FaultProxy) -> None:
    old = faulty.put("k", b"before")
    proxy.on("PUT /.*/k", lose_answer)
    etag = faulty.put("k", b"after, token 1", if_match=old)
    assert faulty.get("k") == (b"after, token 1", etag)


def test_a_real_loser_learns_it_even_if_an_answer_was_lost(
    faulty: Store, proxy: FaultProxy, proxied: StoreSettings
) -> None:
    def other_writer_then_reset(request: Request, forward: object) -> Reply:
        open_store(proxied.model_copy(update={"endpoint": None})).put("k", b"theirs", if_none_match=True)
        return reset(request, forward)  # type: ignore[arg-type]

    proxy.on("PUT /.*/k", other_writer_then_reset)
    with pytest.raises(PreconditionFailed):
        faulty.put("k", b"mine", if_none_match=True)
    assert faulty.get("k")[0] == b"theirs"


def test_a_plain_loser_costs_no_further_request(faulty: Store, proxy: FaultProxy) -> None:
    faulty.put("k", b"theirs")
    with pytest.raises(PreconditionFailed):
        faulty.put("k", b"theirs", if_none_match=True)  # equal bytes are not taken for our own
    assert proxy.count("/k") == 2


def test_a_conflict_is_no_verdict_and_is_tried_again(faulty: Store, proxy: FaultProxy) -> None:
    proxy.on("PUT /.*/k", refuse(409, "ConditionalRequestConflict"), times=2)
    faulty.put("k", b"mine", if_none_match=True)
    assert proxy.count("PUT /.*/k") == 3


# --- throttling


@pytest.mark.parametrize("refusal", [(503, "SlowDown"), (429, "TooManyRequests"), (503, "ServiceUnavailable")])
def test_throttling_is_outlived_with_fewer_requests_in_flight(
    proxied: StoreSettings, proxy: FaultProxy, fake_clock: FakeClock, refusal: tuple[int, str]
) -> None:
    store = S3Store(proxied, clock=fake_clock.clock())
    before = store._retrier.gate.limit
    proxy.on("PUT /.*/k", refuse(*refusal), times=4)
    store.put("k", b"x")
    assert (store.writes.retries, store.writes.throttled) == (4, 4)
    assert store._retrier.gate.limit <= 2 < before


def test_a_store_that_refuses_for_ever_ends_the_run_at_the_deadline(
    proxied: StoreSettings, proxy: FaultProxy, fake_clock: FakeClock
) -> None:
    store = S3Store(proxied.model_copy(update={"deadline_s": 300.0}), clock=fake_clock.clock())
    proxy.on("PUT", refuse(503, "SlowDown"), times=10**6)
    with pytest.raises(StoreError, match="SlowDown") as raised:
        store.put("k", b"x")
    assert 270 < fake_clock.seconds <= 300
    assert "/k at http://127.0.0.1" in str(raised.value)
    assert "attempts" in str(raised.value)
    assert "--store.max_concurrent_uploads" in str(raised.value)


def test_a_storm_of_refusals_over_many_threads_loses_nothing(faulty: Store, proxy: FaultProxy) -> None:
    """botocore's own retries share one quota a client: of many threads most would give up."""
    proxy.on("PUT", refuse(503, "SlowDown"), times=60)
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda n: faulty.put(f"k/{n}", b"x"), range(32)))
    assert len(list(faulty.list("k/"))) == 32


# --- multipart


def _upload(store: Store, data: bytes) -> str:
    upload = store.create_upload("big", part_bytes=PART_BYTES)
    parts = []
    for number, start in enumerate(range(0, len(data), PART_BYTES), 1):
        piece = memoryview(data)[start : start + PART_BYTES]
        parts.append(store.put_part("big", upload, number, piece, crc32c(piece)))
    return store.complete_upload("big", upload, parts)


def test_lost_parts_and_answers_are_sent_again(faulty: Store, proxy: FaultProxy) -> None:
    data = os.urandom(PART_BYTES + MIB)
    proxy.on("PUT .*[?&]partNumber=1", reset)
    proxy.on("PUT .*[?&]partNumber=2", lose_answer)
    proxy.on("POST .*[?]uploadId=", lose_answer)
    _upload(faulty, data)
    assert faulty.get("big")[0] == data


@pytest.mark.parametrize(
    "operation",
    ["POST .*[?]uploads", "PUT .*[?&]partNumber", "POST .*[?]uploadId", "PUT .*/k$", "POST .*[?]delete"],
)
def test_an_answer_that_lost_its_body_or_its_etag_is_no_success(
    faulty: Store, proxy: FaultProxy, operation: str
) -> None:
    proxy.on(operation, lambda request, forward: (Reply(200, [], b"<answer/>"), 0))
    data = os.urandom(1000)
    faulty.put("k", data)
    faulty.put("l", data)
    _upload(faulty, data)
    faulty.delete(["k", "l"])
    assert [info.key for info in faulty.list("")] == ["big"]
    assert faulty.get("big")[0] == data
    assert faulty.writes.retries == 1


def test_an_error_inside_a_200_is_no_success(faulty: Store, proxy: FaultProxy) -> None:
    body = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>later</Message></Error>'
    proxy.on("POST .*[?]uploadId=", answer(200, body), times=2)
    _upload(faulty, b"abc")
    assert faulty.get("big")[0] == b"abc"
    assert proxy.count("POST .*[?]uploadId=") == 3


def test_a_completion_that_the_store_has_forgotten_is_recognised_by_the_object(
    faulty: Store, proxy: FaultProxy
) -> None:
    proxy.on("POST .*[?]uploadId=", lose_answer)
    proxy.on("POST .*[?]uploadId=", refuse(404, "NoSuchUpload"))
    assert _upload(faulty, b"abc") == faulty.head("big").etag


def test_a_lost_upload_is_not_taken_for_a_complete_one(faulty: Store, proxy: FaultProxy) -> None:
    proxy.on("POST .*[?]uploadId=", refuse(500, "InternalError"))
    proxy.on("POST .*[?]uploadId=", refuse(404, "NoSuchUpload"))
    with pytest.raises(NotFound):
        _upload(faulty, b"abc")


def test_another_object_under_the_key_is_not_taken_for_ours(faulty: Store, proxy: FaultProxy) -> None:
    faulty.put("big", b"something else")
    proxy.on("POST .*[?]uploadId=", refuse(500, "InternalError"))
    proxy.on("POST .*[?]uploadId=", refuse(404, "NoSuchUpload"))
    with pytest.raises(NotFound):
        _upload(faulty, b"abc")


def test_bytes_damaged_on_the_way_are_refused_by_the_store_and_sent_again(
    faulty: Store, proxy: FaultProxy
) -> None:
    proxy.on("PUT .*[?&]partNumber=1", refuse(400, "BadDigest"))
    _upload(faulty, b"abc")
    assert faulty.get("big")[0] == b"abc"


def test_a_part_is_checked_by_the_store(faulty: Store) -> None:
    upload = faulty.create_upload("big", part_bytes=PART_BYTES)
    with pytest.raises(StoreError, match=r"BadDigest|InvalidDigest|[Cc]hecksum"):
        faulty.put_part("big", upload, 1, memoryview(b"abc"), crc32c(b"abd"))
    faulty.abort_upload("big", upload)


def test_retries_of_a_part_end_when_its_object_is_given_up(faulty: Store, proxy: FaultProxy) -> None:
    upload = faulty.create_upload("big", part_bytes=PART_BYTES)
    proxy.on("PUT .*[?&]partNumber", refuse(500, "InternalError"), times=10**6)
    give_up = threading.Event()
    threading.Timer(0.3, give_up.set).start()
    with pytest.raises(StoreError, match="InternalError"):
        faulty.put_part("big", upload, 1, memoryview(b"abc"), crc32c(b"abc"), give_up=give_up)
    faulty.abort_upload("big", upload)


# --- deletions and listings


def test_a_deletion_that_failed_for_some_keys_is_finished(faulty: Store, proxy: FaultProxy) -> None:
    for key in "abc":
        faulty.put(key, b"x")
    body = "<DeleteResult><Error><Key>{}</Key><Code>SlowDown</Code><Message>m</Message></Error></DeleteResult>"
    prefix = faulty.url.split("/", 3)[3]
    proxy.on("POST .*[?]delete", answer(200, body.format(f"{prefix}/b").encode()))
    faulty.delete(["a", "b", "c"])
    second = proxy.matching("POST .*[?]delete")[1].body
    assert b"/b</Key>" in second
    assert b"/a</Key>" not in second


def test_a_deletion_that_is_forbidden_is_an_error(faulty: Store, proxy: FaultProxy) -> None:
    body = b"<DeleteResult><Error><Key>b</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    proxy.on("POST .*[?]delete", answer(200, body))
    with pytest.raises(StoreError, match=r"first b: AccessDenied.*s3:DeleteObject"):
        faulty.delete(["a", "b"])


def _page(name: str, entries: str, more: str = "") -> bytes:
    truncated = "true" if more else "false"
    return f"<{name}><IsTruncated>{truncated}</IsTruncated>{more}{entries}</{name}>".encode()


def test_a_listing_of_several_pages_is_whole_and_sorted(s3_server: object) -> None:
    def entry(key: str) -> str:
        when = "<LastModified>2026-01-01T00:00:00Z</LastModified>"
        return f'<Contents><Key>p/{key}</Key><Size>1</Size><ETag>"e"</ETag>{when}</Contents>'

    with FaultProxy() as fake:
        store = open_store(StoreSettings(url="s3://b/p", endpoint=fake.endpoint))
        more = "<NextContinuationToken>t+/=</NextContinuationToken>"
        fake.on("GET", answer(200, _page("ListBucketResult", entry("a/1") + entry("a-1"), more)))
        fake.on("GET .*continuation-token=t%2B%2F%3D", answer(200, _page("ListBucketResult", entry("a.1"))))
        assert [info.key for info in store.list("a")] == ["a-1", "a.1", "a/1"]


def test_uploads_over_several_pages_are_found_even_without_markers(s3_server: object) -> None:
    def entry(key: str, upload: str) -> str:
        when = "<Initiated>2026-01-01T00:00:00Z</Initiated>"
        return f"<Upload><Key>p/{key}</Key><UploadId>{upload}</UploadId>{when}</Upload>"

    with FaultProxy() as fake:
        store = open_store(StoreSettings(url="s3://b/p", endpoint=fake.endpoint))
        fake.on("GET", answer(200, _page("ListMultipartUploadsResult", entry("b", "u1"), " ")))
        fake.on(
            "GET .*key-marker=p%2Fb.*upload-id-marker=u1",
            answer(200, _page("ListMultipartUploadsResult", entry("b", "u1") + entry("a", "u2"))),
        )
        assert [(u.key, u.upload_id) for u in store.list_uploads("")] == [("a", "u2"), ("b", "u1")]
