"""A payload: one complete safetensors file, the body of a tar member. Its layout, both ways, without torch.

Its tensors begin at a multiple of 512 bytes. Those of wider elements come first, so every one is aligned to its
element. What the tensors mean is left to `codec`, the layout of safetensors to `tensorfile.header`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dflash_stream.shards.tar import BLOCK_BYTES
from dflash_stream.shards.tensors import SampleError
from dflash_stream.tensorfile.header import ITEM_BYTES, PREFIX_BYTES, LayoutError, build, length_of
from dflash_stream.tensorfile.header import parse as parse_header

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


def header(metadata: dict[str, str], entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Everything before the tensors' bytes; `entries` are (name, dtype, shape) in the order of storage."""
    return build(entries, metadata, alignment_bytes=BLOCK_BYTES)


def parse(
    payload: bytes | bytearray | memoryview, where: str
) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """(metadata, tensors by name); the tensors are views of `payload`.

    Raises SampleError, naming `where`, unless the header is whole and its tensors fill the payload without
    holes or overlaps: nothing outside the payload can be reached, whatever the bytes are.
    """
    view = memoryview(payload).cast("B")
    try:
        end = PREFIX_BYTES + length_of(view, len(view), at_most=MAX_HEADER_BYTES)
        metadata, entries = parse_header(bytes(view[PREFIX_BYTES:end]), len(view))
    except LayoutError as error:
        raise SampleError(f"{where} is damaged: {error}") from None
    return metadata, {
        entry.name: StoredTensor(entry.name, entry.dtype, entry.shape, view[entry.start : entry.end])
        for entry in entries
    }
