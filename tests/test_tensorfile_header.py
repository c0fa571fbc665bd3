"""Headers of safetensors files: as the library reads them, and nothing but the named error from damaged ones."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from dflash_stream.tensorfile import header
from dflash_stream.tensorfile.header import LayoutError
from dflash_stream.tensorfile.pieces import NAMES, pieces, total_bytes


def test_the_library_reads_other_tensors_than_were_written() -> None:
    tensors = {f"{name} Ω": torch.arange(6).reshape(2, 3).to(dtype) for dtype, name in NAMES.items()} | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "turned": torch.randn(3, 2).T,
    }
    file = b"".join(pieces(tensors, {"format": "pt"}))
    assert len(file) == total_bytes(tensors, {"format": "pt"})
    found = load(file)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.float())


@pytest.mark.parametrize("alignment_bytes", [8, 512])
def test_tensors_begin_at_odd_places(alignment_bytes: int) -> None:
    for length in range(40):
        layout = [("n" * length, "F32", (2, 3)), ("b", "U8", ())]
        built = header.build(layout, alignment_bytes=alignment_bytes)
        size = len(built) + 25
        assert len(built) % alignment_bytes == 0
        assert header.length_of(built, size, at_most=size) == len(built) - 8
        metadata, entries = header.parse(built[8:], size)
        assert metadata == {}
        assert [(entry.start - len(built), entry.end - len(built)) for entry in entries] == [(0, 24), (24, 25)]


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"{",
        b"\xff",
        b'{"__metadata__":{"a":1},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',  # bytes do not fit the shape
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',  # a gap
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',  # the file is longer
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',  # the file is shorter
        b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,-8]}}',
        b'{"a":{"dtype":"F32","shape":[true,2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":0}}',
        b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
    ],
)
def test_a_nonsense_header_is_trusted(text: bytes) -> None:
    with pytest.raises(LayoutError):
        header.parse(text, 8 + len(text) + 8)


@pytest.mark.parametrize("start", [b"", b"1234567", bytes(8), b"\xff" * 8, (101).to_bytes(8, "little")])
def test_a_nonsense_length_is_trusted(start: bytes) -> None:
    with pytest.raises(LayoutError):
        header.length_of(start, 1000, at_most=100)
