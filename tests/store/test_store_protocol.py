"""What every store must do, through the same tests: a real S3 server and a directory."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_stream.config import StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.store import (
    NotFound,
    ObjectChanged,
    Part,
    PreconditionFailed,
    Store,
    StoreError,
    crc32c,
    open_store,
)
from tests.store.conftest import PART_BYTES


def test_what_was_put_comes_back_with_the_same_etag_everywhere(store: Store) -> None:
    etag = store.put("a/b.json", b"hello")
    assert store.get("a/b.json") == (b"hello", etag)
    info = store.head("a/b.json")
    (listed,) = store.list("a/")
    assert (info.key, info.size_bytes, info.etag) == ("a/b.json", 5, etag)
    assert (listed.key, listed.size_bytes, listed.etag) == ("a/b.json", 5, etag)
    assert store.put("a/b.json", b"other") != etag
    assert store.get("a/b.json")[0] == b"other"


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.put("empty", b"")
    assert store.get("empty")[0] == b""
    assert store.head("empty").size_bytes == 0


def test_a_memoryview_is_put_without_becoming_bytes(store: Store) -> None:
    store.put("view", memoryview(bytearray(b"--inside--"))[2:8])
    assert store.get("view")[0] == b"inside"


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.get("none"),
        lambda store: store.head("none"),
        lambda store: store.get_range("none", 0, 1),
        lambda store: store.get("there/below"),
    ],
)
def test_a_missing_object_is_not_found(store: Store, ask: Callable[[Store], object]) -> None:
    store.put("there", b"x")
    with pytest.raises(NotFound):
        ask(store)


def test_a_put_that_must_be_first_fails_on_a_taken_key(store: Store) -> None:
    store.put("k", b"first", if_none_match=True)
    with pytest.raises(PreconditionFailed):
        store.put("k", b"second", if_none_match=True)
    assert store.get("k")[0] == b"first"


def test_a_put_over_a_stale_etag_fails(store: Store) -> None:
    old = store.put("k", b"one")
    new = store.put("k", b"two", if_match=old)
    with pytest.raises(PreconditionFailed):
        store.put("k", b"three", if_match=old)
    assert store.get("k") == (b"two", new)


def test_a_put_over_a_deleted_object_fails_as_a_lost_condition(store: Store) -> None:
    etag = store.put("k", b"one")
    store.delete(["k"])
    with pytest.raises(PreconditionFailed):
        store.put("k", b"two", if_match=etag)
    with pytest.raises(NotFound):
        store.get("k")


def _race(store: Store, put: Callable[[bytes], object]) -> list[bytes]:
    """Eight threads put at once; the bodies of those that won."""
    start = threading.Barrier(8)

    def run(n: int) -> bytes | None:
        body = f"writer {n}".encode()
        start.wait()
        try:
            put(body)
        except PreconditionFailed:
            return None
        return body

    with ThreadPoolExecutor(8) as threads:
        return [body for body in threads.map(run, range(8)) if body]


def test_of_eight_first_puts_one_wins(store: Store) -> None:
    winners = _race(store, lambda body: store.put("k", body, if_none_match=True))
    assert winners == [store.get("k")[0]]


def test_of_eight_replacements_one_wins(store: Store) -> None:
    etag = store.put("k", b"before")
    winners = _race(store, lambda body: store.put("k", body, if_match=etag))
    assert winners == [store.get("k")[0]]


def test_the_time_in_an_etag_is_not_the_coarse_one_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_800_000_000_123_456_789)
    open_store(StoreSettings(url=tmp_path.as_uri())).put("k", b"x")
    assert (tmp_path / "k").stat().st_mtime_ns == 1_800_000_000_123_456_789


def test_an_etag_never_returns_with_other_bytes(store: Store) -> None:
    """Else a compare-and-swap passes over a change it has not seen; sizes are equal, and inodes are reused."""
    etags = {store.put("k", f"{n:04d}".encode()) for n in range(40)}
    assert len(etags) == 40


@pytest.mark.parametrize(
    ("start", "length"), [(0, 10), (3, 4), (99, 1), (0, 100), (-1, 1), (-100, 100), (-7, 7)]
)
def test_a_range_is_that_range(store: Store, start: int, length: int) -> None:
    data = os.urandom(100)
    etag = store.put("k", data)
    end = start + length if start >= 0 else None
    expected = data[start : end if start >= 0 else None]
    assert store.get_range("k", start, length, etag=etag) == expected
    buffer = bytearray(length)
    store.read_into("k", start, memoryview(buffer))
    assert buffer == expected


@pytest.mark.parametrize(("start", "length"), [(95, 6), (100, 1), (5000, 1), (-101, 101)])
def test_a_range_over_the_end_is_an_error_and_never_short(store: Store, start: int, length: int) -> None:
    store.put("k", bytes(100))
    with pytest.raises(StoreError) as raised:
        store.get_range("k", start, length)
    assert not isinstance(raised.value, NotFound)
    assert "100 bytes" in str(raised.value) or "416" in str(raised.value)


def test_a_range_of_no_bytes_asks_nothing(store: Store) -> None:
    assert store.get_range("k", 0, 0) == b""


def test_a_replaced_object_is_not_mixed_with_the_old_one(store: Store) -> None:
    etag = store.put("k", b"old" * 10)
    store.put("k", b"new" * 10)
    with pytest.raises(ObjectChanged):
        store.get_range("k", 3, 3, etag=etag)


def test_reading_fills_views_of_any_type(store: Store) -> None:
    store.put("k", bytes(range(16)))
    words = memoryview(bytearray(16)).cast("I")
    store.read_into("k", 0, words)
    assert words.tobytes() == bytes(range(16))


def test_a_listing_is_sorted_complete_and_of_that_prefix(store: Store) -> None:
    keys = ["i/a-b", "i/a.b", "i/a/b", "i/b", "i/sub/1", "i/sub/2", "j/other", "ia"]
    for key in reversed(keys):
        store.put(key, b"x")
    assert [info.key for info in store.list("i/")] == sorted(k for k in keys if k.startswith("i/"))
    assert [info.key for info in store.list("i/s")] == ["i/sub/1", "i/sub/2"]
    assert [info.key for info in store.list("")] == sorted(keys)
    assert list(store.list("none/")) == []


def test_deleting_takes_what_is_named_and_forgives_what_is_absent(store: Store) -> None:
    for key in ("a", "b", "c/d"):
        store.put(key, b"x")
    store.delete(["a", "c/d", "absent", "a/nothing"])
    assert [info.key for info in store.list("")] == ["b"]
    store.delete(["absent"])
    store.delete([])


def _send(store: Store, key: str, data: bytes, order: list[int]) -> tuple[str, list[Part]]:
    upload = store.create_upload(key, part_bytes=PART_BYTES)
    parts = []
    for number in order:
        piece = memoryview(data)[(number - 1) * PART_BYTES : number * PART_BYTES]
        parts.append(store.put_part(key, upload, number, piece, crc32c(piece)))
    return upload, parts


def test_a_multipart_object_appears_whole_and_only_when_completed(store: Store) -> None:
    data = os.urandom(2 * PART_BYTES + 1000)
    upload, parts = _send(store, "big", data, [3, 1, 2])
    assert list(store.list("")) == []
    assert [(u.key, u.upload_id) for u in store.list_uploads("")] == [("big", upload)]
    etag = store.complete_upload("big", upload, parts)
    assert list(store.list_uploads("")) == []
    info = store.head("big")
    assert (info.size_bytes, info.etag) == (len(data), etag)
    assert store.get_range("big", PART_BYTES - 50, 100, etag=etag) == data[PART_BYTES - 50 : PART_BYTES + 50]
    assert store.get("big")[0] == data


def test_an_aborted_upload_leaves_nothing(store: Store) -> None:
    upload, parts = _send(store, "gone", bytes(100), [1])
    store.abort_upload("gone", upload)
    store.abort_upload("gone", upload)
    assert list(store.list_uploads("")) == []
    with pytest.raises(NotFound):
        store.complete_upload("gone", upload, parts)
    assert list(store.list("")) == []


def test_uploads_are_listed_by_prefix(store: Store) -> None:
    wanted = {(f"shards/{n}", store.create_upload(f"shards/{n}", part_bytes=PART_BYTES)) for n in range(5)}
    other = store.create_upload("head/x", part_bytes=PART_BYTES)
    assert {(u.key, u.upload_id) for u in store.list_uploads("shards/")} == wanted
    assert abs(next(store.list_uploads("")).initiated - time.time()) < 120
    for key, upload in [*wanted, ("head/x", other)]:
        store.abort_upload(key, upload)


def test_check_accepts_a_good_store_and_leaves_nothing(store: Store) -> None:
    store.check()
    assert list(store.list("")) == []
    assert list(store.list_uploads("")) == []


def test_traffic_counts_requests_and_bytes_by_direction(store: Store) -> None:
    store.put("k", bytes(1000))
    store.get("k")
    store.get_range("k", 10, 20)
    assert (store.writes.requests, store.writes.bytes) == (1, 1000)
    assert (store.reads.requests, store.reads.bytes) == (2, 1020)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "s3:/bucket",
        "s3:///prefix",
        "file://relative",
        "file:///",
        "gs://bucket/x",
        "/tmp/x",
        "s3://u:secret@b/x",
    ],
)
def test_an_address_that_is_none_is_refused_by_name_and_without_its_secrets(url: str) -> None:
    with pytest.raises(UserError, match=r"--store\.url") as raised:
        open_store(StoreSettings(url=url))
    assert "secret" not in str(raised.value)


def test_a_name_that_a_directory_cannot_hold_is_no_missing_object(tmp_path: Path) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}/run"))
    store.put("a/b", b"x")
    for key in ("a/b/c", "a"):
        with pytest.raises(StoreError, match="one object cannot lie below") as raised:
            store.put(key, b"x")
        assert not isinstance(raised.value, NotFound)


def test_a_file_system_without_links_still_has_one_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    store = open_store(StoreSettings(url=f"file://{tmp_path}/run"))
    winners = _race(store, lambda body: store.put("k", body, if_none_match=True))
    assert winners == [store.get("k")[0]]


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a/../../x", "", "a//b", ".writing/lock"])
def test_no_key_leaves_the_directory(tmp_path: Path, key: str) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}/run"))
    with pytest.raises(StoreError, match="no key"):
        store.put(key, b"x")


def test_a_forked_process_is_told_to_open_its_own_store(s3_url: str) -> None:
    store = open_store(StoreSettings(url=s3_url))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.get("k")
        except StoreError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as said:
        assert "must open its own store" in said.read()
