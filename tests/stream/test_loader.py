"""The torch face: the same batches for any world size, where to resume, the whole way over a real S3 server."""

from __future__ import annotations

import gc
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from dflash_stream.config import Config, MiB, StoreSettings, StreamSettings, TrainSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.store import Store, open_store
from dflash_stream.stream import MicroBatch, TrainStream, make_loader, validation_samples
from tests.stream.watched_store import WatchedStore, late
from tests.synthetic_run import extract_run, prepare_run, sample_tensors

BATCH = 5  # of 18 training samples: batches cross the edges of epochs
REFUSED = 9
STEPS = 11  # three epochs and a piece


def config(url: str, **train: Any) -> Config:
    return Config(
        store=StoreSettings(url=url, part_bytes=5 * MiB, pool_bytes=10 * MiB, max_concurrent_uploads=2),
        train=TrainSettings(**({"batch_samples": BATCH, "tokens_per_batch": 32, "seed": 7} | train)),
        stream=StreamSettings(block_bytes=2000, prefetch_bytes=16_000, threads=3),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """6 held-out and 18 training samples, one of these refused, in a directory."""
    settings = config(f"file://{tmp_path_factory.mktemp('run')}").store
    run = prepare_run(open_store(settings))
    extract_run(run, settings, refuse={REFUSED})
    return run


def stream(
    run: Run, store: Any = None, *, rank: int = 0, world: int = 1, steps: int | None = STEPS, **train: Any
) -> TrainStream:
    store = cast(Store, store or run.store)
    return TrainStream(store, run, config(run.store.url, **train), rank=rank, world=world, steps=steps)


def taken(batches: Iterable[MicroBatch]) -> list[tuple[int, list[tuple[int, int]]]]:
    """(step, [(row, epoch)]) of each micro-batch."""
    return [(batch.step, [(sample.row, sample.epoch) for sample in batch.samples]) for batch in batches]


def by_step(batches: Iterable[tuple[int, list[tuple[int, int]]]]) -> dict[int, list[tuple[int, int]]]:
    """step → its samples, sorted."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for step, samples in batches:
        steps[step] = sorted([*steps.get(step, []), *samples])
    return steps


def until(batches: Iterator[MicroBatch], steps: int) -> Iterator[MicroBatch]:
    """The micro-batches of the next `steps` steps, and not one more."""
    while steps:
        batch = next(batches)
        yield batch
        steps -= batch.last


def test_every_epoch_has_every_sample_once_but_the_refused_one(run: Run) -> None:
    whole = list(itertools.chain.from_iterable(samples for _, samples in taken(stream(run))))
    rows = [row for row in range(6, 24) if row != REFUSED]
    for epoch in range(3):
        assert sorted(row for row, of in whole if of == epoch) == rows
    assert [row for row, of in whole if of == 0] != [row for row, of in whole if of == 1]


@pytest.mark.parametrize("world", [2, 3, 4, 5, 6, 7, 8])
def test_global_batches_are_the_same_for_every_world_size(run: Run, world: int) -> None:
    alone = by_step(taken(stream(run)))
    ranks = [list(stream(run, rank=rank, world=world)) for rank in range(world)]
    together = by_step(itertools.chain.from_iterable(taken(batches) for batches in ranks))
    assert together == alone
    shapes = [[(batch.step, batch.last) for batch in batches] for batches in ranks]
    assert all(shape == shapes[0] for shape in shapes)  # a rank with one micro-step less would hang the others
    assert [step for step, last in shapes[0] if last] == list(range(STEPS))


def test_micro_batches_keep_to_the_padded_limit(run: Run) -> None:
    for batch in stream(run, world=2):
        lengths = [len(sample.input_ids) for sample in batch.samples]
        assert len(lengths) < 2 or len(lengths) * max(lengths) <= 32
    for batch in stream(run, world=2, tokens_per_batch=10_000, blocks_per_batch=12):
        blocks = [int((sample.loss_mask[:-1] & sample.loss_mask[1:]).sum()) for sample in batch.samples]
        assert len(blocks) < 2 or len(blocks) * max(blocks) <= 12


@pytest.mark.parametrize("world_after", [1, 3])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 7, 10])
def test_resuming_equals_never_having_stopped(run: Run, stop: int, world_after: int) -> None:
    """Positions in the second and third epoch, at any step, on another number of ranks."""
    whole = by_step(taken(stream(run)))
    first = stream(run)
    before = by_step(taken(until(iter(first), stop)))
    state = json.loads(json.dumps(first.state_dict()))
    assert state["position"] == stop * BATCH
    after: list[tuple[int, list[tuple[int, int]]]] = []
    for rank in range(world_after):
        second = stream(run, rank=rank, world=world_after)
        second.load_state_dict(state)
        after += taken(second)
    assert before | by_step(after) == whole
    assert not before.keys() & by_step(after).keys()


def test_resuming_at_the_exact_end_of_an_epoch(run: Run) -> None:
    whole = by_step(taken(stream(run, steps=4, batch_samples=9)))
    first = stream(run, steps=4, batch_samples=9)
    list(until(iter(first), 2))
    assert first.state_dict()["position"] == first.num_samples
    second = stream(run, steps=4, batch_samples=9)
    second.load_state_dict(first.state_dict())
    rest = by_step(taken(second))
    assert rest == {step: whole[step] for step in (2, 3)}
    assert {epoch for samples in rest.values() for _, epoch in samples} == {1}


def test_the_position_counts_whole_steps_only(run: Run) -> None:
    """A sample that was read ahead, or is part of a step under way, has not been trained on."""
    mine = stream(run)
    iterator = iter(mine)
    for batch in itertools.islice(iterator, 40):
        done = batch.step + batch.last
        assert mine.state_dict()["position"] == done * BATCH
        if batch.step == 3 and not batch.last:
            break
    again = taken(mine)
    assert again[0][0] == 3  # the step that was left is taken from its beginning
    assert by_step(again) == {
        step: samples for step, samples in by_step(taken(stream(run))).items() if step >= 3
    }


def test_nothing_before_the_position_is_read_and_nothing_beyond_the_end(run: Run) -> None:
    watched = WatchedStore(run.store)
    mine = stream(run, watched, steps=7)
    mine.load_state_dict(mine.state_dict() | {"position": 5 * BATCH})
    watched.ranges.clear()
    found = [sample for batch in mine for sample in batch.samples]
    index = mine._reader._index
    expected = sum(where.size for sample in found if (where := index.locate(sample.row)) is not None)
    gaps = 1023 * len(found)
    assert expected <= watched.bytes_asked <= expected + gaps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, r"train\.seed was 8, now it is 7"),
        ({"batch_samples": 4}, r"train\.batch_samples was 4, now it is 5"),
        ({"block_bytes": 1}, r"stream\.block_bytes was 1, now it is 2000"),
        ({"fingerprint": "abc"}, r"run \(fingerprint of run\.json\) was 'abc', now it is '"),
        ({"version": 2}, r"state version was 2, now it is 1"),
    ],
)
def test_the_state_of_another_order_is_refused(run: Run, change: dict[str, Any], message: str) -> None:
    mine = stream(run)
    with pytest.raises(UserError, match=message):
        mine.load_state_dict(mine.state_dict() | change)


def test_the_state_is_small_and_equal_on_every_rank(run: Run) -> None:
    states = []
    for rank in range(3):
        mine = stream(run, rank=rank, world=3)
        list(until(iter(mine), 2))
        states.append(mine.state_dict())
    assert states[0] == states[1] == states[2]
    assert len(json.dumps(states[0])) < 1000


def test_a_new_iteration_ends_the_one_before_it(run: Run) -> None:
    threads = set(threading.enumerate())
    mine = stream(run, steps=None)
    old = iter(mine)
    next(old)
    new = iter(mine)
    next(new)
    assert list(old) == []
    mine.close()
    assert list(new) == []
    assert set(threading.enumerate()) <= threads


def test_leaving_the_loader_ends_its_threads(run: Run) -> None:
    threads = set(threading.enumerate())
    loader = make_loader(run.store, run, config(run.store.url))
    for _ in range(5):
        for batch in loader:
            if batch.step == 1:
                break
    del batch
    gc.collect()
    assert set(threading.enumerate()) <= threads


def test_worker_processes_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_stream.stream.loader.get_worker_info", lambda: "as in a worker")
    with pytest.raises(UserError, match="num_workers=0"):
        iter(stream(run))


def test_missing_units_are_counted_with_the_command_that_makes_them(tmp_path: Path) -> None:
    settings = config(f"file://{tmp_path}")
    run = prepare_run(open_store(settings.store))
    extract_run(run, settings.store, units=[0, 2])
    with pytest.raises(UserError) as caught:
        TrainStream(run.store, run, settings)
    message = str(caught.value)
    assert "2 of 3 are missing (1, 3)" in message
    assert f"accelerate launch extract.py --config YOUR.yaml --store.url {run.store.url}" in message
    assert len(list(validation_samples(run.store, run, settings))) == 6  # their unit is there


def test_a_run_without_training_samples_is_refused(tmp_path: Path) -> None:
    settings = config(f"file://{tmp_path}")
    run = prepare_run(open_store(settings.store), units=1)
    with pytest.raises(UserError, match="no training samples"):
        TrainStream(run.store, run, settings)


def test_held_out_samples_come_once_over_all_ranks_with_the_target_s_text(run: Run) -> None:
    settings = config(run.store.url)
    shares = [list(validation_samples(run.store, run, settings, rank=rank, world=4)) for rank in range(4)]
    assert sorted(sample.row for share in shares for sample in share) == list(range(6))
    sample = shares[1][0]
    expected = sample_tensors(1, len(sample.input_ids), 2, 16, greedy=True)
    assert sample.greedy_prompt_tokens == 1
    assert sample.greedy_input_ids is not None
    assert sample.greedy_hidden_states is not None
    assert sample.greedy_input_ids.tolist() == [1, 2]
    assert torch.equal(sample.greedy_hidden_states, expected["greedy.hidden_states"])
    first = [sample.row for sample in validation_samples(run.store, run, settings, limit=4)]
    assert first == [0, 1, 2, 3]


@pytest.mark.parametrize("codec", ["bf16", "bf16z", "fp8"])
def test_shards_on_s3_come_back_as_they_were_written(s3_url: str, s3_server: object, codec: str) -> None:
    settings = config(s3_url)
    store = open_store(settings.store)
    run = prepare_run(store, codec=codec, layers=3, hidden=32)
    extract_run(run, settings.store, refuse={REFUSED})
    watched = WatchedStore(store, late)
    loader = make_loader(cast(Store, watched), Run.open(store), settings, steps=8)
    mine = cast(TrainStream, loader.dataset)
    assert mine.num_samples == 18
    seen = 0
    for batch in loader:
        for sample in batch.samples:
            seen += 1
            expected = sample_tensors(sample.row, int(run.samples.tokens[sample.row]), 3, 32)
            assert sample.hidden_states.dtype == torch.bfloat16
            assert sample.input_ids.dtype == torch.int64
            assert sample.loss_mask.dtype == torch.bool
            assert sample.key == run.samples.key[sample.row]
            assert torch.equal(sample.input_ids, expected["input_ids"].long())
            assert torch.equal(sample.loss_mask, expected["loss_mask"].bool())
            if codec == "fp8":
                torch.testing.assert_close(
                    sample.hidden_states.float(), expected["hidden_states"].float(), atol=0.05, rtol=0.07
                )
            else:
                assert torch.equal(sample.hidden_states, expected["hidden_states"])
    assert seen == mine.counters.samples
    assert mine.counters.bytes_read == watched.bytes_asked
    store.close()


def test_a_shard_that_is_replaced_on_s3_is_refused_not_mixed(s3_url: str, s3_server: object) -> None:
    settings = config(s3_url)
    store = open_store(settings.store)
    run = prepare_run(store, units=2)
    extract_run(run, settings.store)
    mine = TrainStream(store, run, settings)
    where = mine._reader._index.locate(6)
    assert where is not None
    body, _ = store.get(where.object)
    damaged = bytearray(body)
    damaged[where.offset + where.size // 2] ^= 1
    store.put(where.object, bytes(damaged))
    with pytest.raises(UserError, match="replaced after the index was read") as caught:
        list(mine)
    assert where.object in str(caught.value)
    store.close()


def test_the_plan_of_a_step_is_what_its_ranks_take(run: Run) -> None:
    mine = stream(run, rank=1, world=3)
    plans = [mine.plan(step)[1] for step in range(STEPS)]
    planned = [[pair for pair in micro if pair[0] != REFUSED] for plan in plans for micro in plan]
    assert planned == [samples for _, samples in taken(mine)]
    assert np.unique([len(plan) for plan in mine.plan(0)]).size == 1
