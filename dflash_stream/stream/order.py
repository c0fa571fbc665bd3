"""The order of training, as a formula: which samples make batch b, who takes them, in which micro-batches.

Everything here is pure and depends on the sample table and the settings alone, so every process computes the
same answer without asking another one, before a byte is read. Epochs are permutations of *blocks*, runs of
neighbouring samples of one shard that are worth a read of their own; epochs follow one another in one endless
stream of samples; batch b is positions [b·G, (b+1)·G) of that stream, across the edge of an epoch too. Ranks
and micro-batches only cut a batch up. Reading is left to `reader`, the position to `loader`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dflash_stream.hashing import mix64, permutation

_INSIDE = 1  # tells the hash that orders samples inside their block from the one that orders blocks


def block_starts(
    units: NDArray[np.int32], sample_bytes: NDArray[np.int64], block_bytes: int
) -> NDArray[np.int64]:
    """Where blocks begin: consecutive samples of a unit with `block_bytes` together, or all that it has.

    units, sample_bytes [n], by (unit, place in the unit). A block is closed by the sample that reaches
    `block_bytes`; what is left at the end of a unit joins the block before it. So every block holds at least
    `block_bytes` (unless its whole unit is smaller) and none crosses a unit.
    """
    count = len(units)
    if not count:
        return np.zeros(0, np.int64)
    end = np.cumsum(sample_bytes, dtype=np.int64)
    begin = end - sample_bytes
    unit_end = np.searchsorted(units, units, side="right")
    # One past the sample that fills a block which begins here.
    reached = np.searchsorted(end, begin + block_bytes, side="left") + 1
    whole = reached <= unit_end
    following = np.minimum(reached, unit_end).tolist()
    starts = [0]
    while (next_start := following[starts[-1]]) < count:
        starts.append(next_start)
    found = np.asarray(starts, np.int64)
    first_of_unit = np.searchsorted(units, units[found], side="left") == found
    return found[whole[found] | first_of_unit]


class Order:
    """The endless stream of samples: position → (row of the sample table, epoch).

    rows [n]: the table's rows of the training split, by (unit, place); units, tokens [n]: their columns.
    `bytes_per_token` turns tokens into bytes to read; block_bytes: see `block_starts`. Holds two epochs at
    most.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        units: NDArray[np.int32],
        tokens: NDArray[np.int32],
        *,
        bytes_per_token: int,
        block_bytes: int,
        seed: int,
    ) -> None:
        self._rows = np.asarray(rows, np.int64)
        starts = block_starts(units, tokens.astype(np.int64) * bytes_per_token, block_bytes)
        self.num_samples = len(self._rows)
        self.num_blocks = len(starts)
        self._block = np.repeat(np.arange(len(starts)), np.diff(starts, append=self.num_samples))
        self._seed = seed
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """The rows of one pass over the data in their order, each once [n]."""
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._permute(epoch)
        return self._epochs[epoch]

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        blocks = permutation(self.num_blocks, self._seed, epoch)
        if self.num_blocks == self.num_samples:
            return self._rows[blocks]
        place = np.empty_like(blocks)
        place[blocks] = np.arange(self.num_blocks)
        inside = mix64(self._seed, epoch, _INSIDE, self._rows)
        return self._rows[np.lexsort((inside, place[self._block]))]

    def rows(self, position: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows and epochs of positions [position, position + count) of the endless stream."""
        epochs, places = np.divmod(np.arange(position, position + count, dtype=np.int64), self.num_samples)
        parts = [self.epoch(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts), epochs


def split(costs: Sequence[int] | NDArray[np.integer], world: int) -> list[NDArray[np.int64]]:
    """Shares of a batch: for each rank the places in the batch that it takes, ascending; a share may be empty.

    Dearest first, always to the rank with the least to do (ties: the lowest rank), which keeps the heaviest
    share within 4/3 of the best possible (Graham 1969). Samples of equal cost are then dealt out again in
    order of their places, so that neighbours, which lie side by side in a shard, fall to one rank and come in
    one read.
    """
    each = np.asarray(costs, np.int64)
    dearest_first = np.argsort(-each, kind="stable")
    lightest = [(0, rank) for rank in range(world)]
    ranks = np.empty(len(each), np.int64)
    for turn, cost in enumerate(each[dearest_first].tolist()):
        load, rank = lightest[0]
        ranks[turn] = rank
        heapq.heapreplace(lightest, (load + cost, rank))
    owner = np.empty_like(ranks)
    owner[dearest_first] = ranks[np.lexsort((ranks, -each[dearest_first]))]
    return [np.flatnonzero(owner == rank) for rank in range(world)]


@dataclass(frozen=True)
class Limits:
    """What a micro-batch of several samples may hold; together they bound the memory of a step.

    tokens, blocks: samples times the longest one's tokens, and times the most blocks of one
    """

    tokens: int
    blocks: int


def pack(tokens: NDArray[np.int64], blocks: NDArray[np.int64], limits: Limits) -> list[NDArray[np.int64]]:
    """Cut one share into micro-batches within the limits, longest first, each as large as it can be.

    tokens, blocks [n]: of each sample. Returns indices into them. A sample over a limit goes alone.
    """
    batches: list[list[int]] = []
    longest = most = 0
    for place in np.argsort(-tokens, kind="stable").tolist():
        size = len(batches[-1]) + 1 if batches else 0
        most = max(most, int(blocks[place]))
        if batches and size * longest <= limits.tokens and size * most <= limits.blocks:
            batches[-1].append(place)
        else:
            batches.append([place])
            longest, most = int(tokens[place]), int(blocks[place])
    return [np.asarray(batch, np.int64) for batch in batches]


def micro_batches(
    tokens: NDArray[np.integer],
    blocks: NDArray[np.integer],
    world: int,
    limits: Limits,
    *,
    block_tokens: int,
) -> list[list[NDArray[np.int64]]]:
    """A global batch as [rank][micro-batch] → places in it. Every rank has as many; the last may be empty.

    tokens, blocks [n]: of each sample, and the most draft blocks that training makes of it. What a sample costs
    is what goes through the drafter: its tokens as context, and `block_tokens` for each block.
    """
    lengths, counts = np.asarray(tokens, np.int64), np.asarray(blocks, np.int64)
    plans = [
        [share[chosen] for chosen in pack(lengths[share], counts[share], limits)]
        for share in split(lengths + block_tokens * counts, world)
    ]
    most = max(map(len, plans))
    return [plan + [np.zeros(0, np.int64)] * (most - len(plan)) for plan in plans]
