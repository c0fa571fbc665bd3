"""The index tells where every sample lies, from records or blocks, and says when it does not fit the run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_stream import layout
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards import (
    ShardIndex,
    build_block,
    build_blocks,
    committed_units,
    decode,
    load_index,
    read_record,
)
from dflash_stream.shards import index as index_module
from dflash_stream.store import crc32c, open_store
from tests.shards.shard_stores import damage_in_place, local_settings
from tests.synthetic_run import extract_run, prepare_run, sample_tensors

REFUSED = {7, 12, 17}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Five units of six samples, some refused; two units make a block, so there are three, the last short."""
    monkeypatch.setattr(index_module, "BLOCK_UNITS", 2)
    settings = local_settings(tmp_path)
    run = prepare_run(open_store(settings), units=5, each=6, validation_units=1)
    extract_run(run, settings, refuse=REFUSED)
    return run


def same(a: ShardIndex, b: ShardIndex) -> bool:
    arrays = ("unit", "offset", "size", "crc32c", "state")
    return a.objects == b.objects and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in arrays)


def test_every_sample_is_found_where_the_index_says(run: Run) -> None:
    index = load_index(run.store, run, range(5))
    for row, key in enumerate(run.samples.key):
        where = index.locate(row)
        if row in REFUSED:
            assert where is None
            continue
        assert where is not None
        payload = run.store.get_range(where.object, where.offset, where.size, etag=where.etag)
        assert crc32c(payload) == where.crc32c
        expected = sample_tensors(row, int(run.samples.tokens[row]), 2, 16)
        assert decode(payload, key)["input_ids"].equal(expected["input_ids"])
    assert same(pickle.loads(pickle.dumps(index)), index), "one process of a node reads it for all"


def test_units_that_were_not_asked_for_are_not_there(run: Run) -> None:
    build_blocks(run.store, run)
    index = load_index(run.store, run, [1, 2, 3])
    assert set(index.objects) == {1, 2, 3}
    for row in (0, 29):
        with pytest.raises(UserError, match=f"row {row} .*not committed yet"):
            index.locate(row)
    assert index.locate(6) is not None


def test_units_still_missing_are_named(run: Run) -> None:
    run.store.delete([layout.record(3)])
    assert committed_units(run.store) == {0, 1, 2, 4}
    with pytest.raises(UserError, match=r"1 of 5 units are not committed, first unit 3"):
        load_index(run.store, run, range(5))
    with pytest.raises(UserError, match=r"block 1 needs unit 3"):
        build_block(run.store, run, 1)
    assert len(build_blocks(run.store, run)) == 2


def test_blocks_equal_the_records_and_replace_them(run: Run) -> None:
    from_records = load_index(run.store, run, range(5))
    assert len(build_blocks(run.store, run)) == 3
    assert build_blocks(run.store, run) == []
    before = run.store.reads.requests
    from_blocks = load_index(run.store, run, range(5))
    assert same(from_records, from_blocks)
    assert run.store.reads.requests - before == 1 + 2 + 1, (
        "a listing, two full blocks, the record of the last unit"
    )


def test_two_builders_of_a_block_agree(run: Run) -> None:
    first = build_block(run.store, run, 0)
    body = run.store.get(first)[0]
    run.store.delete([first])
    assert build_block(run.store, run, 0) == first
    assert run.store.get(first)[0] == body
    assert build_block(run.store, run, 0) == first


def test_a_block_of_replaced_records_is_never_read(run: Run) -> None:
    build_blocks(run.store, run)
    record = read_record(run.store, 1)
    _, etag = run.store.get(layout.record(1))
    repaired = record.model_copy(update={"etag": '"other"'})
    run.store.put(layout.record(1), repaired.to_bytes(), if_match=etag)
    index = load_index(run.store, run, range(5))
    assert index.objects[1] == (record.object, '"other"')
    assert len(build_blocks(run.store, run)) == 1


@pytest.mark.parametrize("place", [40, -6])
def test_a_damaged_block_is_named(run: Run, tmp_path: Path, place: int) -> None:
    key = build_block(run.store, run, 0)
    path = tmp_path / key
    damage_in_place(path, place % path.stat().st_size, b"\xff\x00\xff\x00")
    with pytest.raises(UserError, match=f"{key} cannot be read.*Delete it"):
        load_index(run.store, run, range(2))


def put_changed(run: Run, change: dict[str, Any]) -> None:
    record = read_record(run.store, 1)
    changed = {name: value(record) if callable(value) else value for name, value in change.items()}
    run.store.put(layout.record(1), record.model_copy(update=changed).to_bytes())


def moved(record: Any) -> list[Any]:
    return [record.samples[0], record.samples[1].model_copy(update={"offset": 1024}), *record.samples[2:]]


def renamed(record: Any) -> list[Any]:
    return [record.samples[0].model_copy(update={"key": "someone-else"}), *record.samples[1:]]


def swapped(record: Any) -> list[Any]:
    """Samples 0 and 1 have changed places, and the offsets fit."""
    first, second = record.samples[:2]
    second = second.model_copy(update={"offset": first.offset})
    step = -(-second.size // 512) * 512 + 512
    return [second, first.model_copy(update={"offset": first.offset + step}), *record.samples[2:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "f" * 64}, r"belongs to another run: it names fingerprint ffffffffffff"),
        ({"unit": 2}, r"is the record of unit 2"),
        ({"object": ""}, r"and object ''"),
        ({"version": 9}, r"has record version 9"),
        ({"samples": lambda r: r.samples[:-1]}, r"has 6 samples .* record has 4 and 1 refused; it lacks 000"),
        ({"refused": []}, r"it lacks 00000007"),
        ({"samples": renamed}, r"it lacks 00000006"),
        ({"refused": lambda r: [*r.refused, r.refused[0].model_copy(update={"key": "x"})]}, r"it has x, which"),
        ({"samples": swapped}, r"has them out of order"),
        ({"samples": moved}, r"is said to begin at byte 1,024"),
        ({"size": 4096}, r"bytes, the object 4,096"),
        ({"samples": lambda r: [s.model_copy(update={"tokens": 3}) for s in r.samples]}, "token counts differ"),
    ],
)  # fmt: skip
def test_a_record_that_does_not_fit_is_named(run: Run, change: dict[str, Any], message: str) -> None:
    put_changed(run, change)
    with pytest.raises(UserError, match=f"index/shard-000001.json.*{message}"):
        load_index(run.store, run, range(5))
    load_index(run.store, run, [0, 2, 3, 4])


def test_unreadable_records_are_named(run: Run) -> None:
    bodies: list[Callable[[bytes], bytes]] = [lambda b: b[:-5], lambda b: b"", lambda b: b"[]"]
    whole, _ = run.store.get(layout.record(1))
    for damage in bodies:
        run.store.put(layout.record(1), damage(whole))
        with pytest.raises(
            UserError, match=r"index/shard-000001.json is not a shard record: .*delete its record"
        ):
            load_index(run.store, run, [1])


def test_shard_keys_and_record_keys_name_their_unit() -> None:
    for unit in (0, 999_999, 1_234_567):
        assert layout.unit_of_shard(layout.shard(unit, "6f2a00112233")) == unit
        assert layout.unit_of_record(layout.record(unit)) == unit
    key = layout.shard(7, "abc")
    for other in (
        key[1:],
        key + "x",
        key.replace("-abc", ""),
        layout.record(7),
        "shards/zz/shard-000007-abc.tar",
    ):
        assert layout.unit_of_shard(other) is None
