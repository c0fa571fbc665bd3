"""A directory as a store: the same protocol and layout as S3, for one machine or a shared file system.

Objects are files and appear by rename, whole or not at all. What is being written lies under `.writing/` in
the directory, out of sight of listings. An etag is inode, size and time of writing, the time set to the
nanosecond here: a file system that only ticks every few milliseconds would else give two versions of one name
the same etag.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dflash_stream import layout
from dflash_stream.config import StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.store.base import (
    NotFound,
    ObjectChanged,
    ObjectInfo,
    Part,
    PreconditionFailed,
    StoreError,
    Traffic,
    UploadInfo,
)
from dflash_stream.store.probe import probe

WRITING = ".writing"
_NAMES_CLASH = "In a directory one object cannot lie below the name of another"
_REMEDIES = {
    errno.ENOSPC: "Free space on this disk",
    errno.EDQUOT: "The quota of this user is used up",
    errno.ENOTDIR: _NAMES_CLASH,
    errno.EISDIR: _NAMES_CLASH,
    errno.EEXIST: _NAMES_CLASH,
}


def parse_url(url: str) -> Path:
    """file:///dir → the directory. UserError for anything else."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.scheme != "file" or parts.netloc or not path.is_absolute() or path == Path("/"):
        raise UserError(f"--store.url {url} is not of the form file:///directory")
    return path


def etag_of(status: os.stat_result) -> str:
    """The etag of a file: changes whenever the name is given to other bytes."""
    return f'"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"'


class LocalStore:
    """A Store (see `base`) in a directory."""

    def __init__(self, settings: StoreSettings) -> None:
        self._root = parse_url(settings.url)
        self._writing = self._root / WRITING
        self.reads = Traffic()
        self.writes = Traffic()

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def _path(self, key: str) -> Path:
        if not key or key.startswith(("/", ".")) or any(part in ("", ".", "..") for part in key.split("/")):
            raise StoreError(f"{key!r} is no key of an object in {self.url}")
        return self._root / key

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """File errors as store errors."""
        where = f"{verb} {self._root / key}"
        try:
            yield
        except FileNotFoundError:
            raise NotFound(f"{where}: there is no such object") from None
        except PermissionError as error:
            remedy = f"This user needs to read and write {self._root}"
            raise StoreError(f"{where}: {error.strerror}. {remedy}") from None
        except OSError as error:
            remedy = _REMEDIES.get(error.errno or 0, "Look into the file system")
            raise StoreError(f"{where}: {error.strerror or error}. {remedy}") from None

    def _open(self, key: str) -> io.FileIO:
        """An object's file, for reading; a directory, or a name below a file, is no object."""
        try:
            return io.FileIO(self._path(key))
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError from error

    def get(self, key: str) -> tuple[bytes, str]:
        with self._errors("reading", key), self._open(key) as file:
            etag = etag_of(os.fstat(file.fileno()))
            data = file.readall()
        self.reads.add(requests=1, bytes=len(data))
        return data, etag

    def get_range(self, key: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        buffer = bytearray(length)
        self.read_into(key, start, memoryview(buffer), etag=etag)
        return bytes(buffer)

    def read_into(self, key: str, start: int, buffer: memoryview, *, etag: str | None = None) -> None:
        if not buffer.nbytes:
            return
        view = buffer.cast("B")
        where = f"reading {len(view)} bytes from byte {start} of {self._root / key}"
        with self._errors("reading", key), self._open(key) as file:
            status = os.fstat(file.fileno())
            if etag is not None and etag_of(status) != etag:
                raise ObjectChanged(f"{where}: the object has been replaced since its etag was read")
            begin = start if start >= 0 else status.st_size + start
            if begin < 0 or begin + len(view) > status.st_size:
                size = status.st_size
                raise StoreError(f"{where}: the object has only {size} bytes. It is not what was expected here")
            file.seek(begin)
            reached = 0
            while reached < len(view):
                count = file.readinto(view[reached:])
                if not count:
                    raise StoreError(f"{where}: the file was cut at byte {begin + reached} while it was read")
                reached += count
        self.reads.add(requests=1, bytes=len(view))

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_none_match: bool = False,
        if_match: str | None = None,
        give_up: threading.Event | None = None,
    ) -> str:
        path = self._path(key)
        with self._errors("writing", key):
            self._writing.mkdir(parents=True, exist_ok=True)
            temporary = self._writing / f"put-{layout.new_token()}"
            try:
                with temporary.open("xb") as file:
                    file.write(body)
                etag = self._publish(temporary, path, if_none_match, if_match)
            finally:
                temporary.unlink(missing_ok=True)
        self.writes.add(requests=1, bytes=memoryview(body).nbytes)
        return etag

    def _publish(self, temporary: Path, path: Path, if_none_match: bool, if_match: str | None) -> str:
        """Give a finished file its name, if the condition holds; returns its etag."""
        etag = seal(temporary)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            found = etag_of(path.stat()) if path.is_file() else None
            if if_none_match and found is not None:
                raise PreconditionFailed(f"writing {path}: the object exists already")
            if if_match is not None and found != if_match:
                state = "does not exist" if found is None else "is no longer the one that was read"
                raise PreconditionFailed(f"writing {path}: the object to be replaced {state}")
            if if_none_match:
                take_name(temporary, path)
            else:
                temporary.replace(path)
        sync_directory(path.parent)
        return etag

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time, over threads, processes, and machines whose file system passes locks on."""
        with (self._writing / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def head(self, key: str) -> ObjectInfo:
        with self._errors("looking at", key):
            with self._open(key) as file:
                status = os.fstat(file.fileno())
        self.reads.add(requests=1)
        return ObjectInfo(key, status.st_size, etag_of(status), status.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found = []
        top = self._root / prefix.rpartition("/")[0]
        with self._errors("listing", prefix):
            for directory, subdirectories, names in os.walk(top):
                if Path(directory) == self._root and WRITING in subdirectories:
                    subdirectories.remove(WRITING)
                for name in names:
                    path = Path(directory, name)
                    key = path.relative_to(self._root).as_posix()
                    if key.startswith(prefix):
                        try:
                            status = path.stat()
                        except FileNotFoundError:  # deleted meanwhile
                            continue
                        found.append(ObjectInfo(key, status.st_size, etag_of(status), status.st_mtime))
        self.reads.add(requests=1)
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._errors("deleting", key):
                try:
                    path.unlink(missing_ok=True)
                except (IsADirectoryError, NotADirectoryError):
                    continue
            self.writes.add(requests=1)

    def create_upload(self, key: str, *, part_bytes: int, give_up: threading.Event | None = None) -> str:
        self._path(key)
        upload_id = layout.new_token()
        with self._errors("beginning the upload of", key):
            directory = self._upload(upload_id)
            directory.mkdir(parents=True)
            (directory / "data").touch()
            (directory / "upload.json").write_text(json.dumps({"key": key, "part_bytes": part_bytes}))
        self.writes.add(requests=1)
        return upload_id

    def _upload(self, upload_id: str) -> Path:
        if not upload_id.isalnum():
            raise NotFound(f"no upload {upload_id!r} in {self.url}")
        return self._writing / f"upload-{upload_id}"

    def _part_bytes(self, key: str, upload_id: str) -> int:
        described = json.loads((self._upload(upload_id) / "upload.json").read_text())
        if described["key"] != key:
            raise StoreError(f"upload {upload_id} in {self.url} is of {described['key']}, not of {key}")
        return int(described["part_bytes"])

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
        view = data.cast("B")
        with self._errors(f"sending part {number} of", key):
            part_bytes = self._part_bytes(key, upload_id)
            if number < 1 or not 0 < len(view) <= part_bytes:
                raise StoreError(
                    f"sending part {number} of {key}: {len(view)} bytes, where parts have {part_bytes}"
                )
            with (self._upload(upload_id) / "data").open("r+b", buffering=0) as file:
                sent = 0
                while sent < len(view):
                    sent += os.pwrite(file.fileno(), view[sent:], (number - 1) * part_bytes + sent)
        self.writes.add(requests=1, bytes=len(view))
        return Part(number, f'"{crc32c:08x}"', len(view), crc32c)

    def complete_upload(
        self, key: str, upload_id: str, parts: Sequence[Part], *, give_up: threading.Event | None = None
    ) -> str:
        path = self._path(key)
        parts = sorted(parts, key=lambda part: part.number)
        with self._errors("completing the upload of", key):
            part_bytes = self._part_bytes(key, upload_id)
            data = self._upload(upload_id) / "data"
            size = sum(part.size_bytes for part in parts)
            whole = all(
                part.number == n and part.size_bytes == part_bytes for n, part in enumerate(parts[:-1], 1)
            )
            if not parts or not whole or parts[-1].number != len(parts) or data.stat().st_size != size:
                state = f"its {len(parts)} parts are not all there, or not of one size"
                raise StoreError(f"completing the upload of {key}: {state}")
            etag = self._publish(data, path, if_none_match=False, if_match=None)
            shutil.rmtree(self._upload(upload_id), ignore_errors=True)
        self.writes.add(requests=1)
        return etag

    def abort_upload(self, key: str, upload_id: str) -> None:
        with self._errors("aborting the upload of", key):
            shutil.rmtree(self._upload(upload_id), ignore_errors=True)
        self.writes.add(requests=1)

    def list_uploads(self, prefix: str) -> Iterator[UploadInfo]:
        found = []
        for described in self._writing.glob("upload-*/upload.json"):
            try:
                key = str(json.loads(described.read_text())["key"])
                initiated = described.stat().st_mtime
            except FileNotFoundError:  # ended meanwhile
                continue
            if key.startswith(prefix):
                found.append(UploadInfo(key, described.parent.name.removeprefix("upload-"), initiated))
        self.reads.add(requests=1)
        return iter(sorted(found, key=lambda upload: (upload.key, upload.upload_id)))

    def check(self) -> None:
        probe(self)

    def close(self) -> None:
        pass


def seal(path: Path) -> str:
    """Stamp a finished file with a time of its own, force it to the disk, and return its etag."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        now = time.time_ns()
        os.utime(descriptor, ns=(now, now))
        os.fsync(descriptor)
        return etag_of(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def take_name(temporary: Path, path: Path) -> None:
    """Name a file, unless the name is taken: by a link, which is atomic even where locks are not passed on."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise PreconditionFailed(f"writing {path}: the object exists already") from None
    except OSError:  # a file system without hard links: the lock has to do
        temporary.replace(path)


def sync_directory(path: Path) -> None:
    """Force a rename in this directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
