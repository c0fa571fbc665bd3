"""What the shard tests share: stores that misbehave in one way, and a shard read without the package."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from dflash_stream import layout
from dflash_stream.config import StoreSettings
from dflash_stream.store import LocalStore, Part, PreconditionFailed, StoreError

MiB = 1 << 20


def local_settings(directory: Path) -> StoreSettings:
    """A store in a directory, with small parts and little memory."""
    url = f"file://{directory}"
    return StoreSettings(url=url, part_bytes=5 * MiB, pool_bytes=10 * MiB, max_concurrent_uploads=2)


class LyingStore(LocalStore):
    """Answers the put of a record with 412 although it was done, as when a lost answer was asked for again."""

    def put(self, key: str, body: bytes | memoryview, **conditions: object) -> str:  # type: ignore[override]
        etag = super().put(key, body, **conditions)  # type: ignore[arg-type]
        if key.startswith(layout.INDEX):
            raise PreconditionFailed(f"writing {key}: the object exists already")
        return etag


class SilentStore(LocalStore):
    """Never answers the put of a record, done or not."""

    def put(self, key: str, body: bytes | memoryview, **conditions: object) -> str:  # type: ignore[override]
        if key.startswith(layout.INDEX):
            raise StoreError(f"writing {key}: no answer in 900 s")
        return super().put(key, body, **conditions)  # type: ignore[arg-type]


class RefusingStore(LocalStore):
    """Takes no part of a multipart upload."""

    def put_part(self, key: str, upload_id: str, number: int, *_: object, **__: object) -> Part:  # type: ignore[override]
        raise StoreError(f"sending part {number} of {key}: refused")


def members(archive: bytes) -> dict[str, bytes]:
    """The files of a tar by name, in order, read by the standard library."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        return {info.name: opened.extractfile(info).read() for info in opened}  # type: ignore[union-attr]


def damage_in_place(path: Path, place: int, value: bytes) -> None:
    """Overwrite bytes of a stored file so that no etag, size or time tells."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(value)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
