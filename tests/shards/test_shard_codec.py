"""Every codec gives back what it was given, stock safetensors reads the raw one, and damage has one name."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import load as stock_load

from dflash_stream.errors import UserError
from dflash_stream.shards import SampleError, decode, encode, raw_payload_bytes, require
from dflash_stream.shards import codec as codecs
from dflash_stream.shards.codec import payload_header
from dflash_stream.shards.payload import StoredTensor, in_order, parse
from tests.synthetic_run import sample_tensors

CODECS = ["bf16", "bf16z", "fp8"]


def payload_of(codec: str, tensors: dict[str, torch.Tensor]) -> bytearray:
    stored = encode(codec, tensors)
    return bytearray(payload_header(codec, stored) + b"".join(tensor.data for tensor in stored))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )  # fmt: skip


def everything(tokens: int = 37) -> dict[str, torch.Tensor]:
    """All tensors that a sample may have; dimensions that are odd and no multiple of anything."""
    tensors = sample_tensors(5, tokens, 3, 7, greedy=True)
    return tensors | {"final_state": tensors["hidden_states"][:, 0] * 3}


@pytest.mark.parametrize("codec", ["bf16", "bf16z"])
def test_lossless_codecs_keep_every_bit_of_every_bf16_pattern(codec: str) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert patterns.isnan().any()
    assert patterns.isinf().any()
    tensors = everything() | {"hidden_states": patterns.reshape(-1, 2, 16)}
    tensors["input_ids"] = torch.arange(2048, dtype=torch.int32)
    tensors["loss_mask"] = torch.ones(2048, dtype=torch.uint8)
    del tensors["final_state"]
    tensors["greedy.hidden_states"] = patterns[:64].reshape(2, 2, 16)
    found = decode(payload_of(codec, tensors))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name


@pytest.mark.parametrize("codec", CODECS)
def test_all_tensors_come_back_with_their_names_dtypes_and_shapes(codec: str) -> None:
    tensors = everything()
    found = decode(payload_of(codec, tensors))
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    for name in ("input_ids", "loss_mask", "greedy.input_ids", "greedy.prompt_tokens"):
        assert torch.equal(found[name], tensors[name])
    for name, tensor in found.items():
        assert tensor.data_ptr() % tensor.element_size() == 0, f"{name} is not aligned"


def test_bf16z_frames_join_across_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CHUNK_VALUES", 100)
    tensors = everything(41)
    assert same_bits(decode(payload_of("bf16z", tensors))["hidden_states"], tensors["hidden_states"])


def test_bf16z_makes_states_smaller() -> None:
    generator = torch.Generator().manual_seed(1)
    scale = torch.randn(256, generator=generator).exp()
    tensors = sample_tensors(0, 200, 5, 256)
    tensors["hidden_states"] = (torch.randn(200, 5, 256, generator=generator) * scale).bfloat16()
    assert len(payload_of("bf16z", tensors)) < 0.75 * len(payload_of("bf16", tensors))


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1.0, 300.0, 1e30, 3e38])
def test_fp8_error_stays_under_its_bound(magnitude: float) -> None:
    """|error| <= 2^-4 |x| (three mantissa bits) + 2^-10 scale (its subnormals) + bf16's own rounding."""
    generator = torch.Generator().manual_seed(2)
    outliers = torch.where(torch.rand(64, generator=generator) < 0.05, 60.0, 1.0)
    states = torch.randn(300, 3, 64, generator=generator) * outliers
    states = (states / states.abs().max() * magnitude).bfloat16()
    states[0, 0] = 0  # a row without a scale
    tensors = sample_tensors(0, 300, 3, 64) | {"hidden_states": states}
    found = decode(payload_of("fp8", tensors))["hidden_states"].double()
    exact = states.double()
    scale = (exact.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-126)
    bound = exact.abs() * (2.0**-4 + 2.0**-8) + scale * 2.0**-10 * 1.01 + 2.0**-134
    assert bool(((found - exact).abs() <= bound).all())
    assert bool((found[0, 0] == 0).all())
    if magnitude >= 1e-30:
        relative = float((found - exact).norm() / exact.norm())
        assert 0.005 < relative < 0.03, relative


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fp8_refuses_what_it_cannot_hold(bad: float) -> None:
    tensors = sample_tensors(0, 20, 2, 8)
    tensors["hidden_states"][11, 1, 3] = bad
    with pytest.raises(SampleError, match=r"sample 7: hidden_states holds NaN or infinity"):
        encode("fp8", tensors, "sample 7")


def test_stock_safetensors_reads_the_raw_payload() -> None:
    tensors = everything()
    found = stock_load(bytes(payload_of("bf16", tensors)))
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    for codec in ("bf16z", "fp8"):
        stock_load(bytes(payload_of(codec, tensors)))  # well-formed, whatever it means


@pytest.mark.parametrize("codec", CODECS)
def test_tensors_begin_on_a_512_byte_boundary(codec: str) -> None:
    for tensors in (everything(), sample_tensors(0, 2048, 5, 64)):
        header = payload_header(codec, encode(codec, tensors))
        assert len(header) % 512 == 0
    assert len(header) == 512, "a training sample should need no second block"


def test_raw_codec_copies_nothing_either_way() -> None:
    tensors = sample_tensors(1, 50, 2, 16)
    stored = {tensor.name: tensor for tensor in encode("bf16", tensors)}
    for name, tensor in tensors.items():
        assert np.frombuffer(stored[name].data, np.uint8).ctypes.data == tensor.data_ptr(), name
    payload = payload_of("bf16", tensors)
    found = decode(payload)
    payload[-1] ^= 1  # the last byte of loss_mask
    assert found["loss_mask"][-1] != tensors["loss_mask"][-1]


def test_a_read_only_payload_is_not_aliased_by_writable_tensors() -> None:
    payload = bytes(payload_of("bf16", sample_tensors(1, 9, 2, 16)))
    before = bytes(bytearray(payload))
    decode(payload)["hidden_states"].zero_()
    assert payload == before


def test_a_tensor_that_is_a_strided_view_is_stored_in_its_own_order() -> None:
    tensors = sample_tensors(1, 12, 2, 16)
    tensors["hidden_states"] = tensors["hidden_states"].transpose(0, 1).contiguous().transpose(0, 1)
    assert not tensors["hidden_states"].is_contiguous()
    for codec in ("bf16", "bf16z"):
        assert same_bits(decode(payload_of(codec, tensors))["hidden_states"], tensors["hidden_states"])


def test_order_of_the_callers_dict_does_not_change_the_bytes() -> None:
    tensors = everything()
    assert payload_of("bf16", tensors) == payload_of("bf16", dict(reversed(tensors.items())))


@pytest.mark.parametrize("tokens", [1, 9, 2048, 40_000])
@pytest.mark.parametrize("final_state", [False, True])
def test_planned_size_is_the_real_one(tokens: int, final_state: bool) -> None:
    tensors = sample_tensors(1, tokens, 2, 8)
    if final_state:
        tensors["final_state"] = tensors["hidden_states"][:, 0].clone()
    assert raw_payload_bytes(tokens, 2, 8, final_state) == len(payload_of("bf16", tensors))


def test_missing_zstandard_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"pip install 'dflash-stream\[zstd\]'"):
        require("bf16z")
    require("bf16")
    with pytest.raises(UserError, match="unknown codec 'int4'"):
        require("int4")


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = sample_tensors(1, 10, 2, 8, greedy=True)
    return tensors | {name: change(tensors[name])}


def without(name: str) -> dict[str, torch.Tensor]:
    tensors = sample_tensors(1, 10, 2, 8, greedy=True)
    del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            changed("hidden_states", lambda t: t.float()),
            "hidden_states is torch.float32, expected torch.bfloat16",
        ),
        (
            changed("hidden_states", lambda t: t[:9]),
            r"hidden_states has shape \[9, 2, 8\], expected \[T=10, K, H\]",
        ),
        (changed("loss_mask", lambda t: t[:9]), r"loss_mask has shape \[9\], expected \[T=10\]"),
        (changed("loss_mask", lambda t: t.bool()), "loss_mask is torch.bool"),
        (changed("input_ids", lambda t: t.long()), "input_ids is torch.int64, expected torch.int32"),
        (changed("greedy.hidden_states", lambda t: t[:, :1]), r"expected \[G=2, K=2, H=8\]"),
        (changed("greedy.prompt_tokens", lambda t: t + 2), "not within the 2 tokens"),
        (without("input_ids"), "lacks input_ids"),
        (without("greedy.input_ids"), "lacks greedy.input_ids"),
        (sample_tensors(1, 4, 2, 8) | {"logits": torch.zeros(1)}, "has also logits"),
        (sample_tensors(1, 0, 2, 8), r"input_ids has shape \[0\]"),
    ],
)
def test_tensors_that_break_the_rules_are_named(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(SampleError, match=f"sample 3.*{message}"):
        encode("bf16", tensors, "sample 3")


def mutate(payload: bytearray, rng: random.Random) -> bytearray:
    """A flipped bit, a random byte, another digit, a cut, a doubled piece, or any length of the header."""
    damaged = bytearray(payload)
    place = rng.randrange(8 + int.from_bytes(payload[:2], "little"))
    kind = rng.randrange(6)
    if kind == 0:
        damaged[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        damaged[place] = rng.randrange(256)
    elif kind == 2:
        digits = [i for i in range(8, len(payload)) if 48 <= payload[i] < 58][:60]
        damaged[rng.choice(digits)] = 48 + rng.randrange(10)
    elif kind == 3:
        del damaged[rng.randrange(len(damaged)) :]
    elif kind == 4:
        damaged[place:place] = damaged[place : place + rng.randrange(1, 40)]
    else:
        damaged[:8] = rng.getrandbits(64).to_bytes(8, "little")
    return damaged


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_header_never_gives_anything_but_the_named_error(codec: str) -> None:
    rng = random.Random(20)
    tensors = everything(6)
    payload = payload_of(codec, tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    errors = []
    for _ in range(400):
        try:
            found = decode(mutate(payload, rng))
        except SampleError as error:
            errors.append(str(error))
        else:  # e.g. a digit replaced by itself: then what is given still keeps to the rules
            assert {name: tensor.shape for name, tensor in found.items()} == shapes
    assert all("the payload" in error for error in errors)
    assert len(errors) > 300, "the mutations do not reach the header"


def test_damaged_zstd_frames_are_named_and_allocate_nothing_absurd() -> None:
    rng = random.Random(21)
    tensors = everything(30)
    payload = payload_of("bf16z", tensors)
    header = 8 + int.from_bytes(payload[:8], "little")
    refused = 0
    for _ in range(300):
        damaged = bytearray(payload)
        for _ in range(4):
            damaged[rng.randrange(header, len(damaged))] = rng.randrange(256)
        try:
            decode(damaged)
        except SampleError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}",
        b'{"a":1}',
        b'{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
        b'{"__metadata__":7}',
        b'{"__metadata__":{"format":"dflash-stream.1","codec":"bf16"}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_hostile_headers_are_refused(header: bytes) -> None:
    with pytest.raises(SampleError, match="sample x is damaged"):
        parse(len(header).to_bytes(8, "little") + header + bytes(8), "sample x")


def test_a_payload_of_another_format_is_named() -> None:
    header = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'
    with pytest.raises(SampleError, match=r"format 'pt'.*reads dflash-stream\.1"):
        decode(len(header).to_bytes(8, "little") + header + bytes(8))


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.compress(bytes(1000)),
        zstandard.compress(bytes(10)),
        bytes.fromhex("28b52ffde0") + (1 << 50).to_bytes(8, "little"),  # promises a pebibyte
        b"no frame",
    ],
)
def test_frames_that_do_not_fit_their_low_bytes_are_refused(frame: bytes) -> None:
    stored = {tensor.name: tensor for tensor in encode("bf16z", sample_tensors(0, 3, 2, 8))}
    stored["hidden_states.high"] = StoredTensor("hidden_states.high", "U8", (len(frame),), memoryview(frame))
    sizes = memoryview(len(frame).to_bytes(4, "little"))
    stored["hidden_states.high_sizes"] = StoredTensor("hidden_states.high_sizes", "I32", (1,), sizes)
    parts = in_order(stored.values())
    with pytest.raises(SampleError, match=r"do not fit together|cannot be decompressed"):
        decode(payload_header("bf16z", parts) + b"".join(part.data for part in parts))
