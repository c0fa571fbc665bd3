"""The format of a run's shards: what a sample is, how it is stored, who writes it, and where it is found again.

`webdataset` is not imported here: only pipelines that use it need it.
"""

from dflash_stream.shards.codec import decode, encode, raw_payload_bytes, require
from dflash_stream.shards.index import (
    Committed,
    Location,
    ShardIndex,
    build_block,
    build_blocks,
    commit,
    committed_units,
    load_index,
    read_record,
)
from dflash_stream.shards.record import Refusal, SampleEntry, ShardRecord, read_index_member
from dflash_stream.shards.tensors import SampleError
from dflash_stream.shards.writer import ShardWriter

__all__ = [
    "Committed",
    "Location",
    "Refusal",
    "SampleEntry",
    "SampleError",
    "ShardIndex",
    "ShardRecord",
    "ShardWriter",
    "build_block",
    "build_blocks",
    "commit",
    "committed_units",
    "decode",
    "encode",
    "load_index",
    "raw_payload_bytes",
    "read_index_member",
    "read_record",
    "require",
]
