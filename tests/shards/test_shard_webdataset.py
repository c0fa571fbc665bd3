"""Stock webdataset reads a run from the real server, in every kind of worker, and damage is never an end."""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import webdataset as wds
from torch.utils.data import DataLoader
from webdataset.tariterators import group_by_keys, tar_file_expander

from dflash_stream import layout
from dflash_stream.config import StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards import read_record
from dflash_stream.shards import webdataset as hook
from dflash_stream.shards.webdataset import ObjectStream, ShardCheck, decode_sample, register_s3, shard_urls
from dflash_stream.store import ObjectChanged, StoreError, open_store
from launch.s3_server import S3Server
from tests.shards.shard_stores import MiB, damage_in_place, local_settings, members
from tests.synthetic_run import extract_run, prepare_run, sample_tensors

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def s3_run(s3_url: str) -> Run:
    """Four units of five samples, the first one held out, one training sample refused."""
    settings = StoreSettings(url=s3_url, part_bytes=5 * MiB, pool_bytes=10 * MiB, max_concurrent_uploads=2)
    run = prepare_run(open_store(settings), units=4, each=5, validation_units=1)
    extract_run(run, settings, refuse=[8])
    return run


def pipeline(run: Run, **options: Any) -> wds.WebDataset:
    register_s3()
    return wds.WebDataset(shard_urls(run.store.url, **options), shardshuffle=False).map(decode_sample)


def training_keys(run: Run) -> list[str]:
    return [key for row, key in enumerate(run.samples.key) if row >= 5 and row != 8]


def test_stock_webdataset_yields_every_training_sample_in_order(s3_run: Run) -> None:
    samples = list(pipeline(s3_run))
    assert [sample["__key__"] for sample in samples] == training_keys(s3_run)
    row = s3_run.samples.key.index(samples[3]["__key__"])
    expected = sample_tensors(row, int(s3_run.samples.tokens[row]), 2, 16)
    assert all(torch.equal(samples[3][name], tensor) for name, tensor in expected.items())
    held_out = list(pipeline(s3_run, split="validation"))
    assert [sample["__key__"] for sample in held_out] == s3_run.samples.key[:5]
    assert all("greedy.hidden_states" in sample for sample in held_out)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_workers_read_every_sample_once(s3_run: Run, start: str) -> None:
    dataset = pipeline(s3_run)
    next(iter(dataset))  # connections of the parent must not be used by its forks
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start)
    assert sorted(sample["__key__"] for sample in loader) == training_keys(s3_run)


def test_settings_that_the_environment_lacks_reach_spawned_workers(
    s3_run: Run, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What register_s3 returns goes to a worker as a pickle and is called where nothing is registered."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    settings = StoreSettings(endpoint=s3_server.endpoint)
    urls = shard_urls(s3_run.store.url, settings=settings)
    worker_init = pickle.loads(pickle.dumps(register_s3(settings)))
    monkeypatch.delitem(wds.gopen_schemes, "s3")
    worker_init(0)
    assert [sample["__key__"] for sample in wds.WebDataset(urls, shardshuffle=False)] == training_keys(s3_run)


@pytest.mark.parametrize("page", ["README.md", "docs/format.md"])
def test_the_documented_pipeline_works_as_printed(
    s3_run: Run, run_command: Callable[..., CompletedProcess[str]], page: str
) -> None:
    block = re.search(r"```python\n(.*?register_s3\(\).*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert block is not None
    program = block[1].replace("s3://bucket/run", s3_run.store.url)
    assert program != block[1]
    done = run_command("python", "-c", program + "\nprint(*[sample['__key__'] for sample in pipeline])")
    assert done.stdout.split() == training_keys(s3_run)


def test_a_replaced_shard_is_not_read(s3_run: Run) -> None:
    record = read_record(s3_run.store, 1)
    body, _ = s3_run.store.get(record.object)
    dataset = pipeline(s3_run)
    for other in (body[: record.samples[2].offset - 512], body + bytes(512), bytes(len(body))):
        s3_run.store.put(record.object, other)
        with pytest.raises(ObjectChanged):
            list(dataset)
    s3_run.store.delete([record.object])
    with pytest.raises(StoreError, match=r"shard-000001"):
        list(dataset)


def test_only_the_committed_attempt_of_a_unit_is_read(s3_run: Run) -> None:
    record = read_record(s3_run.store, 1)
    orphan = layout.shard(1, "0" * 12)
    s3_run.store.put(orphan, s3_run.store.get(record.object)[0])
    register_s3()
    with pytest.raises(UserError, match=f"is not the shard of unit 1: that is {record.object}"):
        list(wds.WebDataset([f"{s3_run.store.url}/{orphan}"], shardshuffle=False))


def test_other_tars_are_read_through_the_same_hook(s3_run: Run) -> None:
    body, _ = s3_run.store.get(read_record(s3_run.store, 1).object)
    s3_run.store.put("elsewhere/copy.tar", body)
    register_s3()
    dataset = wds.WebDataset([f"{s3_run.store.url}/elsewhere/copy.tar"], shardshuffle=False).map(decode_sample)
    assert len(list(dataset)) == 4


def test_a_run_without_training_shards_says_so(s3_url: str) -> None:
    with pytest.raises(UserError, match="no run at"):
        shard_urls(s3_url)
    prepare_run(open_store(StoreSettings(url=s3_url)))
    with pytest.raises(UserError, match=r"no committed train shard: run extract\.py"):
        shard_urls(s3_url)


def test_writing_through_the_hook_is_refused(s3_run: Run) -> None:
    register_s3()
    with pytest.raises(UserError, match="can only be read"):
        wds.gopen(f"{s3_run.store.url}/x.tar", "wb")


# --- damage that no etag shows


@pytest.fixture
def local_run(tmp_path: Path) -> Run:
    settings = local_settings(tmp_path)
    run = prepare_run(open_store(settings), units=1, each=4, validation_units=0)
    extract_run(run, settings)
    return run


def read_stock(run: Run) -> list[str]:
    """The keys that webdataset's own tar reader finds through our stream."""
    record = read_record(run.store, 0)
    raw = ObjectStream(run.store, record.object, record.size, record.etag, ShardCheck(record, "the shard").feed)
    source = [{"url": "the shard", "stream": io.BufferedReader(raw, MiB)}]
    return [sample["__key__"] for sample in group_by_keys(tar_file_expander(source))]


def test_damage_in_any_region_of_a_shard_is_named(local_run: Run, tmp_path: Path) -> None:
    record = read_record(local_run.store, 0)
    path = tmp_path / record.object
    body = path.read_bytes()
    assert read_stock(local_run) == [sample.key for sample in record.samples]
    for number, sample in enumerate(record.samples):
        regions = {
            "tar header, name": sample.offset - 512,
            "tar header, size": sample.offset - 512 + 134,
            "tar header, checksum": sample.offset - 512 + 150,
            "safetensors length": sample.offset,
            "safetensors header": sample.offset + 60,
            "its padding": sample.offset + 511,
            "first tensor": sample.offset + 512,
            "middle": sample.offset + sample.size // 2,
            "last byte": sample.offset + sample.size - 1,
        }
        for region, place in regions.items():
            damage_in_place(path, place, bytes([body[place] ^ 0x10]))
            with pytest.raises(UserError, match=rf"damaged.*{sample.key}|{sample.key}.*damaged"):
                read_stock(local_run)
            assert region, number
            damage_in_place(path, place, body[place : place + 1])
    assert read_stock(local_run) == [sample.key for sample in record.samples]


def test_stock_webdataset_alone_would_take_the_damage_for_an_end(local_run: Run) -> None:
    """What the stream is for: without it a damaged header in the middle is no error at all."""
    record = read_record(local_run.store, 0)
    body = bytearray(local_run.store.get(record.object)[0])
    body[record.samples[2].offset - 512 + 150] ^= 0x10
    source = [{"url": "the shard", "stream": io.BytesIO(body)}]
    assert len(list(group_by_keys(tar_file_expander(source)))) == 2


def test_a_failure_is_final(local_run: Run) -> None:
    """A reader that goes on after an error must not be given what follows the hole."""
    record = read_record(local_run.store, 0)
    raw = ObjectStream(local_run.store, record.object, record.size + 512, record.etag)
    wrong = record.model_copy(update={"samples": [s.model_copy(update={"crc32c": 1}) for s in record.samples]})
    check = ShardCheck(wrong, "the shard").feed
    for stream in (raw, ObjectStream(local_run.store, record.object, record.size, record.etag, check)):
        for _ in range(2):
            with pytest.raises(UserError):
                stream.read(100)


def test_ranges_join_without_gaps_and_memory_stays_bounded(
    local_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "RANGE_BYTES", 1000)
    record = read_record(local_run.store, 0)
    body, _ = local_run.store.get(record.object)
    seen: set[int] = set()
    real = local_run.store.read_into

    def read_into(key: str, start: int, buffer: memoryview, **options: Any) -> None:
        seen.add(id(buffer.obj))
        real(key, start, buffer, **options)

    monkeypatch.setattr(local_run.store, "read_into", read_into)
    raw = ObjectStream(local_run.store, record.object, record.size, record.etag, ShardCheck(record, "u").feed)
    pieces = []
    while piece := raw.read(333):
        pieces.append(piece)
    assert b"".join(pieces) == body
    assert len(seen) <= hook.RANGES_AHEAD


def test_an_abandoned_stream_leaves_no_threads(local_run: Run) -> None:
    before = set(threading.enumerate())
    record = read_record(local_run.store, 0)
    for _ in range(5):
        raw = ObjectStream(local_run.store, record.object, record.size, record.etag)
        raw.read(10)
        del raw
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before


def test_an_object_without_bytes_ends_at_once(local_run: Run) -> None:
    local_run.store.put("empty", b"")
    info = local_run.store.head("empty")
    assert ObjectStream(local_run.store, "empty", 0, info.etag).read() == b""


def test_a_file_that_is_no_sample_is_named() -> None:
    with pytest.raises(UserError, match=r"k of u has no \.safetensors"):
        decode_sample({"__key__": "k", "__url__": "u", "json": b"{}"})
    with pytest.raises(UserError, match=r"sample k of u is damaged"):
        decode_sample({"__key__": "k", "__url__": "u", "safetensors": b"123"})


def test_the_index_member_is_no_sample(local_run: Run) -> None:
    body, _ = local_run.store.get(read_record(local_run.store, 0).object)
    assert "__index__" in members(body)
    assert "__index__" not in read_stock(local_run)
