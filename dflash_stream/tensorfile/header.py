"""The header of a safetensors file, both ways, as pure functions and without torch.

Reading is strict: whatever the bytes are, either the tensors fill the file without holes or overlaps, or a
LayoutError says what is wrong. So nothing outside the file can be reached, and nothing absurd is allocated.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}
PREFIX_BYTES = 8
ALIGNMENT_BYTES = 8  # what safetensors asks for
MAX_HEADER_BYTES = 100 << 20  # of any file, as the safetensors library has it


class LayoutError(ValueError):
    """These bytes are no safetensors file. The text goes on from "… is damaged: "."""


@dataclass(frozen=True)
class Entry:
    """One tensor: dtype as safetensors spells it, and its bytes [start, end), counted from the file's first."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def build(
    layout: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str] | None = None,
    *,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> bytes:
    """Everything before the tensors' bytes, padded to a multiple of `alignment_bytes`.

    layout: (name, dtype, shape) in the order of storage.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in layout:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX_BYTES + len(text)) % alignment_bytes)
    return struct.pack("<Q", len(text)) + text


def length_of(start: bytes | memoryview, file_bytes: int, *, at_most: int) -> int:
    """Bytes of JSON behind the prefix, from a file's first bytes.

    LayoutError for none, for more than `at_most`, and for more than the file has.
    """
    if len(start) < PREFIX_BYTES:
        raise LayoutError(f"{file_bytes:,} bytes are no safetensors file")
    (length,) = struct.unpack_from("<Q", start)
    if not 0 < length <= min(at_most, file_bytes - PREFIX_BYTES):
        raise LayoutError(f"a header of {length:,} bytes in a file of {file_bytes:,}")
    return int(length)


def parse(text: bytes, file_bytes: int) -> tuple[dict[str, str], list[Entry]]:
    """(metadata, tensors in the order of storage) from the header's JSON. LayoutError unless they fill the file."""
    entries = _parse_json(text)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise LayoutError("__metadata__ is not a table of text")
    first = reached = PREFIX_BYTES + len(text)
    found = sorted(
        (_parse_entry(name, entry, first) for name, entry in entries.items()),
        key=lambda entry: (entry.start, entry.end),
    )
    for entry in found:
        size = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
        if entry.start != reached or entry.end > file_bytes or entry.end - entry.start != size:
            raise LayoutError(
                f"{entry.name} {list(entry.shape)} of {entry.dtype} lies at {entry.start:,} to {entry.end:,} "
                f"of {file_bytes:,}, expected to begin at {reached:,}"
            )
        reached = entry.end
    if reached != file_bytes:
        raise LayoutError(f"its tensors end at {reached:,} of {file_bytes:,} bytes")
    return metadata, found


def _parse_json(text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) != len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"its header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise LayoutError("its header is no table of tensors")
    return entries


def _parse_entry(name: str, entry: Any, first: int) -> Entry:
    """One tensor's entry, its types checked; the tensors' bytes begin at `first`."""
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (
            [*shape, *offsets]
            if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2
            else [-1]
        )
        if isinstance(dtype, str) and dtype in ITEM_BYTES and all(type(n) is int and n >= 0 for n in numbers):
            return Entry(name, dtype, tuple(shape), first + offsets[0], first + offsets[1])
    raise LayoutError(f"the header's entry for {name!r} is {json.dumps(entry)[:200]}")
