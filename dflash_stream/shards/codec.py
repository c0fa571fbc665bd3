"""How the states of a sample are stored: the codecs, and a sample's tensors to a payload and back.

    bf16    as they are
    bf16z   lossless: the byte of sign and exponent compressed with zstd, the byte of the mantissa as it is,
            since nothing makes that one smaller
    fp8     e4m3 with one scale for each token and layer, so that its largest magnitude is 448

Token ids and masks are stored as they are under every codec. The codec's name stands in the payload, so
decoding needs nothing else. Names, dtypes and shapes are `tensors`, the safetensors layout is `payload`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch

from dflash_stream.errors import UserError
from dflash_stream.shards.payload import StoredTensor, header, in_order, parse
from dflash_stream.shards.tensors import RULES, SampleError, check
from dflash_stream.tensorfile.header import ITEM_BYTES
from dflash_stream.tensorfile.pieces import DTYPES, NAMES, bytes_of

FORMAT = "dflash-stream.1"
ZSTD_LEVEL = 1  # level 3 is slower and, on hidden states, no smaller
CHUNK_VALUES = 1 << 20  # values in a zstd frame: 1 MiB of exponent bytes, which stays in a core's cache
FP8_MAX = 448.0  # the largest e4m3 value
FP8_MIN_SCALE = 2.0**-126  # the smallest normal fp32: below it x / scale would overflow
FP8_ROWS = 256  # rows of H values converted at a time, so that fp32 temporaries stay in cache


def require(codec: str) -> None:
    """UserError when this codec is unknown or cannot work here; to be called before any work is done."""
    if codec not in _CODECS:
        raise UserError(f"unknown codec {codec!r}: this dflash-stream has {', '.join(_CODECS)}")
    if codec == "bf16z":
        _zstandard()


def encode(codec: str, tensors: Mapping[str, torch.Tensor], where: str = "the sample") -> list[StoredTensor]:
    """A sample's tensors, on the CPU, as they are stored and in that order.

    With codec bf16 the bytes are views of the tensors when these are contiguous: nothing is copied.
    SampleError, naming `where`, for tensors that RULES forbids or states that the codec cannot hold (fp8: NaN,
    infinity).
    """
    require(codec)
    check(tensors, where)
    store, _, _ = _CODECS[codec]
    stored: list[StoredTensor] = []
    for name in RULES:  # never the caller's order: equal samples make equal bytes
        if name in tensors:
            stored += (store if RULES[name].state else _store_raw)(name, tensors[name], where)
    return in_order(stored)


def payload_header(codec: str, stored: list[StoredTensor]) -> bytes:
    """What precedes the bytes of `stored` in a payload: 8 + header, a multiple of 512 bytes."""
    return header(_metadata(codec), [(tensor.name, tensor.dtype, tensor.shape) for tensor in stored])


def decode(payload: bytes | bytearray | memoryview, where: str = "the payload") -> dict[str, torch.Tensor]:
    """The tensors of a sample, checked against RULES. Raises SampleError, naming `where`, for anything damaged.

    Tensors that are stored as they are become views of a writable `payload`; a read-only one is copied once.
    The values themselves are protected by the index's CRC32C, which the reader of the bytes compares.
    """
    view = memoryview(payload)
    if view.readonly:
        view = memoryview(bytearray(view))
    metadata, stored = parse(view, where)
    codec = metadata.get("codec", "")
    if metadata.get("format") != FORMAT or codec not in _CODECS:
        raise SampleError(
            f"{where} is of format {metadata.get('format')!r} and codec {codec!r}: "
            f"this dflash-stream reads {FORMAT} with {', '.join(_CODECS)}"
        )
    _, load, suffixes = _CODECS[codec]
    tensors: dict[str, torch.Tensor] = {}
    for name, rule in RULES.items():
        names = [name + suffix for suffix in (suffixes if rule.state else ("",))]
        parts = [stored.pop(part) for part in names if part in stored]
        if parts and len(parts) != len(names):
            raise SampleError(f"{where} is damaged: of {', '.join(names)} only some are there")
        if parts:
            tensors[name] = load(parts, where) if rule.state else _load_raw(parts, where)
    if stored:
        raise SampleError(f"{where} is damaged: {', '.join(stored)} belong to no sample of codec {codec}")
    check(tensors, where)
    return tensors


@lru_cache(maxsize=1 << 16)
def raw_payload_bytes(tokens: int, num_layers: int, hidden_size: int, final_state: bool = False) -> int:
    """The exact size of the payload of a training sample under codec bf16; under the others it is smaller."""
    sizes = {"T": tokens, "K": num_layers, "H": hidden_size}
    names = ["input_ids", "hidden_states", *(["final_state"] if final_state else []), "loss_mask"]
    specs = [(n, NAMES[RULES[n].dtype], tuple(sizes[letter] for letter in RULES[n].shape)) for n in names]
    body = sum(int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype] for _, dtype, shape in specs)
    return len(header(_metadata("bf16"), specs)) + body


def _metadata(codec: str) -> dict[str, str]:
    return {"codec": codec, "format": FORMAT}


# --- as it is


def _store_raw(name: str, tensor: torch.Tensor, where: str) -> list[StoredTensor]:
    return [StoredTensor(name, NAMES[tensor.dtype], tuple(tensor.shape), bytes_of(tensor))]


def _load_raw(parts: list[StoredTensor], where: str) -> torch.Tensor:
    (stored,) = parts
    dtype = DTYPES[stored.dtype]
    if not stored.data.nbytes:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(stored.data, dtype=dtype).reshape(stored.shape)


# --- bf16z


def _zstandard() -> ModuleType:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise UserError(
            "codec bf16z needs the package zstandard: pip install 'dflash-stream[zstd]', or prepare a run with "
            "prepare.codec bf16"
        ) from None
    module: ModuleType = zstandard
    return module


def _store_bf16z(name: str, tensor: torch.Tensor, where: str) -> list[StoredTensor]:
    """NAME.low: low bytes; NAME.high: zstd frames of the high bytes; NAME.high_sizes: bytes of each frame."""
    compressor = _zstandard().ZstdCompressor(level=ZSTD_LEVEL)
    values = np.frombuffer(bytes_of(tensor), np.uint16)
    low = np.empty(values.size, np.uint8)
    frames = []
    for start in range(0, values.size, CHUNK_VALUES):
        chunk = values[start : start + CHUNK_VALUES]
        low[start : start + CHUNK_VALUES] = chunk  # numpy keeps the low byte
        frames.append(compressor.compress((chunk >> 8).astype(np.uint8)))
    sizes = np.asarray([len(frame) for frame in frames], np.int32)
    high = memoryview(b"".join(frames))
    return [
        StoredTensor(f"{name}.low", "U8", tuple(tensor.shape), low.data),
        StoredTensor(f"{name}.high", "U8", (len(high),), high),
        StoredTensor(f"{name}.high_sizes", "I32", (len(sizes),), sizes.data.cast("B")),
    ]


def _load_bf16z(parts: list[StoredTensor], where: str) -> torch.Tensor:
    zstandard = _zstandard()
    low, high, sizes = parts
    if (low.dtype, high.dtype, sizes.dtype) != ("U8", "U8", "I32"):
        raise SampleError(f"{where} is damaged: {low.name} and its companions have the wrong dtypes")
    mantissas = np.frombuffer(low.data, np.uint8)
    ends = np.cumsum(np.frombuffer(sizes.data, np.int32), dtype=np.int64)
    values = np.empty(mantissas.size, np.uint16)
    decompressor = zstandard.ZstdDecompressor()
    begin = reached = 0
    for end in map(int, ends):
        frame = high.data[begin:end]
        try:
            # Looked at first: a damaged frame may promise any size, which decompressing would allocate.
            count = zstandard.frame_content_size(frame)
            if not 0 < count <= values.size - reached or len(frame) != end - begin:
                raise SampleError(f"{where} is damaged: {high.name} and {low.name} do not fit together")
            exponents = np.frombuffer(decompressor.decompress(frame, max_output_size=count), np.uint8)
        except zstandard.ZstdError as error:
            raise SampleError(f"{where} is damaged: {high.name} cannot be decompressed ({error})") from None
        chunk = values[reached : reached + count]
        chunk[:] = exponents
        chunk <<= 8
        chunk |= mantissas[reached : reached + count]
        begin, reached = end, reached + count
    if begin != len(high.data) or reached != values.size:
        raise SampleError(f"{where} is damaged: {high.name} and {low.name} do not fit together")
    return torch.from_numpy(values).view(torch.bfloat16).reshape(low.shape)


# --- fp8


def _store_fp8(name: str, tensor: torch.Tensor, where: str) -> list[StoredTensor]:
    """NAME: e4m3 values; NAME.scale: fp32, one a row of the last dimension. State = value x scale."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    values = torch.empty(rows.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(rows), dtype=torch.float32)
    for start in range(0, len(rows), FP8_ROWS):
        chunk = rows[start : start + FP8_ROWS].float()
        largest = chunk.abs().amax(dim=1)
        if not torch.isfinite(largest).all():
            raise SampleError(f"{where}: {name} holds NaN or infinity, which codec fp8 cannot store")
        scale = (largest / FP8_MAX).clamp_(min=FP8_MIN_SCALE)
        values[start : start + FP8_ROWS] = chunk.div_(scale[:, None]).to(torch.float8_e4m3fn)
        scales[start : start + FP8_ROWS] = scale
    return [
        StoredTensor(name, "F8_E4M3", tuple(tensor.shape), bytes_of(values)),
        StoredTensor(f"{name}.scale", "F32", tuple(tensor.shape[:-1]), bytes_of(scales)),
    ]


def _load_fp8(parts: list[StoredTensor], where: str) -> torch.Tensor:
    stored, stored_scale = parts
    if (stored.dtype, stored_scale.dtype) != ("F8_E4M3", "F32") or stored.shape[:-1] != stored_scale.shape:
        raise SampleError(f"{where} is damaged: {stored.name} and its scales do not fit together")
    shape = stored.shape
    if not stored.data.nbytes:
        return torch.empty(shape, dtype=torch.bfloat16)
    rows = _load_raw([stored], where).reshape(-1, shape[-1])
    scales = _load_raw([stored_scale], where).reshape(-1, 1)
    states = torch.empty(rows.shape, dtype=torch.bfloat16)
    for start in range(0, len(rows), FP8_ROWS):
        states[start : start + FP8_ROWS] = (
            rows[start : start + FP8_ROWS].float().mul_(scales[start : start + FP8_ROWS])
        )
    return states.reshape(shape)


_Store = Callable[[str, torch.Tensor, str], list[StoredTensor]]
_Load = Callable[[list[StoredTensor], str], torch.Tensor]
_CODECS: dict[str, tuple[_Store, _Load, tuple[str, ...]]] = {
    # name: (store a state, load it from its parts, what is appended to its name for each part)
    "bf16": (_store_raw, _load_raw, ("",)),
    "bf16z": (_store_bf16z, _load_bf16z, (".low", ".high", ".high_sizes")),
    "fp8": (_store_fp8, _load_fp8, ("", ".scale")),
}
