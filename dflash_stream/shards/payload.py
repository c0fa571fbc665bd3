"""A payload: one complete safetensors file, the body of a tar member. Its layout, both ways, without torch.

    8 bytes     length N of the header, little-endian
    N bytes     JSON: "__metadata__" (text → text), and for every tensor its dtype, shape and data_offsets;
                padded with blanks so that 8 + N is a multiple of 512
    the rest    the tensors, little-endian, one after another without holes

Tensors of wider elements come first, so every one is aligned to its element. What the tensors mean is left to
`codec`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dflash_stream.shards.tar import BLOCK_BYTES
from dflash_stream.shards.tensors import SampleError

ITEM_BYTES = {"I32": 4, "F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
MAX_HEADER_BYTES = 1 << 20  # ours have 512; a damaged length must not make a reader parse gigabytes


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a payload: name, safetensors dtype, shape, and its bytes (flat, contiguous)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def in_order(stored: Iterable[StoredTensor]) -> list[StoredTensor]:
    """The order in which tensors are stored: by falling width of their elements, otherwise as given."""
    return sorted(stored, key=lambda tensor: -ITEM_BYTES[tensor.dtype])


def header(metadata: dict[str, str], layout: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Everything before the tensors' bytes; `layout` is (name, dtype, shape) in the order of storage."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in layout:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % BLOCK_BYTES)
    return struct.pack("<Q", len(text)) + text


def parse(
    payload: bytes | bytearray | memoryview, where: str
) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """(metadata, tensors by name); the tensors are views of `payload`.

    Raises SampleError, naming `where`, unless the header is whole and its tensors fill the payload without
    holes or overlaps: nothing outside the payload can be reached, whatever the bytes are.
    """
    view = memoryview(payload).cast("B")
    if len(view) < 8:
        raise SampleError(f"{where} is damaged: {len(view)} bytes are no safetensors file")
    (length,) = struct.unpack_from("<Q", view)
    if length > min(MAX_HEADER_BYTES, len(view) - 8):
        raise SampleError(f"{where} is damaged: a header of {length:,} bytes in a payload of {len(view):,}")
    entries = _parse_json(bytes(view[8 : 8 + length]), where)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SampleError(f"{where} is damaged: __metadata__ is not a table of text")
    body = view[8 + length :]
    stored = {}
    reached = 0
    for name, start, end, dtype, shape in sorted(
        (_parse_entry(name, entry, where) for name, entry in entries.items()), key=lambda entry: entry[1:3]
    ):
        if start != reached or end > len(body) or end - start != math.prod(shape) * ITEM_BYTES[dtype]:
            raise SampleError(
                f"{where} is damaged: {name} {list(shape)} of {dtype} lies at {start:,} to {end:,} "
                f"of {len(body):,}, expected to begin at {reached:,}"
            )
        stored[name] = StoredTensor(name, dtype, shape, body[start:end])
        reached = end
    if reached != len(body):
        raise SampleError(
            f"{where} is damaged: its tensors have {reached:,} bytes, {len(body):,} follow the header"
        )
    return metadata, stored


def _parse_json(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{where} is damaged: its header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise SampleError(f"{where} is damaged: its header is no table of tensors")
    return entries


def _parse_entry(name: str, entry: Any, where: str) -> tuple[str, int, int, str, tuple[int, ...]]:
    """One tensor's entry as (name, start, end, dtype, shape), its types checked."""
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (
            [*shape, *offsets]
            if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
            else [-1]
        )
        if isinstance(dtype, str) and dtype in ITEM_BYTES and all(type(n) is int and n >= 0 for n in numbers):
            return name, offsets[0], offsets[1], dtype, tuple(shape)
    raise SampleError(f"{where} is damaged: the header's entry for {name!r} is {json.dumps(entry)[:200]}")
