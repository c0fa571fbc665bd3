"""S3, and anything that speaks it, through boto3.

Cheap on the CPU: bodies are not signed with SHA-256 (TLS guards them, and a CRC32C goes along), parts are sent
from memoryviews, reads go into the caller's buffer. Strict about answers: a range must come back as that
range, of that object. The retry loop is `retry`'s, the meaning of errors `faults`'s, the client `client`'s.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dflash_stream.config import StoreSettings
from dflash_stream.store.base import (
    NotFound,
    ObjectInfo,
    Part,
    PreconditionFailed,
    Traffic,
    UploadInfo,
)
from dflash_stream.store.checksum import crc32c, crc32c_header
from dflash_stream.store.client import MAX_CONNECTIONS, Body, Connection, check_range, needed, parse_url
from dflash_stream.store.faults import BadAnswer, classify, is_expired, scrub
from dflash_stream.store.probe import probe
from dflash_stream.store.retry import Attempts, Clock, Fault, Gate, Kind, Retrier

ABORT_DEADLINE_S = 30.0  # an exit must not wait long for a cleanup; the store's own rule removes what is left
CHECK_DEADLINE_S = 20.0
READ_BYTES = 1 << 20
DELETE_BATCH = 1000

Advance = Callable[[dict[str, Any]], dict[str, Any]]


class S3Store:
    """A Store (see `base`) in a bucket, under a prefix. `clock` is for tests."""

    def __init__(self, settings: StoreSettings, *, clock: Clock | None = None) -> None:
        self._bucket, self._prefix = parse_url(settings.url)
        self._settings = settings
        self._connection = Connection(settings)
        self._retrier = Retrier(settings.deadline_s, Gate(MAX_CONNECTIONS), self._classify, clock or Clock())
        self.reads = Traffic()
        self.writes = Traffic()

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def _request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One request, tried once."""
        return self._connection.request(operation, Bucket=self._bucket, **arguments)

    def _classify(self, error: Exception) -> Fault:
        """The fault of an exception; an expired token is none as long as there are newer credentials."""
        fault = classify(error)
        if is_expired(error) and self._connection.renew():
            return dataclasses.replace(fault, kind=Kind.FEW)
        return fault

    def _what(self, verb: str, key: str) -> str:
        return f"{verb} s3://{self._bucket}/{self._prefix}{key} at {self._connection.endpoint}"

    def get(self, key: str) -> tuple[bytes, str]:
        def attempt() -> tuple[bytes, str]:
            answer = self._request("get_object", Key=self._prefix + key)
            with answer["Body"] as body:
                data = body.read()
            if len(data) != answer["ContentLength"]:
                raise BadAnswer(f"{len(data)} of {answer['ContentLength']} bytes came", Kind.TRANSIENT)
            return data, str(answer["ETag"])

        data, etag = self._retrier.run(self._what("reading", key), attempt, self.reads)
        self.reads.add(bytes=len(data))
        return data, etag

    def get_range(self, key: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        buffer = bytearray(length)
        self.read_into(key, start, memoryview(buffer), etag=etag)
        return bytes(buffer)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        if not buffer.nbytes:
            return
        view = buffer.cast("B")
        what = self._what(f"reading {len(view)} bytes from byte {start} of", key)
        reached = 0
        attempts = Attempts()

        def attempt() -> None:
            nonlocal start, reached, etag
            wanted = f"{start + reached}-{start + len(view) - 1}" if start >= 0 else f"{start}"
            condition = {"IfMatch": etag} if etag else {}
            answer = self._request("get_object", Key=self._prefix + key, Range=f"bytes={wanted}", **condition)
            before = reached
            with answer["Body"] as body:
                start = check_range(answer, start, reached, len(view))
                etag = etag or str(answer["ETag"])
                try:
                    while reached < len(view):
                        count = body.readinto(view[reached : reached + READ_BYTES])
                        if not count:
                            raise BadAnswer("the answer ended early", Kind.TRANSIENT)
                        reached += count
                finally:
                    if reached > before:
                        attempts.progressed(self._retrier.clock.now())
                        attempts.note = f"{reached} of {len(view)} bytes read"
                        self.reads.add(bytes=reached - before)

        self._retrier.run(what, attempt, self.reads, attempts=attempts)

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_none_match: bool = False,
        if_match: str | None = None,
        give_up: threading.Event | None = None,
    ) -> str:
        arguments: dict[str, Any] = {"Key": self._prefix + key}
        if if_none_match:
            arguments["IfNoneMatch"] = "*"
        if if_match is not None:
            arguments["IfMatch"] = if_match
        if self._settings.checksums:
            arguments["ChecksumCRC32C"] = crc32c_header(crc32c(body))
        attempts = Attempts()
        what = self._what("writing", key)
        try:
            answer = self._retrier.run(
                what,
                lambda: self._request("put_object", Body=Body(body), **arguments),
                self.writes,
                attempts=attempts,
                give_up=give_up,
            )
        except (PreconditionFailed, NotFound) as error:
            etag = self._settle(key, body) if attempts.may_have_acted else None
            if etag is not None:
                return etag
            if isinstance(error, NotFound) and if_match is not None:
                raise PreconditionFailed(f"{what}: the object to be replaced does not exist") from None
            raise
        self.writes.add(bytes=memoryview(body).nbytes)
        return str(answer["ETag"])

    def _settle(self, key: str, body: bytes | memoryview) -> str | None:
        """A conditional put lost an answer and was then refused: the etag if the object is ours, else None."""
        try:
            found, etag = self.get(key)
        except NotFound:
            return None
        return etag if memoryview(body).cast("B") == found else None

    def head(self, key: str) -> ObjectInfo:
        answer = self._retrier.run(
            self._what("looking at", key),
            lambda: self._request("head_object", Key=self._prefix + key),
            self.reads,
        )
        return ObjectInfo(key, answer["ContentLength"], answer["ETag"], answer["LastModified"].timestamp())

    def _entries(self, operation: str, verb: str, prefix: str, field: str, advance: Advance) -> Iterator[Any]:
        """The entries of a listing over its pages; `advance` makes a page into the arguments for the next."""
        first = {"Prefix": self._prefix + prefix}
        more: dict[str, Any] | None = {}
        while more is not None:
            arguments = first | more

            def attempt(arguments: dict[str, Any] = arguments) -> tuple[Any, dict[str, Any] | None]:
                page = self._request(operation, **arguments)
                return page.get(field, ()), advance(page) if page.get("IsTruncated") else None

            entries, more = self._retrier.run(self._what(verb, prefix), attempt, self.reads)
            yield from entries

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        def advance(page: dict[str, Any]) -> dict[str, Any]:
            return {"ContinuationToken": needed(page, "NextContinuationToken")}

        found = [
            ObjectInfo(self._key(entry), entry["Size"], entry["ETag"], entry["LastModified"].timestamp())
            for entry in self._entries("list_objects_v2", "listing", prefix, "Contents", advance)
        ]
        return iter(sorted(found, key=lambda info: info.key))  # not every store lists in byte order

    def _key(self, entry: dict[str, Any]) -> str:
        return str(entry["Key"])[len(self._prefix) :]

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        def advance(page: dict[str, Any]) -> dict[str, Any]:
            last = needed(page, "Uploads")[-1]  # some stores leave the markers out
            key = page.get("NextKeyMarker") or last["Key"]
            return {"KeyMarker": key, "UploadIdMarker": page.get("NextUploadIdMarker") or last["UploadId"]}

        entries = self._entries("list_multipart_uploads", "listing uploads of", prefix, "Uploads", advance)
        found = {
            entry["UploadId"]: UploadInfo(self._key(entry), entry["UploadId"], entry["Initiated"].timestamp())
            for entry in entries
        }
        return iter(sorted(found.values(), key=lambda upload: (upload.key, upload.upload_id)))

    def delete(self, keys: Iterable[str]) -> None:
        waiting = [self._prefix + key for key in keys]
        if len(waiting) == 1 or not self._settings.checksums:  # a batch cannot be sent without a checksum
            for key in waiting:
                what = self._what("deleting", key[len(self._prefix) :])
                attempt = functools.partial(self._request, "delete_object", Key=key)
                self._ignore_absent(what, attempt, self._retrier)
            return
        for first in range(0, len(waiting), DELETE_BATCH):
            self._delete_batch(waiting[first : first + DELETE_BATCH])

    def _delete_batch(self, keys: Sequence[str]) -> None:
        """DeleteObjects; the keys that the store could not delete just now are asked for again."""
        left = keys

        def attempt() -> None:
            nonlocal left
            named = {"Objects": [{"Key": key} for key in left], "Quiet": True}
            answer = self._request("delete_objects", Delete=named)
            errors = [error for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]
            left = [error["Key"] for error in errors]
            if errors:
                code, message = errors[0].get("Code"), scrub(errors[0].get("Message", ""))
                cause = f"{len(errors)} were not deleted, first {errors[0]['Key']}: {code} {message}"
                passing = code in ("InternalError", "SlowDown", "ServiceUnavailable")
                raise BadAnswer(cause, Kind.TRANSIENT if passing else Kind.FINAL, "s3:DeleteObject is needed")

        self._retrier.run(self._what(f"deleting {len(keys)} objects under", ""), attempt, self.writes)

    def _ignore_absent(self, what: str, attempt: Callable[[], Any], retrier: Retrier) -> None:
        with contextlib.suppress(NotFound):
            retrier.run(what, attempt, self.writes)

    def create_upload(self, key: str, *, part_bytes: int, give_up: threading.Event | None = None) -> str:
        arguments = {"ChecksumAlgorithm": "CRC32C"} if self._settings.checksums else {}
        answer = self._retrier.run(
            self._what("beginning the upload of", key),
            lambda: self._request("create_multipart_upload", Key=self._prefix + key, **arguments),
            self.writes,
            give_up=give_up,
        )
        return str(answer["UploadId"])

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
        checksum = {"ChecksumCRC32C": crc32c_header(crc32c)} if self._settings.checksums else {}
        answer = self._retrier.run(
            self._what(f"sending part {number} ({data.nbytes} bytes) of", key),
            lambda: self._request(
                "upload_part",
                Key=self._prefix + key,
                UploadId=upload_id,
                PartNumber=number,
                Body=Body(data),
                **checksum,
            ),
            self.writes,
            give_up=give_up,
        )
        self.writes.add(bytes=data.nbytes)
        return Part(number, answer["ETag"], data.nbytes, crc32c)

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[Part], *, give_up: threading.Event | None = None
    ) -> str:
        listed: list[dict[str, Any]] = []
        for part in sorted(parts, key=lambda part: part.number):
            checksum = {"ChecksumCRC32C": crc32c_header(part.crc32c)} if self._settings.checksums else {}
            listed.append({"PartNumber": part.number, "ETag": part.etag, **checksum})
        attempts = Attempts()
        try:
            answer = self._retrier.run(
                self._what(f"completing the upload of {len(parts)} parts of", key),
                lambda: self._request(
                    "complete_multipart_upload",
                    Key=self._prefix + key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": listed},
                ),
                self.writes,
                attempts=attempts,
                give_up=give_up,
            )
        except NotFound:  # a store may have completed it, lost the answer, and forgotten the upload
            if attempts.may_have_acted:
                info = self.head(key)
                if info.size_bytes == sum(part.size_bytes for part in parts):
                    return info.etag
            raise
        return str(answer["ETag"])

    def abort_upload(self, key: str, upload_id: str) -> None:
        impatient = self._within(ABORT_DEADLINE_S)
        self._ignore_absent(
            self._what("aborting the upload of", key),
            lambda: self._request("abort_multipart_upload", Key=self._prefix + key, UploadId=upload_id),
            impatient._retrier,
        )

    def _within(self, deadline_s: float) -> S3Store:
        """This store with less patience; connections, gate and counters are shared."""
        other = copy.copy(self)
        other._retrier = dataclasses.replace(self._retrier, deadline_s=deadline_s)
        return other

    def check(self) -> None:
        probe(self._within(min(self._settings.deadline_s, CHECK_DEADLINE_S)))

    def close(self) -> None:
        self._connection.close()
