"""A safetensors object of a store as a stream: never a file on disk, never the whole of it in memory.

What is known of a written object, its size and CRC32C, is kept elsewhere by the caller and checked on reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from dflash_stream.errors import UserError
from dflash_stream.store import Store, crc32c
from dflash_stream.store.upload import ObjectUpload
from dflash_stream.tensorfile import header
from dflash_stream.tensorfile.header import MAX_HEADER_BYTES, PREFIX_BYTES, Entry, LayoutError
from dflash_stream.tensorfile.pieces import DTYPES, bytes_of

RANGE_BYTES = 16 << 20
THREADS = 8


@dataclass(frozen=True)
class TensorObject:
    """An object whose header has been read: its tensors in the order of storage."""

    store: Store
    key: str
    etag: str
    metadata: dict[str, str]
    tensors: list[Entry]
    header_crc32c: int  # of all that precedes the tensors' bytes

    @property
    def where(self) -> str:
        return f"{self.store.url}/{self.key}"


def send(upload: ObjectUpload, pieces: Iterable[bytes | memoryview]) -> int:
    """Write the pieces of a file into an open upload and return the CRC32C of all. The caller finishes it."""
    checksum = 0
    for piece in pieces:
        upload.write(piece)
        checksum = crc32c(piece, checksum)
    return checksum


def find(store: Store, key: str, *, size_bytes: int | None = None) -> TensorObject:
    """Read an object's header. NotFound; UserError when it is damaged, or not of `size_bytes`, where given."""
    where = f"{store.url}/{key}"
    info = store.head(key)
    if size_bytes is not None and info.size_bytes != size_bytes:
        raise UserError(f"{where} is damaged: it has {info.size_bytes:,} bytes, its record says {size_bytes:,}")
    try:
        prefix = b""
        if info.size_bytes >= PREFIX_BYTES:  # no store answers for a range that is not there
            prefix = store.get_range(key, 0, PREFIX_BYTES, etag=info.etag)
        length = header.length_of(prefix, info.size_bytes, at_most=MAX_HEADER_BYTES)
        text = store.get_range(key, PREFIX_BYTES, length, etag=info.etag)
        metadata, tensors = header.parse(text, info.size_bytes)
    except LayoutError as error:
        raise UserError(f"{where} is damaged: {error}") from None
    return TensorObject(store, key, info.etag, metadata, tensors, crc32c(text, crc32c(prefix)))


def read(found: TensorObject, *, checksum: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an object one after another, on the host, each read in ranges by several threads.

    checksum: CRC32C of the whole object. Compared after the last tensor, so a caller that stops early has
    checked nothing; UserError when it differs.
    """
    reached = found.header_crc32c
    with ThreadPoolExecutor(THREADS, thread_name_prefix="tensors") as threads:
        for entry in found.tensors:
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            data = bytes_of(tensor)

            def fetch(begin: int, start: int = entry.start, data: memoryview = data) -> None:
                piece = data[begin : begin + RANGE_BYTES]
                found.store.read_into(found.key, start + begin, piece, etag=found.etag)

            list(threads.map(fetch, range(0, len(data), RANGE_BYTES)))
            if checksum is not None:
                reached = crc32c(data, reached)
            yield entry.name, tensor
    if checksum is not None and reached != checksum:
        raise UserError(
            f"{found.where} is damaged: its CRC32C is {reached:08x}, its record says {checksum:08x}"
        )
