"""What a shard says of itself: the content of its `__index__` member and of its commit record.

The record exists (as index/shard-NNNNNN.json) if, and only if, the shard is whole and belongs to the run. Both
are the same JSON; only the record also knows the object's size and etag, not known while the shard is written.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_stream.errors import UserError
from dflash_stream.shards import tar
from dflash_stream.store import Store

RECORD_VERSION = 1
REMAKE = "To have a shard made anew, delete its record (index/shard-UNIT.json) and run extract.py again"
INDEX_MEMBER = "__index__"  # webdataset skips names like this one
MAX_TAIL_BYTES = 256 << 20  # in which an index is looked for: some 2.5 million samples


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SampleEntry(_Frozen):
    """One sample in a shard: where its safetensors payload lies, and how to know that it is whole."""

    key: str
    offset: int  # of the payload's first byte in the object
    size: int  # of the payload, bytes
    crc32c: int
    tokens: int


class Refusal(_Frozen):
    """A sample that could not be stored, and why. It keeps its place in the training order, at weight zero."""

    key: str
    reason: str


class ShardRecord(_Frozen):
    """A shard's index. `object`, `size` and `etag` are empty in the copy inside the shard."""

    version: int = RECORD_VERSION
    run: str  # fingerprint of run.json
    unit: int
    attempt: str  # token of the writer, part of the object's key
    samples: list[SampleEntry]
    refused: list[Refusal] = []
    made_with: dict[str, Any] = {}  # software, device, batch budget: what the bits of the states depend on
    object: str = ""  # key of the shard
    size: int = 0  # bytes
    etag: str = ""

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, body: bytes, where: str) -> ShardRecord:
        """Raises UserError naming `where` for anything that is not a record of this version."""
        try:
            record = cls.model_validate_json(body)
        except ValidationError as error:
            what = error.errors()[0]
            at = f" at {'.'.join(map(str, what['loc']))}" if what["loc"] else ""
            raise UserError(f"{where} is not a shard record: {what['msg']}{at}. {REMAKE}") from None
        if record.version != RECORD_VERSION:
            raise UserError(
                f"{where} has record version {record.version}, this dflash-stream reads {RECORD_VERSION}"
            )
        return record


def read_index_member(store: Store, object_key: str, size: int) -> ShardRecord:
    """What a shard of `size` bytes says of itself, read from its tail; object, size and etag are empty in it.

    Raises UserError when the object is no whole shard.
    """
    where = f"{store.url}/{object_key}"
    found, tail, tail_bytes = None, b"", 0
    while found is None:
        given_up = tail_bytes == size or tail_bytes >= MAX_TAIL_BYTES
        if given_up or size % tar.BLOCK_BYTES or not tail.endswith(tar.END[:tail_bytes]):
            raise UserError(f"{where} does not end with an {INDEX_MEMBER} member: it is no whole shard")
        tail_bytes = min(size, max(8 * tail_bytes, 1 << 16))
        tail = store.get_range(object_key, size - tail_bytes, tail_bytes)
        found = tar.find_last(tail, INDEX_MEMBER)
    start, length = found
    record = ShardRecord.from_bytes(tail[start : start + length], f"{INDEX_MEMBER} of {where}")
    check_layout(record, where)
    members = [sample.size for sample in record.samples] + [length]
    if sum(map(tar.member_bytes, members)) + len(tar.END) != size:
        raise UserError(
            f"{where}: its {INDEX_MEMBER} member does not account for its {size:,} bytes: it is damaged"
        )
    return record


def check_layout(record: ShardRecord, where: str) -> None:
    """UserError unless the samples of a record lie one after another in its object, as the writer lays them."""
    reached = 0
    for sample in record.samples:
        if sample.offset != reached + tar.BLOCK_BYTES or sample.size <= 0:
            raise UserError(
                f"{where}: sample {sample.key} is said to begin at byte {sample.offset:,}, "
                f"expected {reached + tar.BLOCK_BYTES:,}: the record is damaged. {REMAKE}"
            )
        reached += tar.member_bytes(sample.size)
    if record.size and reached > record.size:
        raise UserError(
            f"{where}: its samples have {reached:,} bytes, the object {record.size:,}: the record is damaged. {REMAKE}"
        )
