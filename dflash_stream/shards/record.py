"""What a shard says of itself: the content of its `__index__` member and of its commit record.

The record exists (as index/shard-NNNNNN.json) if, and only if, the shard is whole and belongs to the run. Both
are the same JSON; only the record also knows the object's size and etag, not known while the shard is written.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_stream.errors import UserError

RECORD_VERSION = 1


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
            raise UserError(f"{where} is not a shard record: {error}") from None
        if record.version != RECORD_VERSION:
            raise UserError(
                f"{where} has record version {record.version}, this dflash-stream reads {RECORD_VERSION}"
            )
        return record
