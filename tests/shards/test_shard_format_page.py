"""docs/format.md is enough: a reader written from that page alone, with none of the package, reads a run."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import zstandard

from dflash_stream.shards import build_blocks
from dflash_stream.shards import codec as codecs
from dflash_stream.shards import index as index_module
from dflash_stream.shards import tar as tar_module
from dflash_stream.store import open_store
from tests.shards.shard_stores import local_settings
from tests.synthetic_run import extract_run, prepare_run, sample_tensors

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text()
WIDTH = {"I32": 4, "F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}


def castagnoli(data: bytes) -> int:
    """CRC32C by its definition: reflected polynomial 0x82F63B78."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def states(payload: bytes, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A state of a payload as fp32, whatever the codec."""
    (length,) = struct.unpack_from("<Q", payload)
    assert (8 + length) % 512 == 0
    header = json.loads(payload[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert metadata["format"] == "dflash-stream.1"
    offsets = sorted(entry["data_offsets"] for entry in header.values())
    assert [start for start, _ in offsets] == [0, *(end for _, end in offsets[:-1])]
    widths = [WIDTH[e["dtype"]] for e in sorted(header.values(), key=lambda e: e["data_offsets"])]
    assert widths == sorted(widths, reverse=True)

    def raw(tensor: str) -> bytes:
        start, end = header[tensor]["data_offsets"]
        return payload[8 + length + start : 8 + length + end]

    if metadata["codec"] == "fp8":
        values = np.asarray([e4m3(byte) for byte in raw(name)], np.float32).reshape(header[name]["shape"])
        scale = np.frombuffer(raw(f"{name}.scale"), "<f4").reshape(header[f"{name}.scale"]["shape"])
        return values * scale[..., None]
    if metadata["codec"] == "bf16z":
        high, at = b"", 0
        for size in np.frombuffer(raw(f"{name}.high_sizes"), "<i4"):
            high += zstandard.decompress(raw(f"{name}.high")[at : at + size])
            at += size
        words = np.frombuffer(high, np.uint8).astype(np.uint32) << 8
        words |= np.frombuffer(raw(f"{name}.low"), np.uint8)
        shape = header[f"{name}.low"]["shape"]
    else:
        words, shape = np.frombuffer(raw(name), "<u2").astype(np.uint32), header[name]["shape"]
    return (words << 16).view(np.float32).reshape(shape)


@pytest.mark.parametrize("codec", ["bf16", "bf16z", "fp8"])
def test_a_reader_written_from_the_page_reads_a_run(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "CHUNK_VALUES", 150)
    settings = local_settings(tmp_path)
    run = prepare_run(open_store(settings), units=2, each=3, validation_units=1, codec=codec)
    extract_run(run, settings, refuse=[4])
    identity = json.loads((tmp_path / "run.json").read_text())
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    table = pq.read_table(tmp_path / "tokens/samples.parquet").to_pylist()
    for unit in range(identity["units"]):
        record = json.loads((tmp_path / f"index/shard-{unit:06d}.json").read_text())
        assert (record["version"], record["run"], record["unit"]) == (1, fingerprint, unit)
        spread = hashlib.blake2b(f"{unit}-{record['attempt']}".encode(), digest_size=1).hexdigest()
        assert record["object"] == f"shards/{spread}/shard-{unit:06d}-{record['attempt']}.tar"
        assert re.fullmatch("[0-9a-f]{12}", record["attempt"])
        shard = (tmp_path / record["object"]).read_bytes()
        assert len(shard) == record["size"]
        rows = [row for row in table if row["unit"] == unit]
        refused = {refusal["key"] for refusal in record["refused"]}
        assert [s["key"] for s in record["samples"]] == [r["key"] for r in rows if r["key"] not in refused]
        expected_offset = 512
        for sample in record["samples"]:
            assert sample["offset"] == expected_offset
            expected_offset += -(-sample["size"] // 512) * 512 + 512
            header = shard[sample["offset"] - 512 : sample["offset"]]
            assert header.split(b"\0")[0].decode() == sample["key"] + ".safetensors"
            payload = shard[sample["offset"] : sample["offset"] + sample["size"]]
            assert castagnoli(payload) == sample["crc32c"]
            row = [r["key"] for r in table].index(sample["key"])
            exact = sample_tensors(row, sample["tokens"], 2, 16, greedy=unit == 0)
            for name in ["hidden_states", "greedy.hidden_states"][: 2 - unit]:
                found, wanted = states(payload, name), exact[name].float().numpy()
                error = np.abs(found - wanted).max()
                assert error == 0 if codec != "fp8" else 0 < error <= 4 * 2**-4
        at = next(at for at in range(len(shard) - 1536, 0, -512) if shard[at:].startswith(b"__index__\0"))
        size = int(shard[at + 124 : at + 135], 8)
        assert at + 512 + -(-size // 512) * 512 + 1024 == len(shard)
        inside = json.loads(shard[at + 512 : at + 512 + size])
        assert inside == record | {"object": "", "size": 0, "etag": ""}


def test_an_index_block_is_what_the_page_says(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    run = prepare_run(open_store(settings), units=3, each=3, validation_units=1)
    extract_run(run, settings, refuse=[4])
    (key,) = build_blocks(run.store, run)
    etags = {info.key: info.etag for info in run.store.list("index/shard-")}
    lines = "\n".join(
        f"index/shard-{unit:06d}.json {etags[f'index/shard-{unit:06d}.json']}" for unit in range(3)
    )
    assert key == f"index/blocks/block-000000-{hashlib.sha256(lines.encode()).hexdigest()[:16]}.parquet"
    block = pq.read_table(io.BytesIO((tmp_path / key).read_bytes()))
    assert block.schema.metadata[b"run"].decode() == run.identity.fingerprint
    rows = block.to_pylist()
    assert [row["unit"] for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for unit in range(3):
        record = json.loads((tmp_path / f"index/shard-{unit:06d}.json").read_text())
        stored = [row for row in rows if row["unit"] == unit and row["offset"] is not None]
        names = ("offset", "size", "crc32c")
        assert [[r[n] for n in names] for r in stored] == [[s[n] for n in names] for s in record["samples"]]
        assert {(r["object"], r["etag"]) for r in stored} == {(record["object"], record["etag"])}
    assert [rows[4][name] for name in ("offset", "size", "crc32c")] == [None] * 3


def test_numbers_on_the_page_are_the_codes() -> None:
    assert f"runs of {codecs.CHUNK_VALUES:,}" in PAGE
    assert f"÷ {codecs.FP8_MAX:.0f}, at least 2^-126" in PAGE
    assert codecs.FP8_MIN_SCALE == 2.0**-126
    assert f"units {index_module.BLOCK_UNITS}·B" in PAGE
    assert f"{len(tar_module.END):,} zero bytes" in PAGE
    assert f"at most {tar_module.MAX_NAME_BYTES} bytes and members less than 8 GiB" in PAGE
    assert tar_module.MAX_MEMBER_BYTES == (8 << 30) - 1
    assert f'"format": "{codecs.FORMAT}"' in PAGE
    generator = torch.Generator().manual_seed(3)
    tensors = sample_tensors(0, 400, 3, 256)
    tensors["hidden_states"] = torch.randn(400, 3, 256, generator=generator).bfloat16()
    stored = codecs.encode("fp8", tensors)
    payload = bytearray(codecs.payload_header("fp8", stored) + b"".join(tensor.data for tensor in stored))
    error = codecs.decode(payload)["hidden_states"].float() - tensors["hidden_states"].float()
    relative = float(error.norm() / tensors["hidden_states"].float().norm())
    assert f"{relative:.1%}".replace("%", " %") in PAGE
