"""Reads datasets from files: JSONL (plain or gzip) and Parquet, a bounded chunk of rows at a time.

A chunk travels to a worker as raw lines or as a table slice; only the worker decodes it. Row numbers count from
0 in each file, blank lines of JSONL included, so that row + 1 is the line.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_stream.errors import UserError
from dflash_stream.prepare.chats import COLUMNS, BadRow

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 512
_TOKEN_COLUMNS = ("input_ids", "loss_mask")


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file, as lines of JSON or a slice of a table.

    source: number of the file among the inputs; name: its base name; first_row: counted from 0
    """

    source: int
    name: str
    first_row: int
    rows: list[bytes] | pa.RecordBatch


def find_files(patterns: list[str], setting: str) -> list[Path]:
    """The files that the patterns name, each once, sorted within a pattern. UserError for a pattern without a file."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()  # a name may have brackets in it and still be a name
        matches = [str(path)] if path.exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
        files = [Path(match) for match in matches if Path(match).is_file()]
        if not files:
            hint = (
                "is a directory: name its files, as in " + pattern.rstrip("/") + "/*.jsonl"
                if matches
                else "matches no file"
            )
            raise UserError(f"{setting}: {pattern} {hint}")
        found |= dict.fromkeys(files)
    return list(found)


def read_chunks(path: Path, source: int) -> Iterator[Chunk]:
    """The rows of a file in chunks of at most 512 rows and, but for a single longer row, about 1 MiB of JSON."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"PAR1":
            yield from _parquet_chunks(path, source)
        else:
            yield from _jsonl_chunks(path, source, compressed=magic[:2] == b"\x1f\x8b")
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _jsonl_chunks(path: Path, source: int, compressed: bool) -> Iterator[Chunk]:
    lines: list[bytes] = []
    first = size = 0
    with gzip.open(path, "rb") if compressed else path.open("rb") as file:
        for line in file:
            if not first and not lines and line.lstrip()[:1] == b"[":
                raise UserError(
                    f"{path} holds one JSON array, not one JSON object a line: convert it with jq -c '.[]' "
                    f"{path.name} > {path.stem}.jsonl"
                )
            lines.append(line)
            size += len(line)
            if len(lines) >= CHUNK_ROWS or size >= CHUNK_BYTES:
                yield Chunk(source, path.name, first, lines)
                first += len(lines)
                lines, size = [], 0
    if lines:
        yield Chunk(source, path.name, first, lines)


def _parquet_chunks(path: Path, source: int) -> Iterator[Chunk]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        columns = [name for name in _TOKEN_COLUMNS if name in names]
        if columns and len(columns) < len(_TOKEN_COLUMNS):
            raise UserError(
                f"{path} has input_ids or loss_mask but not both; its columns are {', '.join(names)}"
            )
        columns = columns or [name for name in COLUMNS if name in names]
        if not {"input_ids", "messages", "conversations"} & set(columns):
            raise UserError(
                f"{path} has the columns {', '.join(names)}: expected messages, conversations, or input_ids "
                "and loss_mask"
            )
        first = 0
        for group in range(file.num_row_groups):  # over all groups at once, a reader keeps what it has read
            batches = file.iter_batches(CHUNK_ROWS, row_groups=[group], columns=columns, use_threads=False)
            for batch in batches:
                yield Chunk(source, path.name, first, batch)
                first += batch.num_rows


def decode(chunk: Chunk) -> list[tuple[int, Any]]:
    """The rows of a chunk as (row number, row); a row that cannot be read is a BadRow in its place."""
    if isinstance(chunk.rows, list):
        numbered = enumerate(chunk.rows, chunk.first_row)
        return [(number, _parse_line(line)) for number, line in numbered if line.strip()]
    if chunk.rows.schema.names[0] in _TOKEN_COLUMNS:
        columns = {name: chunk.rows.column(name) for name in _TOKEN_COLUMNS}
        return [
            (chunk.first_row + i, {name: _flat(column[i]) for name, column in columns.items()})
            for i in range(chunk.rows.num_rows)
        ]
    return [(chunk.first_row + i, without_nulls(row)) for i, row in enumerate(chunk.rows.to_pylist())]


def _flat(value: Any) -> Any:
    """A list cell of a table as a numpy array, without Python numbers in between."""
    if value.is_valid and isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        return value.values.to_numpy(zero_copy_only=False)
    return value.as_py()


def _parse_line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:  # its own text counts lines within this one
        return BadRow(f"not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return BadRow(f"not JSON: {error}")


def without_nulls(value: Any) -> Any:
    """A table gives every struct all fields that any row has; those that a row does not have are null, and go."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
