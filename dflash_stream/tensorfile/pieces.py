"""Torch tensors as the pieces of a safetensors file: its header, then the bytes of each, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from dflash_stream.tensorfile import header

DTYPES = {
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the host, without a copy when it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file with these tensors, in this order."""
    yield _header(tensors, metadata)
    yield from (bytes_of(tensor) for tensor in tensors.values())


def total_bytes(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> int:
    """Size of the file with these tensors."""
    return len(_header(tensors, metadata)) + sum(tensor.nbytes for tensor in tensors.values())


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    return header.build(
        ((name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()), metadata
    )
