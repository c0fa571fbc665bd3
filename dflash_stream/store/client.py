"""Between the S3 store and boto3: the client's settings, bodies without a copy, the check of ranged answers.

Nothing here retries, and nothing knows what a request is for.
"""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import exceptions as boto
from botocore.config import Config
from botocore.loaders import create_loader

from dflash_stream.config import StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.store.base import StoreError
from dflash_stream.store.faults import BadAnswer, scrub, scrub_url
from dflash_stream.store.retry import Kind

MAX_CONNECTIONS = 128
CONNECT_TIMEOUT_S = 20.0
RENEWAL_PAUSE_S = 30.0
_NEEDED = {  # fields without which an answer is none
    "get_object": ("ETag", "ContentLength"),
    "head_object": ("ETag", "ContentLength", "LastModified"),
    "put_object": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    "upload_part": ("ETag",),
    "complete_multipart_upload": ("ETag",),
}

_opening = threading.Lock()  # opening clients is not safe from several threads
_models = create_loader()  # shared: reading S3's service model is most of the 0.1 s that a client costs


def parse_url(url: str) -> tuple[str, str]:
    """s3://bucket/prefix → (bucket, "prefix/"), with "" for a whole bucket. UserError for anything else."""
    parts = urlsplit(url)
    if parts.scheme != "s3" or not parts.netloc or "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(f"--store.url {scrub(url)} is not of the form s3://bucket/prefix")
    prefix = parts.path.strip("/")
    return parts.netloc, f"{prefix}/" if prefix else ""


class Connection:
    """A boto3 client that neither retries, nor checksums, nor signs bodies by itself; of one process."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._pid = os.getpid()
        self._renewing = threading.Lock()
        self._renewed = float("-inf")
        self._client, self._credentials = self._open()

    def _open(self) -> tuple[Any, tuple[str, str | None] | None]:
        """A client, and (access key, session token) to recognise newer credentials by."""
        settings = self._settings
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=MAX_CONNECTIONS,
            connect_timeout=min(settings.timeout_s, CONNECT_TIMEOUT_S),
            read_timeout=settings.timeout_s,
            tcp_keepalive=True,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": settings.addressing, "payload_signing_enabled": False},
        )
        try:
            with _opening:
                core = botocore.session.Session()
                core.register_component("data_loader", _models)
                session = boto3.session.Session(botocore_session=core)
                client = session.client(
                    "s3",
                    endpoint_url=settings.endpoint,
                    region_name=settings.region or session.region_name or "us-east-1",
                    config=config,
                )
                client.meta.events.register("before-parse.s3", check_whole)
                found = session.get_credentials()
        except (boto.BotoCoreError, ValueError) as error:
            remedy = "Check --store.endpoint (with http:// or https://), --store.region and AWS_PROFILE"
            raise StoreError(f"cannot open {settings.url}: {scrub(str(error))}. {remedy}") from None
        return client, (found.access_key, found.token) if found else None

    @property
    def endpoint(self) -> str:
        """The address requests go to, without secrets."""
        return scrub_url(self._client.meta.endpoint_url)

    def request(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One request, tried once. Raises what botocore raises, or BadAnswer."""
        if os.getpid() != self._pid:
            owner = f"{self._settings.url} was opened by process {self._pid}"
            raise StoreError(f"{owner}: a forked process must open its own store")
        answer: dict[str, Any] = getattr(self._client, operation)(**arguments)
        for name in _NEEDED.get(operation, ()):
            needed(answer, name)
        return answer

    def renew(self) -> bool:
        """After a refusal for expired credentials: whether newer ones have been put in place, and are used from now on.

        boto3 refreshes a role's credentials by itself, but reads files and variables only once.
        """
        with self._renewing:
            if time.monotonic() - self._renewed < RENEWAL_PAUSE_S:
                return True  # another thread has just done it
            client, credentials = self._open()
            if credentials is None or credentials == self._credentials:
                return False
            self._client, self._credentials = client, credentials
            self._renewed = time.monotonic()
            return True

    def close(self) -> None:
        self._client.close()


class Body:
    """Bytes as botocore wants them, without a copy: it refuses memoryviews, but sends what `read` returns.

    Seekable, since botocore measures a body by seeking and rewinds it when it sends it again.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data).cast("B")
        self._position = 0

    def read(self, size: int = -1) -> memoryview:
        end = len(self._data) if size is None or size < 0 else self._position + size
        piece = self._data[self._position : end]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self._data)}[whence]
        self._position = min(max(base + offset, 0), len(self._data))
        return self._position

    def tell(self) -> int:
        return self._position


def check_whole(response_dict: dict[str, Any], operation_model: Any, **_: Any) -> None:
    """botocore hook before an answer is parsed: refuses one whose body was lost or cut.

    botocore itself takes an answer that lost all of its body for an empty one: a listing of nothing.
    """
    body = response_dict["body"]
    if not isinstance(body, bytes) or operation_model.http.get("method") == "HEAD":
        return
    promised = int(response_dict["headers"].get("content-length", len(body)))
    if len(body) != promised or (not body and operation_model.name.startswith("List")):
        cause = f"the answer was cut: {len(body)} of its {promised} bytes came"
        raise BadAnswer(cause, Kind.TRANSIENT, may_have_acted=True)


def needed(answer: dict[str, Any], name: str) -> Any:
    """A field that an answer must have. Raises BadAnswer."""
    if name not in answer:
        cause = f"the answer has no {name}"
        raise BadAnswer(cause, Kind.FEW, "Check that --store.endpoint speaks S3", may_have_acted=True)
    return answer[name]


def parse_content_range(value: str | None) -> tuple[int, int, int] | None:
    """`bytes 5-9/100` → (5, 9, 100); None for anything else."""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", value or "")
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def check_range(answer: dict[str, Any], start: int, reached: int, length: int) -> int:
    """Verify that an answer holds bytes [start + reached, start + length); returns `start` counted from the beginning.

    A negative `start` counts from the end of the object. Raises BadAnswer.
    """
    status = answer["ResponseMetadata"]["HTTPStatusCode"]
    if status != 206:
        remedy = "The store, or a proxy before it, ignores ranged reads: it cannot serve a dataset"
        raise BadAnswer(f"the store answered {status} to a ranged read", Kind.FINAL, remedy)
    found = parse_content_range(answer.get("ContentRange"))
    if found is None:
        raise BadAnswer(f"an answer with the Content-Range {answer.get('ContentRange')!r}", Kind.FEW)
    first, last, total = found
    absolute = start if start >= 0 else total + start
    if absolute < 0 or absolute + length > total:
        raise BadAnswer(
            f"the object has only {total} bytes", Kind.FINAL, "It is not what was expected under this name"
        )
    wanted, got_bytes = (absolute + reached, absolute + length - 1), answer["ContentLength"]
    if (first, last) != wanted or got_bytes != length - reached:
        cause = f"asked for bytes {wanted[0]}-{wanted[1]}, got {first}-{last}, {got_bytes} bytes"
        raise BadAnswer(cause, Kind.FEW)
    return absolute
