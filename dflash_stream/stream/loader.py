"""The torch face of the stream: what one rank takes through the drafter, step after step, and where to resume.

The stream never ends by itself, is the same for every world size, and needs no other rank: nothing here talks
to torch.distributed, forks, or keeps a file. The order is `order`'s, the bytes are `reader`'s. Do not hand the
loader to `accelerator.prepare`, which would read everything on every rank and throw most of it away.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards.index import ShardIndex, committed_units, load_index
from dflash_stream.store import Store
from dflash_stream.stream.order import Limits, Order, micro_batches
from dflash_stream.stream.reader import Counters, SampleReader
from dflash_stream.stream.sample import MicroBatch, Sample

STATE_VERSION = 1
_NAMES = {  # of what a state holds, as the user knows them
    "version": "state version",
    "fingerprint": "run (fingerprint of run.json)",
    "seed": "train.seed",
    "batch_samples": "train.batch_samples",
    "block_bytes": "stream.block_bytes",
}
_Plan = list[list[tuple[int, int]]]  # of one rank for one step: micro-batches of (row, epoch)


def open_index(store: Store, run: Run, units: NDArray[np.int32], what: str) -> ShardIndex:
    """The index of these units. UserError when some are not extracted yet, with the command that goes on."""
    wanted = set(np.unique(units).tolist())
    missing = sorted(wanted - committed_units(store)) if wanted else []
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise UserError(
            f"{what} needs units of {store.url} that are not extracted yet: {len(missing)} of {len(wanted)} "
            f"are missing ({shown}). Continue the extraction, on any number of machines: "
            f"accelerate launch extract.py --config YOUR.yaml --store.url {store.url}"
        )
    return load_index(store, run, sorted(wanted))


class TrainStream(IterableDataset[MicroBatch]):
    """The training samples of a run for one rank, as micro-batches, in the order that `order` defines.

    Each global step consists of `train.batch_samples` consecutive samples of the endless stream, shared by
    `world` ranks; every rank gets the same number of micro-batches in a step, some of them empty. Refused
    samples are left out of the lists (their slot, and so the plan, stays). With `steps`, ends before that
    global step, and reads nothing beyond.

    The position is the number of samples in steps that were delivered completely, on whichever rank: it
    advances by `train.batch_samples` at the moment the last micro-batch of a step is handed over. A state taken
    earlier in a step repeats the whole step. Iterating begins at the position; a new iteration ends the one
    before it.
    """

    def __init__(
        self, store: Store, run: Run, config: Config, *, rank: int = 0, world: int = 1, steps: int | None = None
    ) -> None:
        """UserError when training units are not extracted yet, or there are no training samples."""
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}")
        self.rank, self.world, self.steps = rank, world, steps
        self.batch_samples = config.train.batch_samples
        self._limits = Limits(config.train.tokens_per_batch, config.train.blocks_per_batch)
        self._block_tokens = config.drafter.block_size
        table = run.samples
        rows = np.flatnonzero(~table.validation)
        if not len(rows):
            raise UserError(f"{store.url} has no training samples: all {len(table)} are held out")
        self._tokens = table.tokens
        # A block begins at a supervised token that another one follows.
        self._blocks = np.clip(table.supervised - 1, 0, config.train.anchors)
        self._order = Order(
            rows, table.unit[rows], table.tokens[rows], bytes_per_token=run.identity.bytes_per_token,
            block_bytes=config.stream.block_bytes, seed=config.train.seed,
        )  # fmt: skip
        self._fixed = {
            "version": STATE_VERSION,
            "fingerprint": run.identity.fingerprint,
            "seed": config.train.seed,
            "batch_samples": self.batch_samples,
            "block_bytes": config.stream.block_bytes,
        }
        index = open_index(store, run, table.unit[rows], "training")
        self._reader = SampleReader(store, run, index, config.stream)
        self._active: weakref.ref[Generator[MicroBatch, None, None]] | None = None
        self.position = 0

    @property
    def num_samples(self) -> int:
        """Samples in an epoch, refused ones included."""
        return self._order.num_samples

    @property
    def counters(self) -> Counters:
        """What this rank has read."""
        return self._reader.counters

    def plan(self, step: int) -> list[_Plan]:
        """A global step as [rank][micro-batch] → (row, epoch): the same on every rank."""
        rows, epochs = self._order.rows(step * self.batch_samples, self.batch_samples)
        places = micro_batches(
            self._tokens[rows], self._blocks[rows], self.world, self._limits, block_tokens=self._block_tokens
        )
        return [[list(zip(rows[p].tolist(), epochs[p].tolist(), strict=True)) for p in plan] for plan in places]

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: a few numbers, the same on every rank, whatever the world size."""
        return {**self._fixed, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a state. UserError when it is of another run, seed, batch or block size."""
        for name, mine in self._fixed.items():
            if state.get(name) != mine:
                raise UserError(
                    f"cannot continue this training: its {_NAMES[name]} was {state.get(name)!r}, now it is "
                    f"{mine!r}, which is another order of samples. Use the settings it began with, "
                    "or another train.name"
                )
        self.close()
        self.position = int(state["position"])

    def close(self) -> None:
        """End the running iteration, and its threads. One that another thread is waiting in at this moment is
        left to that thread: it cannot be ended from here."""
        running = self._active() if self._active is not None else None
        if running is not None and inspect.getgeneratorstate(running) != inspect.GEN_RUNNING:
            running.close()
        self._active = None

    def __iter__(self) -> Iterator[MicroBatch]:
        if get_worker_info() is not None:
            raise UserError("the stream reads ahead by its own threads: use DataLoader(num_workers=0)")
        self.close()
        iteration = self._iterate()
        self._active = weakref.ref(iteration)
        return iteration

    def _iterate(self) -> Generator[MicroBatch, None, None]:
        first = self.position // self.batch_samples
        steps = itertools.count(first) if self.steps is None else range(first, self.steps)
        # The reader looks ahead in the same plans that are handed out here, each computed once.
        ahead, plans = itertools.tee((step, self.plan(step)[self.rank]) for step in steps)
        samples = self._reader.read(request for _, plan in ahead for request in _requests(plan))
        try:
            for step, plan in plans:
                if not any(plan):
                    next(samples)  # the None that stands for a step without work
                for number, micro in enumerate(plan, 1):
                    batch = [sample for _ in micro if (sample := next(samples)) is not None]
                    last = number == len(plan)
                    if last:
                        self.position = (step + 1) * self.batch_samples
                    yield MicroBatch(step, last, batch)
                    del batch
        finally:
            samples.close()


def _requests(plan: _Plan) -> Iterator[tuple[int, int] | None]:
    """What the reader is asked for a step: its samples, or one None, so that looking ahead always ends."""
    if any(plan):
        yield from itertools.chain.from_iterable(plan)
    else:
        yield None


def make_loader(
    store: Store, run: Run, config: Config, *, rank: int = 0, world: int = 1, steps: int | None = None
) -> DataLoader[MicroBatch]:
    """A DataLoader over one rank's TrainStream, which is its `.dataset`; it reads by threads, not workers."""
    stream = TrainStream(store, run, config, rank=rank, world=world, steps=steps)
    return DataLoader(stream, batch_size=None, num_workers=0)


def validation_samples(
    store: Store, run: Run, config: Config, *, rank: int = 0, world: int = 1, limit: int | None = None
) -> Iterator[Sample]:
    """This rank's part of the held-out samples, or of the first `limit`; over all ranks each comes once.

    Refused samples are left out. UserError when their units are not extracted yet.
    """
    rows = np.flatnonzero(run.samples.validation)[:limit]
    index = open_index(store, run, run.samples.unit[rows], "validation")
    reader = SampleReader(store, run, index, config.stream)
    for sample in reader.read((row, 0) for row in rows[rank::world].tolist()):
        if sample is not None:
            yield sample
