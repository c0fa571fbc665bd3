"""The range engine: order, integrity, memory, a clean end, over a real directory, slow or damaged."""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from dflash_stream.config import MiB, StoreSettings, StreamSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards.index import Location, ShardIndex, load_index
from dflash_stream.store import Store, StoreError, open_store
from dflash_stream.stream.ranges import cut, plan_reads
from dflash_stream.stream.reader import SampleReader
from dflash_stream.stream.sample import Sample
from tests.shards.shard_stores import damage_in_place, local_settings
from tests.stream.watched_store import WatchedStore, late
from tests.synthetic_run import extract_run, prepare_run, sample_tensors

REFUSED = 9
SETTINGS = {"range_bytes": 64 << 10, "threads": 4, "prefetch_bytes": 512 << 10}


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, ShardIndex, Path]:
    """A run of 24 samples of 13 to 130 KiB, one of them refused."""
    directory = tmp_path_factory.mktemp("run")
    settings = StoreSettings(
        url=f"file://{directory}", part_bytes=5 * MiB, pool_bytes=10 * MiB, max_concurrent_uploads=1
    )
    run = prepare_run(open_store(settings), tokens=(50, 500), hidden=64)
    extract_run(run, settings, refuse={REFUSED})
    return run, load_index(run.store, run, range(run.identity.units)), directory


@pytest.fixture
def watched(extracted: tuple[Run, ShardIndex, Path]) -> WatchedStore:
    return WatchedStore(extracted[0].store)


def reader(extracted: tuple[Run, ShardIndex, Path], store: WatchedStore, **settings: Any) -> SampleReader:
    run, index, _ = extracted
    return SampleReader(cast(Store, store), run, index, StreamSettings(**(SETTINGS | settings)))


def requests(rows: Any) -> Iterator[tuple[int, int]]:
    return ((int(row), 0) for row in rows)


def scattered(count: int = 24) -> list[int]:
    return np.random.default_rng(0).permutation(count).tolist()


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("sample-reader")]


def same(sample: Sample | None, row: int) -> bool:
    """Whether this is the sample that was written for the row."""
    if row == REFUSED or sample is None:
        return row == REFUSED and sample is None
    expected = sample_tensors(row, len(sample.input_ids), 2, 64)
    return (
        sample.row == row
        and torch.equal(sample.hidden_states, expected["hidden_states"])
        and torch.equal(sample.input_ids, expected["input_ids"].long())
        and torch.equal(sample.loss_mask, expected["loss_mask"].bool())
    )


@pytest.mark.parametrize("threads", [1, 7])
@pytest.mark.parametrize("range_bytes", [64 << 10, 1 << 20])
def test_samples_come_in_order_however_late_the_store_answers(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore, threads: int, range_bytes: int
) -> None:
    watched.meddle = late
    order = scattered()
    found = list(reader(extracted, watched, threads=threads, range_bytes=range_bytes).read(requests(order)))
    assert all(same(sample, row) for sample, row in zip(found, order, strict=True))


def test_tensors_stay_valid_while_they_are_held(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    """A buffer that is used again too early would show another sample's values."""
    order = scattered() * 3
    held = list(reader(extracted, watched, prefetch_bytes=150 << 10).read(requests(order)))
    assert all(same(sample, row) for sample, row in zip(held, order, strict=True))
    states = next(sample for sample in held if sample is not None).hidden_states
    states += 1  # they are the consumer's own


def test_every_byte_is_read_once_and_neighbours_together(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    _, index, _ = extracted
    counters = (engine := reader(extracted, watched, range_bytes=256 << 10)).counters
    rows = range(24)
    list(engine.read(requests(rows)))
    payload = sum(where.size for row in rows if (where := index.locate(row)) is not None)
    assert payload <= counters.bytes_read == watched.bytes_asked <= payload * 1.01
    pieces = sorted(watched.ranges)
    assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in itertools.pairwise(pieces))
    assert counters.requests == len(pieces) < 23
    assert counters.samples == 23
    assert max(length for _, _, length in pieces) <= 256 << 10


def test_reading_ahead_never_exceeds_the_budget(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    _, index, _ = extracted
    budget = 300 << 10
    engine = reader(extracted, watched, prefetch_bytes=budget, range_bytes=1 << 20)
    handed_out, most = 0, 0
    for row, _ in zip(order := scattered(), engine.read(requests(order)), strict=True):
        where = index.locate(row)
        handed_out += where.size if where else 0
        time.sleep(0.005)
        ahead = watched.bytes_asked - handed_out
        most = max(most, ahead)
        assert engine.counters.prefetched_bytes <= budget
        assert ahead <= budget + 24 * 1023  # the gaps between neighbours are read too
    assert most > budget // 2  # it does read ahead
    assert engine.counters.prefetched_bytes == 0


def native_threads() -> int:
    """Threads of this process that Python has not started."""
    return len(list(Path("/proc/self/task").iterdir())) - threading.active_count()


def test_decoding_starts_no_teams_of_threads_and_leaves_the_caller_s_alone(tmp_path: Path) -> None:
    """OpenMP gives every thread that asks a team as large as the machine."""
    settings = StoreSettings(url=f"file://{tmp_path}", part_bytes=5 * MiB, pool_bytes=10 * MiB)
    run = prepare_run(
        open_store(settings), units=1, validation_units=0, tokens=(300, 400), hidden=256, codec="fp8"
    )
    extract_run(run, settings)
    index = load_index(run.store, run, [0])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        engine = SampleReader(run.store, run, index, StreamSettings(threads=4, prefetch_bytes=1 << 30))
        samples = engine.read(requests(range(6)))
        native = native_threads()
        next(samples)
        payload = sum(where.size for row in range(6) if (where := index.locate(row)) is not None)
        assert engine.counters.prefetched_bytes > payload  # decoded, they are twice as large
        for sample in samples:
            assert sample is not None
            assert native_threads() <= native
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_sample_larger_than_the_budget_goes_through_alone(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    engine = reader(extracted, watched, prefetch_bytes=1)
    for row, sample in zip(range(24), engine.read(requests(range(24))), strict=True):
        assert same(sample, row)
    assert all(
        same(sample, row) for row, sample in zip(range(24), engine.read(requests(range(24))), strict=True)
    )


def test_refused_samples_keep_their_place_and_are_not_read(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    assert list(reader(extracted, watched).read(requests([REFUSED, REFUSED]))) == [None, None]
    assert watched.ranges == []


def test_looking_ahead_ends_where_nothing_is_to_be_read(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    asked = itertools.count()
    samples = reader(extracted, watched).read(None for _ in asked)
    assert [next(samples) for _ in range(10)] == [None] * 10
    samples.close()
    assert next(asked) < 10_000


def one_unit(directory: Path) -> tuple[Run, ShardIndex]:
    """A small run of its own, to be spoiled."""
    settings = local_settings(directory)
    run = prepare_run(open_store(settings), units=1, validation_units=0)
    extract_run(run, settings)
    return run, load_index(run.store, run, [0])


def test_damage_in_the_store_is_named(tmp_path: Path) -> None:
    """tar has no checksum over data: nobody else would notice."""
    run, index = one_unit(tmp_path)
    where = index.locate(3)
    assert where is not None
    path, place = tmp_path / where.object, where.offset + where.size - 5
    damage_in_place(path, place, bytes([path.read_bytes()[place] ^ 4]))
    engine = SampleReader(run.store, run, index, StreamSettings())
    samples = engine.read(requests(range(6)))
    assert [sample.row for sample in itertools.islice(samples, 3) if sample] == [0, 1, 2]
    with pytest.raises(UserError, match="damaged") as caught:
        next(samples)
    message = str(caught.value)
    for part in (where.object, run.samples.key[3], f"{where.offset}-", f"{where.crc32c:08x}", "read twice"):
        assert part in message
    assert engine.counters.rereads == 1
    assert not reading_threads()


def test_damage_on_the_way_is_mended_by_reading_again(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    flips = itertools.count()

    def flip_once(key: str, start: int, buffer: memoryview) -> None:
        if next(flips) == 0:
            buffer[len(buffer) // 2] ^= 1

    watched.meddle = flip_once
    engine = reader(extracted, watched, threads=1)
    assert all(same(sample, row) for row, sample in enumerate(engine.read(requests(range(24)))))
    assert engine.counters.rereads == 1


def test_a_replaced_shard_is_refused_with_advice(tmp_path: Path) -> None:
    run, index = one_unit(tmp_path)
    where = index.locate(0)
    assert where is not None
    run.store.put(where.object, run.store.get(where.object)[0])
    with pytest.raises(UserError, match=r"replaced after the index was read.*Start again"):
        list(SampleReader(run.store, run, index, StreamSettings()).read(requests([0])))


@pytest.mark.parametrize("error", [StoreError("the server is gone"), ZeroDivisionError("a mistake of ours")])
def test_an_error_in_a_thread_reaches_the_consumer_with_its_cause(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore, error: Exception
) -> None:
    run, index, _ = extracted
    target = index.locate(20)
    assert target is not None

    def break_down(key: str, start: int, buffer: memoryview) -> None:
        if key == target.object and start <= target.offset < start + len(buffer):
            raise error

    watched.meddle = break_down
    samples = reader(extracted, watched, range_bytes=64 << 10).read(requests([0, 1, 2, 20, 3]))
    assert [sample.row for sample in itertools.islice(samples, 3) if sample] == [0, 1, 2]
    with pytest.raises(type(error) if isinstance(error, ZeroDivisionError) else UserError) as caught:
        next(samples)
    assert str(error) in str(caught.value)
    if isinstance(error, StoreError):
        assert run.samples.key[20] in str(caught.value)
        assert caught.value.__cause__ is error
    del caught
    gc.collect()
    assert not reading_threads()


def leave_early(samples: Iterator[Sample | None]) -> None:
    for number, _ in enumerate(samples):
        if number == 2:
            break


def fail(samples: Iterator[Sample | None]) -> None:
    for sample in samples:
        raise KeyError(sample)


def test_fifty_short_epochs_leave_no_threads_and_no_buffers(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    engine = reader(extracted, watched)
    buffers = []

    def note(key: str, start: int, buffer: memoryview) -> None:
        buffers.append(weakref.ref(buffer.obj))

    watched.meddle = note
    threads_before, files_before = set(threading.enumerate()), len(list(Path("/proc/self/fd").iterdir()))
    for epoch in range(50):
        samples = engine.read(requests(scattered()))
        if epoch % 3 == 0:
            assert len(list(samples)) == 24
        elif epoch % 3 == 1:
            leave_early(samples)
        else:
            with pytest.raises(KeyError):
                fail(samples)
        del samples
    gc.collect()
    assert set(threading.enumerate()) <= threads_before
    assert len(list(Path("/proc/self/fd").iterdir())) <= files_before
    assert engine.counters.prefetched_bytes == 0
    assert buffers
    assert not [buffer for buffer in buffers if buffer() is not None]


def test_leaving_does_not_wait_for_a_store_that_hangs(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_stream.stream.reader._JOIN_S", 0.1)
    release = threading.Event()
    calls = itertools.count()

    def hang(key: str, start: int, buffer: memoryview) -> None:
        if next(calls) > 0:
            release.wait(30)

    watched.meddle = hang
    samples = reader(extracted, watched, threads=2).read(requests([0, *range(12, 24)]))
    next(samples)
    began = time.monotonic()
    samples.close()
    assert time.monotonic() - began < 5
    release.set()
    for thread in reading_threads():
        thread.join(5)
    assert not reading_threads()


def test_a_stall_is_logged_with_the_requests_in_flight(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore, caplog: pytest.LogCaptureFixture
) -> None:
    run, index, _ = extracted
    where = index.locate(0)
    assert where is not None
    watched.meddle = lambda key, start, buffer: time.sleep(0.25)
    with caplog.at_level(logging.WARNING):
        list(reader(extracted, watched, stall_s=0.1).read(requests([0])))
    (first, *_) = caplog.messages
    assert run.samples.key[0] in first
    assert f"{where.object} bytes {where.offset}-" in first


def test_the_consumer_s_waiting_is_counted(
    extracted: tuple[Run, ShardIndex, Path], watched: WatchedStore
) -> None:
    watched.meddle = lambda key, start, buffer: time.sleep(0.5)
    engine = reader(extracted, watched, prefetch_bytes=1)
    list(engine.read(requests([0])))
    assert 0.1 < engine.counters.wait_s < 20


def place(offset: int, size: int, name: str = "a") -> Location:
    return Location(name, "etag", offset, size, 0)


def test_only_true_neighbours_share_a_read_and_only_up_to_the_limit() -> None:
    locations = [
        place(2560, 1000),
        place(512, 1024),
        None,
        place(9000, 100),  # too far from the others
        place(3560 + 1023, 300),  # as far away as padding and a header can be
        place(512, 1024),  # the same sample again, in the next epoch
        place(512, 1024, "b"),
        place(20_000, 99_999),  # larger than the limit
    ]
    reads = [(read.start, read.stop, read.places) for read in plan_reads(locations, 3000)]
    assert reads == [
        (2560, 4883, [0, 4]),
        (512, 1536, [1]),
        (9000, 9100, [3]),
        (512, 1536, [5]),
        (512, 1536, [6]),
        (20_000, 119_999, [7]),
    ]


def test_ranges_cover_a_read_exactly_within_the_limit() -> None:
    for start, length, limit in [(0, 1, 8), (3, 8, 8), (3, 9, 8), (100, 1_000_001, 4096)]:
        ranges = cut(start, start + length, limit)
        assert ranges[0][0] == start
        assert ranges[-1][1] == start + length
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert max(stop - begin for begin, stop in ranges) <= limit
        assert len(ranges) == -(-length // limit)
