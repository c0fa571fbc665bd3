"""What the rest of the project asks of a place that keeps objects.

Two implementations: `s3` (boto3, any S3-compatible endpoint) and `local` (a directory). Keys are relative to
the prefix of the run. Every method retries by itself until its deadline; what it raises is final: NotFound,
PreconditionFailed, ObjectChanged, or another StoreError that says what, where and what to do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dflash_stream.errors import UserError


class StoreError(UserError):
    """The store could not do what was asked."""


class NotFound(StoreError):  # noqa: N818
    """No object of that key (or no multipart upload of that id)."""


class PreconditionFailed(StoreError):  # noqa: N818
    """A conditional put lost: the object exists already, or is no longer the one that was read."""


class ObjectChanged(StoreError):  # noqa: N818
    """The object that is being read was replaced while it was read."""


@dataclass(frozen=True)
class ObjectInfo:
    """A listed object. `modified` is seconds since 1970."""

    key: str
    size_bytes: int
    etag: str
    modified: float


@dataclass(frozen=True)
class UploadInfo:
    """A multipart upload that was begun and not ended. `initiated` is seconds since 1970."""

    key: str
    upload_id: str
    initiated: float


@dataclass(frozen=True)
class Part:
    """One sent part of a multipart upload, as `complete_upload` wants it."""

    number: int
    etag: str
    size_bytes: int
    crc32c: int


@dataclass
class Traffic:
    """What a store did in one direction since it was opened; any thread may read it."""

    requests: int = 0  # answered, whatever the answer
    retries: int = 0  # attempts that failed and were made again
    throttled: int = 0  # of these, refused by the store as too many
    bytes: int = 0  # of objects and parts; not headers, not listings
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, requests: int = 0, retries: int = 0, throttled: int = 0, bytes: int = 0) -> None:
        """Count; safe from many threads."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.throttled += throttled
            self.bytes += bytes


class Store(Protocol):
    """An object store, seen from one run's prefix. Safe to use from many threads; not across a fork.

    `reads` counts gets, heads and listings, `writes` everything else. Where a method takes `give_up`, setting
    that event ends its retries: the fault of the moment is raised.
    """

    reads: Traffic
    writes: Traffic

    @property
    def url(self) -> str:
        """The run's address, without secrets."""
        ...

    def get(self, key: str) -> tuple[bytes, str]:
        """A whole small object and its etag. Raises NotFound."""
        ...

    def get_range(self, key: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        """`length` bytes from `start`; a negative start counts from the end. Raises NotFound, ObjectChanged."""
        ...

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        """Fill `buffer` from byte `start`, resuming where a fault left off. Raises NotFound, ObjectChanged."""
        ...

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_none_match: bool = False,
        if_match: str | None = None,
        give_up: threading.Event | None = None,
    ) -> str:
        """Write a small object and return its etag.

        With `if_none_match` only if the key is free, with `if_match` only over that etag; PreconditionFailed
        otherwise. A lost answer to a conditional put is settled by reading the object back: bodies of
        conditional puts must therefore differ between writers (put a token in).
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Raises NotFound."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose keys begin with `prefix`, sorted by key."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; absent ones are no error."""
        ...

    def create_upload(self, key: str, *, part_bytes: int, give_up: threading.Event | None = None) -> str:
        """Begin a multipart upload and return its id. Every part but the last will have `part_bytes`."""
        ...

    def put_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        data: memoryview,
        crc32c: int,
        *,
        give_up: threading.Event | None = None,
    ) -> Part:
        """Send part `number` (from 1). `data` may be reused once this returns."""
        ...

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[Part], *, give_up: threading.Event | None = None
    ) -> str:
        """Make the object visible, and return its etag. Called once for a key that no other writer has."""
        ...

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts; an absent one is no error."""
        ...

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        """Uploads that were begun and not ended."""
        ...

    def check(self) -> None:
        """Try what the protocol needs, conditional puts and checksums above all; StoreError if it fails."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
