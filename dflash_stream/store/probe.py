"""What a store must do for the protocol to hold, tried once with a small object."""

from __future__ import annotations

from dflash_stream import layout
from dflash_stream.store.base import PreconditionFailed, Store, StoreError
from dflash_stream.store.checksum import crc32c

_NEEDED = (
    "Without conditional writes two writers can both believe that they published the same shard. Use a store "
    "that has them: AWS, Ceph, Cloudflare R2, MinIO, SeaweedFS and others do"
)


def probe(store: Store) -> None:
    """Write, replace, read, upload and delete an object under status/. StoreError says what does not work."""
    key = f"{layout.STATUS}probe-{layout.new_token()}"
    etag = store.put(key, b"first", if_none_match=True)
    try:
        if _accepted(store, key, b"second", if_none_match=True):
            raise StoreError(
                f"{store.url} ignores If-None-Match: it wrote over an object that existed. {_NEEDED}"
            )
        newer = store.put(key, b"third", if_match=etag)
        if _accepted(store, key, b"fourth", if_match=etag):
            raise StoreError(
                f"{store.url} ignores If-Match: it wrote over an object that had changed. {_NEEDED}"
            )
        body, found = store.get(key)
        if body != b"third" or found != newer:
            raise StoreError(f"{store.url} does not give back what was written last: it cannot hold a run")
        if store.get_range(key, 1, 3) != b"hir":
            raise StoreError(f"{store.url} does not serve ranges of an object: it cannot hold a run")
        _upload(store, key)
    finally:
        store.delete([key])


def _upload(store: Store, key: str) -> None:
    """A multipart upload of one part, over the object, and what becomes of it."""
    data = memoryview(b"in parts")
    upload = store.create_upload(key, part_bytes=len(data))
    try:
        part = store.put_part(key, upload, 1, data, crc32c(data))
        store.complete_upload(key, upload, [part])
    except StoreError:
        store.abort_upload(key, upload)
        raise
    if store.get(key)[0] != data:
        raise StoreError(f"{store.url} does not give back what was uploaded in parts: it cannot hold a run")


def _accepted(
    store: Store, key: str, body: bytes, *, if_none_match: bool = False, if_match: str | None = None
) -> bool:
    try:
        store.put(key, body, if_none_match=if_none_match, if_match=if_match)
    except PreconditionFailed:
        return False
    return True
