"""Which shards are committed, and where each sample of a run lies in them.

A commit record is one small object a unit. For large runs `build_blocks` gathers the records of 1,024
consecutive units in one Parquet object, which is read instead of them. A block's name holds a hash over the
names and etags of the records it was made from, so a block is immutable, two builders cannot disagree, and one
that no longer fits its records is never read.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dflash_stream import layout
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards.record import REMAKE, ShardRecord, check_layout
from dflash_stream.store import PreconditionFailed, Store

log = logging.getLogger(__name__)

BLOCK_UNITS = 1024
ABSENT, STORED, REFUSED = 0, 1, 2  # states of a sample in a ShardIndex; absent: its unit is not loaded
_BLOCK_SCHEMA = pa.schema(
    [  # one row a sample, in the order of the sample table; offset, size and crc32c are null for a refused one
        ("unit", pa.int32()),
        ("object", pa.dictionary(pa.int32(), pa.string())),
        ("etag", pa.dictionary(pa.int32(), pa.string())),
        ("offset", pa.int64()),
        ("size", pa.int64()),
        ("crc32c", pa.uint32()),
    ]
)


@dataclass(frozen=True)
class Location:
    """Where a sample's payload lies: `size` bytes from `offset` of an object, and their CRC32C."""

    object: str
    etag: str
    offset: int
    size: int
    crc32c: int


@dataclass(frozen=True)
class Committed:
    """How the commit of a unit ended: the record that stands, and whether it is of our attempt."""

    record: ShardRecord
    ours: bool


@dataclass
class ShardIndex:
    """Where the samples of the loaded units lie. Arrays have one entry a row of the sample table."""

    unit: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]  # bytes of the payload, 0 where refused or not loaded
    crc32c: NDArray[np.uint32]
    state: NDArray[np.uint8]  # ABSENT, STORED or REFUSED
    objects: dict[int, tuple[str, str]] = field(default_factory=dict)  # unit → (key of its shard, etag)

    @classmethod
    def empty(cls, units_of_rows: NDArray[np.int32]) -> ShardIndex:
        """An index that knows no sample yet; units_of_rows [n]: the sample table's column `unit`."""
        rows = len(units_of_rows)
        return cls(
            unit=units_of_rows,
            offset=np.zeros(rows, np.int64),
            size=np.zeros(rows, np.int64),
            crc32c=np.zeros(rows, np.uint32),
            state=np.zeros(rows, np.uint8),
        )

    def locate(self, row: int) -> Location | None:
        """Where the sample of this row of the sample table lies; None when it was refused.

        UserError when its unit was not loaded.
        """
        state, unit = self.state[row], int(self.unit[row])
        if state == REFUSED:
            return None
        if state == ABSENT:
            raise UserError(
                f"row {row} of the sample table is in unit {unit}, whose shard is not committed yet"
            )
        object_key, etag = self.objects[unit]
        return Location(object_key, etag, int(self.offset[row]), int(self.size[row]), int(self.crc32c[row]))

    def rows(self, unit: int) -> slice:
        """The rows of a unit in the sample table."""
        start, stop = np.searchsorted(self.unit, [unit, unit + 1])
        return slice(int(start), int(stop))


# --- records


def committed_units(store: Store) -> set[int]:
    """The units whose shard is committed: one listing."""
    return {
        unit
        for unit in (layout.unit_of_record(info.key) for info in store.list(layout.INDEX))
        if unit is not None
    }


def read_record(store: Store, unit: int) -> ShardRecord:
    """The commit record of a unit. NotFound when it is not committed; UserError when it is another unit's."""
    key = layout.record(unit)
    body, _ = store.get(key)
    record = ShardRecord.from_bytes(body, f"{store.url}/{key}")
    if record.unit != unit or not record.object.startswith(layout.SHARDS):
        raise UserError(
            f"{store.url}/{key} is the record of unit {record.unit} and object {record.object!r}: "
            f"it was copied or renamed. {REMAKE}"
        )
    return record


def commit(store: Store, record: ShardRecord) -> Committed:
    """Put the commit record of a whole shard; the first record of a unit stands.

    When another attempt was first, our object is deleted, but only once that attempt's record has been read.
    Raises UserError when it cannot be known whose record stands: the object then stays.
    """
    key = layout.record(record.unit)
    try:
        try:
            store.put(key, record.to_bytes(), if_none_match=True)
            return Committed(record, ours=True)
        except PreconditionFailed:
            standing = read_record(store, record.unit)
    except UserError as error:
        raise UserError(
            f"{store.url}/{record.object} is whole, but whether it was committed is not known: {error}. "
            "Nothing was deleted: run extract.py again, it makes the unit anew if it is not committed"
        ) from error
    if standing.object == record.object:
        return Committed(standing, ours=True)
    if standing.run != record.run:
        raise UserError(
            f"{store.url}/{key} is the record of another run ({standing.run[:12]}, not {record.run[:12]}): "
            f"use another store.url. {record.object} was left as it is"
        )
    try:
        store.delete([record.object])
    except UserError as error:  # the unit is committed all the same
        log.warning(
            "%s/%s was left behind; it is no part of the run and may be deleted: %s",
            store.url,
            record.object,
            error,
        )
    return Committed(standing, ours=False)


# --- loading


def load_index(store: Store, run: Run, units: Iterable[int], *, threads: int = 16) -> ShardIndex:
    """Where the samples of `units` lie: from blocks where there are any, else from the records, in parallel.

    Every record is compared with the sample table (keys in order, token counts) and with the run's fingerprint.
    UserError, naming unit and record, when one is missing or differs.
    """
    wanted = sorted(set(units))
    etags, blocks = _list_index(store)
    missing = [unit for unit in wanted if unit not in etags]
    if missing:
        raise UserError(
            f"{store.url}: {len(missing)} of {len(wanted)} units are not committed, first unit {missing[0]}: "
            "run extract.py until all are"
        )
    index = ShardIndex.empty(run.samples.unit)
    by_record: list[int] = []
    by_block: list[str] = []
    for block in sorted({unit // BLOCK_UNITS for unit in wanted}):
        members = [unit for unit in wanted if unit // BLOCK_UNITS == block]
        name = _block_key(run, block, etags)
        if name in blocks and len(members) > 1:
            by_block.append(name)
        else:
            by_record += members
    with ThreadPoolExecutor(threads, thread_name_prefix="index") as pool:
        futures = [pool.submit(_load_block, store, run, index, key) for key in by_block]
        futures += [pool.submit(_load_record, store, run, index, unit) for unit in by_record]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    surplus = set(index.objects) - set(wanted)  # of blocks that hold more than was asked for
    if surplus:
        index.state[np.isin(index.unit, sorted(surplus))] = ABSENT
        for unit in surplus:
            del index.objects[unit]
    return index


def _list_index(store: Store) -> tuple[dict[int, str], set[str]]:
    """(etag of each unit's record, keys of the blocks): one listing."""
    etags, blocks = {}, set()
    for info in store.list(layout.INDEX):
        unit = layout.unit_of_record(info.key)
        if unit is not None:
            etags[unit] = info.etag
        elif info.key.startswith(layout.BLOCKS):
            blocks.add(info.key)
    return etags, blocks


def _load_record(store: Store, run: Run, index: ShardIndex, unit: int) -> None:
    """Enter the samples of one unit; its rows are touched by no other thread."""
    where = f"{store.url}/{layout.record(unit)}"
    record = read_record(store, unit)
    _check_fingerprint(record.run, run, where)
    check_layout(record, where)
    rows = index.rows(unit)
    stored = _match(record, run.samples.key[rows], where)
    tokens = run.samples.tokens[rows][stored]
    if not np.array_equal(tokens, [sample.tokens for sample in record.samples]):
        raise UserError(f"{where}: token counts differ from the sample table. {REMAKE}")
    state = np.full(rows.stop - rows.start, REFUSED, np.uint8)
    state[stored] = STORED
    index.state[rows] = state
    index.offset[rows][stored] = [sample.offset for sample in record.samples]
    index.size[rows][stored] = [sample.size for sample in record.samples]
    index.crc32c[rows][stored] = [sample.crc32c for sample in record.samples]
    index.objects[unit] = (record.object, record.etag)


def _match(record: ShardRecord, keys: Sequence[str], where: str) -> NDArray[np.int64]:
    """The places of the stored samples among `keys`, the sample table's keys of the unit.

    UserError unless stored and refused samples together are those keys, each kind in the table's order.
    """
    places = {key: place for place, key in enumerate(keys)}
    stored = [places.get(sample.key, -1) for sample in record.samples]
    refused = [places.get(refusal.key, -1) for refusal in record.refused]
    both = sorted(stored + refused)
    if both != list(range(len(keys))) or stored != sorted(stored) or refused != sorted(refused):
        named = {sample.key for sample in record.samples} | {refusal.key for refusal in record.refused}
        lacking, alien = [key for key in keys if key not in named], sorted(named - set(keys))
        what = "has them out of order"
        if lacking:
            what = f"lacks {lacking[0]}"
        elif alien:
            what = f"has {alien[0]}, which is not one of them"
        raise UserError(
            f"{where}: the sample table has {len(keys)} samples for unit {record.unit}, the record has "
            f"{len(record.samples)} and {len(record.refused)} refused; it {what}. {REMAKE}"
        )
    return np.asarray(stored, np.int64)


def _check_fingerprint(recorded: str, run: Run, where: str) -> None:
    if recorded != run.identity.fingerprint:
        raise UserError(
            f"{where} belongs to another run: it names fingerprint {recorded[:12]}, {layout.RUN} has "
            f"{run.identity.fingerprint[:12]}. Use the store.url of that run, or extract this one elsewhere"
        )


# --- blocks


def build_blocks(store: Store, run: Run, *, threads: int = 16) -> list[str]:
    """Build every block whose units are all committed and that is not there yet; the keys of those built."""
    etags, blocks = _list_index(store)
    built = []
    for block in range(-(-run.identity.units // BLOCK_UNITS)):
        key = _block_key(run, block, etags)
        if key is not None and key not in blocks:
            built.append(build_block(store, run, block, threads=threads))
    return built


def build_block(store: Store, run: Run, block: int, *, threads: int = 16) -> str:
    """Gather the records of a block's units in one object; its key. UserError unless all are committed.

    Needs no lock: whoever builds from the same records writes the same table under the same key.
    """
    units = _block_units(run, block)
    etags, blocks = _list_index(store)
    key = _block_key(run, block, etags)
    if key is None:
        missing = [unit for unit in units if unit not in etags]
        raise UserError(f"{store.url}: index block {block} needs unit {missing[0]}, which is not committed yet")
    if key in blocks:
        return key
    index = load_index(store, run, units, threads=threads)
    rows = slice(index.rows(units[0]).start, index.rows(units[-1]).stop)
    refused = index.state[rows] == REFUSED
    places = index.unit[rows] - units[0]
    objects, shard_etags = zip(*(index.objects[unit] for unit in units), strict=True)
    table = pa.Table.from_arrays(
        [
            pa.array(index.unit[rows]),
            pa.DictionaryArray.from_arrays(pa.array(places), pa.array(objects)),
            pa.DictionaryArray.from_arrays(pa.array(places), pa.array(shard_etags)),
            pa.array(index.offset[rows], mask=refused),
            pa.array(index.size[rows], mask=refused),
            pa.array(index.crc32c[rows], mask=refused),
        ],
        schema=_BLOCK_SCHEMA.with_metadata({"run": run.identity.fingerprint}),
    )
    body = io.BytesIO()
    pq.write_table(table, body, compression="zstd", write_page_checksum=True)
    with suppress(PreconditionFailed):  # another builder put the same table
        store.put(key, body.getvalue(), if_none_match=True)
    return key


def _load_block(store: Store, run: Run, index: ShardIndex, key: str) -> None:
    """Enter the samples of a block's units; their rows are touched by no other thread."""
    where = f"{store.url}/{key}"
    try:
        body, _ = store.get(key)
        table = pq.read_table(io.BytesIO(body), page_checksum_verification=True)
        unit = table.column("unit").to_numpy()
        recorded = (table.schema.metadata or {}).get(b"run", b"").decode()
        columns = {name: table.column(name).fill_null(0).to_numpy() for name in ("offset", "size", "crc32c")}
        refused = table.column("size").is_null().to_numpy()
        first = np.flatnonzero(np.diff(unit, prepend=-1))
        objects = table.column("object").take(first).to_pylist()
        etags = table.column("etag").take(first).to_pylist()
    except (pa.ArrowException, KeyError, OSError) as error:
        raise UserError(
            f"{where} cannot be read: {error}. Delete it: the records stand for themselves"
        ) from None
    _check_fingerprint(recorded, run, where)
    rows = slice(index.rows(int(unit[0])).start, index.rows(int(unit[-1])).stop)
    if not np.array_equal(unit, index.unit[rows]):
        raise UserError(f"{where} does not fit the sample table. Delete it: the records stand for themselves")
    index.offset[rows] = columns["offset"]
    index.size[rows] = columns["size"]
    index.crc32c[rows] = columns["crc32c"]
    index.state[rows] = np.where(refused, REFUSED, STORED)
    index.objects |= {
        int(u): pair for u, pair in zip(unit[first], zip(objects, etags, strict=True), strict=True)
    }


def _block_units(run: Run, block: int) -> range:
    return range(block * BLOCK_UNITS, min((block + 1) * BLOCK_UNITS, run.identity.units))


def _block_key(run: Run, block: int, etags: dict[int, str]) -> str | None:
    """The key of the block made from these records; None while one of them is missing."""
    units = _block_units(run, block)
    if not units or any(unit not in etags for unit in units):
        return None
    text = "\n".join(f"{layout.record(unit)} {etags[unit]}" for unit in units)
    return layout.block(block, hashlib.sha256(text.encode()).hexdigest()[:16])
