"""The order of training is a formula: pinned, complete, the same for every world size, balanced, and cheap."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_stream.stream.order import Limits, Order, block_starts, micro_batches, pack, split


def table(
    units: int = 7, each: int = 9, first_row: int = 5
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Rows, units and token counts of a fixed training split that begins behind some held-out rows."""
    count = units * each
    tokens = (np.arange(count) * 7919 % 97 + 4).astype(np.int32)
    return (
        np.arange(count, dtype=np.int64) + first_row,
        np.repeat(np.arange(units, dtype=np.int32), each),
        tokens,
    )


def order(seed: int = 3, block_bytes: int = 150, **shape: int) -> Order:
    rows, units, tokens = table(**shape)
    return Order(rows, units, tokens, bytes_per_token=1, block_bytes=block_bytes, seed=seed)


def test_the_order_is_pinned_for_ever() -> None:
    """A changed formula would silently change every training that is resumed."""
    rows, epochs = order().rows(60, 12)
    assert rows.tolist() == GOLDEN_ROWS
    assert epochs.tolist() == [0, 0, 0] + [1] * 9
    tokens = table()[2][rows - 5]
    plan = micro_batches(tokens, np.zeros_like(tokens), 3, Limits(200, 1), block_tokens=4)
    assert [[batch.tolist() for batch in rank] for rank in plan] == GOLDEN_PLAN


@pytest.mark.parametrize("block_bytes", [1, 150, 10**9])
def test_an_epoch_has_every_sample_once_and_the_next_another_order(block_bytes: int) -> None:
    stream = order(block_bytes=block_bytes)
    count = stream.num_samples
    epochs = [stream.rows(epoch * count, count)[0] for epoch in range(3)]
    for rows in epochs:
        assert sorted(rows.tolist()) == table()[0].tolist()
    assert not (epochs[0] == epochs[1]).all()
    assert not (epochs[1] == epochs[2]).all()
    assert not (order(seed=4, block_bytes=block_bytes).epoch(0) == epochs[0]).all()


def test_blocks_stay_together_and_are_shuffled_inside() -> None:
    rows, units, tokens = table()
    starts = block_starts(units, tokens.astype(np.int64), 150)
    block_of = dict(
        zip(rows.tolist(), np.repeat(np.arange(len(starts)), np.diff(starts, append=len(rows))), strict=True)
    )
    insides = set()
    for epoch in range(8):
        blocks = [block_of[row] for row in order().epoch(epoch).tolist()]
        changes = 1 + sum(a != b for a, b in pairwise(blocks))
        assert changes == len(starts)
        insides.add(tuple(row for row in order().epoch(epoch).tolist() if block_of[row] == 0))
    assert len(insides) > 1


def test_a_block_has_its_bytes_and_never_crosses_a_unit() -> None:
    generator = np.random.default_rng(0)
    for block_bytes in (1, 50, 120, 400, 10**6):
        units = np.sort(generator.integers(0, 20, 300)).astype(np.int32)
        size = generator.integers(4, 100, 300)
        starts = block_starts(units, size, block_bytes)
        assert starts[0] == 0
        assert (np.diff(starts) > 0).all()
        for start, stop in zip(starts, [*starts[1:], 300], strict=True):
            assert len(set(units[start:stop].tolist())) == 1
            whole_unit = (units == units[start]).sum() == stop - start
            assert whole_unit or size[start:stop].sum() >= block_bytes
            # not needlessly large: short without its last sample, unless the rest of its unit joined it
            if not whole_unit and stop < 300 and units[stop] == units[start]:
                assert size[start : stop - 1].sum() < block_bytes


def test_any_piece_of_the_stream_equals_that_piece_of_the_whole() -> None:
    whole, whole_epochs = order().rows(0, 400)
    for position in (0, 1, 62, 63, 64, 126, 189, 350):
        rows, epochs = order().rows(position, 40)
        assert rows.tolist() == whole[position : position + 40].tolist()
        assert epochs.tolist() == whole_epochs[position : position + 40].tolist()


def test_a_batch_larger_than_several_epochs_works() -> None:
    rows, epochs = order(units=1, each=5).rows(3, 32)
    assert len(rows) == 32
    assert np.unique(epochs).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert np.unique(rows[2:], return_counts=True)[1].tolist() == [6] * 5


def test_shares_are_a_partition_within_the_balance_bound() -> None:
    generator = np.random.default_rng(1)
    for world in range(1, 9):
        for count in (1, 3, 8, 32, 61):
            tokens = generator.integers(1, 2049, count)
            shares = split(tokens, world)
            assert len(shares) == world
            assert sorted(np.concatenate(shares).tolist()) == list(range(count))
            heaviest = max(tokens[share].sum() for share in shares)
            at_best = max(tokens.max(), tokens.sum() / world)
            assert heaviest <= at_best * (4 / 3) or heaviest <= tokens.sum() / world + tokens.max() * (
                1 - 1 / world
            )


def test_equal_neighbours_fall_to_one_rank() -> None:
    """Neighbours lie side by side in a shard, so that one read brings them all."""
    shares = split([2048] * 12, 4)
    assert [share.tolist() for share in shares] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_micro_batches_are_as_many_on_every_rank_and_hold_the_limit() -> None:
    generator = np.random.default_rng(2)
    for world in (1, 2, 3, 8, 40):
        for _ in range(20):
            tokens = generator.integers(1, 3000, 32)
            blocks = generator.integers(0, 512, 32)
            plan = micro_batches(tokens, blocks, world, Limits(2048, 700), block_tokens=16)
            assert len({len(batches) for batches in plan}) == 1
            seen = [place for batches in plan for batch in batches for place in batch.tolist()]
            assert sorted(seen) == list(range(32))
            for batches in plan:
                for batch in batches:
                    assert len(batch) < 2 or len(batch) * tokens[batch].max() <= 2048
                    assert len(batch) < 2 or len(batch) * blocks[batch].max() <= 700


def test_rank_with_short_samples_has_more_to_compute() -> None:
    """Four samples of 512 tokens make nearly four times the blocks of one of 2,048 when 512 are drawn at most."""
    tokens = np.array([2048] * 4 + [512] * 16)
    blocks = np.minimum(512, tokens - 2)
    for rank in micro_batches(tokens, blocks, 4, Limits(10**6, 10**6), block_tokens=16):
        places = np.concatenate(rank)
        assert abs(blocks[places].sum() - blocks.sum() / 4) < 20


def test_packing_needs_the_fewest_micro_batches() -> None:
    def fewest(lengths: list[int], limit: int) -> int:
        """By trying: the longest one goes with the k next longest, for every k that fits."""
        if not lengths:
            return 0
        most = max(1, limit // lengths[0])
        return 1 + min(fewest(lengths[size:], limit) for size in range(1, most + 1))

    generator = np.random.default_rng(3)
    for _ in range(40):
        lengths = generator.integers(1, 60, 9)
        assert len(pack(lengths, np.zeros_like(lengths), Limits(100, 1))) == fewest(
            sorted(lengths.tolist(), reverse=True), 100
        )


def test_a_million_samples_cost_no_more_than_two_seconds_an_epoch() -> None:
    count = 1_000_000
    tokens = np.random.default_rng(4).integers(50, 2049, count).astype(np.int32)
    units = (np.arange(count) // 700).astype(np.int32)
    large = Order(np.arange(count), units, tokens, bytes_per_token=5760, block_bytes=8 << 20, seed=0)
    began = time.process_time()
    for epoch in range(4):
        large.rows(epoch * count + 17, 512)
    assert (time.process_time() - began) / 4 < 2
    assert len(large._epochs) == 2  # held epochs: 8 bytes a sample each


GOLDEN_ROWS = [24, 25, 23, 27, 28, 29, 26, 9, 12, 10, 11, 13]
GOLDEN_PLAN = [[[10, 8], [9, 0]], [[1, 2], [5, 11]], [[4, 7], [6, 3]]]
