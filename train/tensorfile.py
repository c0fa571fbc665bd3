"""A safetensors object, written to a store and read back as a stream: never a file, never the whole of it in
memory.

Layout (safetensors): 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the tensors one after another. What is known of a written object, its size and CRC32C, is kept elsewhere by
the caller and checked on reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dflash_stream.errors import UserError
from dflash_stream.store import NotFound, Store, crc32c
from dflash_stream.store.upload import ObjectUpload

_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 8  # of the first tensor, as safetensors asks for
_HEADER_LIMIT_BYTES = 100 << 20
_RANGE_BYTES = 16 << 20
_THREADS = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: where its bytes lie, counted from the first byte of the object."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int
    stop: int


def build_header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and JSON header of a file with these tensors in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes, size_bytes: int, where: str) -> list[Entry]:
    """The JSON header of an object of `size_bytes` as entries by offset; UserError unless they fill it
    exactly."""
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        first = 8 + len(text)
        entries = [
            Entry(
                name,
                _DTYPES[value["dtype"]],
                value["shape"],
                *(first + offset for offset in value["data_offsets"]),
            )
            for name, value in header.items()
        ]
        entries.sort(key=lambda entry: entry.start)
        ends = [first, *(entry.stop for entry in entries)]
        whole = (
            all(entry.start == end for entry, end in zip(entries, ends, strict=False))
            and all(begin <= end for begin, end in pairwise(ends))
            and all(
                entry.stop - entry.start == entry.dtype.itemsize * torch.Size(entry.shape).numel()
                for entry in entries
            )
            and ends[-1] == size_bytes
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is not a safetensors file: {type(error).__name__}: {error}") from None
    if not whole:
        raise UserError(f"{where} is damaged: its header does not fit its {size_bytes:,} bytes")
    return entries


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Size of the file with these tensors."""
    return len(build_header(tensors)) + sum(
        tensor.numel() * tensor.element_size() for tensor in tensors.values()
    )


def write(upload: ObjectUpload, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write contiguous host tensors into an open upload and return the CRC32C of the whole. The caller finishes
    it."""
    header = build_header(tensors)
    upload.write(header)
    checksum = crc32c(header)
    for tensor in tensors.values():
        if tensor.numel():
            data = bytes_of(tensor)
            upload.write(data)
            checksum = crc32c(data, checksum)
    return checksum


def read(store: Store, key: str, size_bytes: int, checksum: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an object one after another, on the host.

    Ranges of a tensor are read by several threads straight into it. After the last one the CRC32C of every byte
    is compared, so a caller that stops early has checked nothing. UserError names an object that is missing or
    damaged.
    """
    where = f"{store.url}/{key}"
    try:
        info = store.head(key)
    except NotFound:
        raise UserError(f"{where} is missing: it was deleted or damaged from outside") from None
    if info.size_bytes != size_bytes:
        raise UserError(f"{where} is damaged: it has {info.size_bytes:,} bytes, its record says {size_bytes:,}")
    prefix = store.get_range(key, 0, 8, etag=info.etag)
    length = int.from_bytes(prefix, "little")
    if length > min(size_bytes - 8, _HEADER_LIMIT_BYTES):
        raise UserError(f"{where} is damaged: no safetensors header")
    text = store.get_range(key, 8, length, etag=info.etag)
    found = crc32c(text, crc32c(prefix))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="tensors") as threads:
        for entry in parse_header(text, size_bytes, where):
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
            if tensor.numel():
                data = bytes_of(tensor)

                def fetch(begin: int, entry: Entry = entry, data: memoryview = data) -> None:
                    store.read_into(
                        key, entry.start + begin, data[begin : begin + _RANGE_BYTES], etag=info.etag
                    )

                list(threads.map(fetch, range(0, len(data), _RANGE_BYTES)))
                found = crc32c(data, found)
            yield entry.name, tensor
    if found != checksum:
        raise UserError(f"{where} is damaged: its CRC32C is {found:08x}, its record says {checksum:08x}")
