"""Cuts ordered samples into units and writes them: the units' token files, and the sample table.

A unit is a shard to be: its size is counted exactly, in bytes of the finished shard under the raw codec.
"""

from __future__ import annotations

import hashlib
import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_stream import layout
from dflash_stream.prepare.samples import Record
from dflash_stream.run import SAMPLES_SCHEMA, UNIT_SCHEMA
from dflash_stream.store import Store

ROW_GROUP = 1 << 14  # rows of the table kept in memory
MAX_PUTS = 8  # units on their way at a time


class Cutter:
    """Sequential accumulation: a sample opens a new unit when it does not fit into the open one."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._filled = 0
        self.unit = -1

    def place(self, size: int) -> int:
        """The unit of the next sample, of `size` bytes in its shard. A unit has at least one sample."""
        if self.unit < 0 or self._filled + size > self._unit_bytes:
            self.new_unit()
        self._filled += size
        return self.unit

    def new_unit(self) -> None:
        """The next sample begins a unit."""
        self.unit += 1
        self._filled = 0

    def close(self) -> None:
        """End the open unit, if it has a sample: train units begin behind the validation units."""
        if self._filled:
            self._filled = self._unit_bytes + 1


@dataclass
class Totals:
    """What has been written."""

    samples: int = 0
    tokens: int = 0
    supervised: int = 0


class Writer:
    """Writes samples in their final order. Memory: one unit's tokens, and the units on their way.

    store: None to write nothing but the table: a run is compared, not made.
    size: (record, validation) → bytes of the sample in its shard
    puts: units on their way at a time; eight at most
    """

    def __init__(
        self,
        store: Store | None,
        sources: list[str],
        unit_bytes: int,
        size: Callable[[Record, bool], int],
        table: Path,
        puts: int,
    ) -> None:
        self._store = store
        self._sources = sources
        self._size = size
        self._cutter = Cutter(unit_bytes)
        self._unit: dict[str, list[object]] = {name: [] for name in UNIT_SCHEMA.names}
        self._rows: dict[str, list[object]] = {name: [] for name in SAMPLES_SCHEMA.names}
        self.table_path = table
        self._table = pq.ParquetWriter(table, SAMPLES_SCHEMA, compression="zstd")
        self._max_puts = min(puts, MAX_PUTS)
        self._pool = ThreadPoolExecutor(self._max_puts, thread_name_prefix="put-unit")
        self._puts: deque[Future[str]] = deque()
        self.totals = {True: Totals(), False: Totals()}
        self.validation_units = 0

    @property
    def units(self) -> int:
        return self._cutter.unit + 1

    @property
    def samples(self) -> int:
        return sum(totals.samples for totals in self.totals.values())

    def add(self, record: Record, *, validation: bool) -> None:
        """The next sample. All validation samples come first."""
        if not validation and not self.totals[False].samples:
            self._cutter.close()
            self.validation_units = self.units
        before = self._cutter.unit
        unit = self._cutter.place(self._size(record, validation))
        if unit != before and before >= 0:
            self._put_unit(before)
        meta = record.meta
        content = int(meta["token_hash"])
        key = f"{self.samples:08d}-{content & 0xFFFFFFFF:08x}"
        for name, value in zip(UNIT_SCHEMA.names, (key, record.input_ids, record.loss_mask), strict=True):
            self._unit[name].append(value)
        source, split = self._sources[int(meta["source"])], "validation" if validation else "train"
        row = (
            key,
            source,
            int(meta["row"]),
            unit,
            int(meta["tokens"]),
            int(meta["supervised"]),
            split,
            content,
        )
        for name, cell in zip(SAMPLES_SCHEMA.names, row, strict=True):
            self._rows[name].append(cell)
        if len(self._rows["key"]) >= ROW_GROUP:
            self._write_rows()
        totals = self.totals[validation]
        totals.samples += 1
        totals.tokens += int(meta["tokens"])
        totals.supervised += int(meta["supervised"])

    def finish(self) -> str:
        """Everything added is in the store, apart from the table, which is on disk; returns the table's sha256."""
        if self._unit["key"]:
            self._put_unit(self._cutter.unit)
        if not self.totals[False].samples:
            self.validation_units = self.units
        self._write_rows()
        self._table.close()
        while self._puts:
            self._puts.popleft().result()
        with self.table_path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def close(self) -> None:
        """Give up what is not written yet. Harmless after `finish`."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._table.close()

    def _write_rows(self) -> None:
        if self._rows["key"]:
            self._table.write_table(pa.table(self._rows, schema=SAMPLES_SCHEMA))
            self._rows = {name: [] for name in SAMPLES_SCHEMA.names}

    def _put_unit(self, unit: int) -> None:
        columns, self._unit = self._unit, {name: [] for name in UNIT_SCHEMA.names}
        if self._store is None:
            return
        while len(self._puts) >= self._max_puts:
            self._puts.popleft().result()
        self._puts.append(self._pool.submit(self._store.put, layout.unit_tokens(unit), unit_file(columns)))


def unit_file(columns: dict[str, list[object]]) -> bytes:
    """The bytes of tokens/unit-NNNNNN.parquet; equal samples give equal bytes."""
    file = io.BytesIO()
    pq.write_table(pa.table(columns, schema=UNIT_SCHEMA), file, compression="zstd")
    return file.getvalue()
