"""The shuffle: samples go to temporary files by their place in an order, and come back sorted, a bucket at a time.

Memory is one bucket, about 64 MiB of tokens, and a write buffer, whatever the size of the dataset. Buckets
divide the range of a 64-bit hash, so the sorted buckets one after the other are the whole order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_stream.errors import UserError
from dflash_stream.prepare.samples import META, TOKEN_BYTES, Record, records

BUCKET_BYTES = 64 << 20
BUFFER_BYTES = 32 << 20


class Spill:
    """Samples in temporary files, sorted by `place`: a function META [n] → uint64 [n].

    Samples of equal places are sorted by order, file, row and turn.
    """

    def __init__(
        self, directory: Path, buckets: int, place: Callable[[NDArray[Any]], NDArray[np.uint64]]
    ) -> None:
        directory.mkdir()
        self._directory = directory
        self._place = place
        self._meta = [bytearray() for _ in range(buckets)]
        self._payload = [bytearray() for _ in range(buckets)]
        self._buffered = 0
        self.samples = 0

    def add(self, meta: NDArray[Any], payload: bytes | memoryview) -> None:
        """META [n] and the payloads of these samples one after the other."""
        payload = memoryview(payload)
        buckets = bucket_of(self._place(meta), len(self._meta))
        offset = 0
        for i, bucket in enumerate(buckets.tolist()):
            size = int(meta[i]["tokens"]) * TOKEN_BYTES
            self._meta[bucket] += meta[i].tobytes()
            self._payload[bucket] += payload[offset : offset + size]
            offset += size
        self.samples += len(meta)
        self._buffered += offset + meta.nbytes
        if self._buffered >= BUFFER_BYTES:
            self._flush()

    def add_record(self, record: Record) -> None:
        """One sample that came from another spill."""
        meta = np.array([record.meta], META)
        self.add(meta, record.input_ids.astype("<i4").tobytes() + record.loss_mask.tobytes())

    def __iter__(self) -> Iterator[Record]:
        """Every sample in order. A bucket's files are deleted once read: a spill is read once."""
        self._flush()
        for bucket in range(len(self._meta)):
            meta_path, payload_path = self._paths(bucket)
            if not meta_path.exists():
                continue
            meta = np.fromfile(meta_path, META)
            payload = payload_path.read_bytes()
            meta_path.unlink()
            payload_path.unlink()
            keys = (meta["turn"], meta["row"], meta["source"], meta["order"], self._place(meta))
            yield from records(meta, payload, np.lexsort(keys))

    def _paths(self, bucket: int) -> tuple[Path, Path]:
        return self._directory / f"{bucket:05d}.meta", self._directory / f"{bucket:05d}.tokens"

    def _flush(self) -> None:
        """Append the buffers to their files, opened for that moment: the number of open files stays 1."""
        try:
            for bucket in range(len(self._meta)):
                if self._meta[bucket]:
                    for path, buffer in zip(
                        self._paths(bucket), (self._meta[bucket], self._payload[bucket]), strict=True
                    ):
                        with path.open("ab") as file:
                            file.write(buffer)
                        buffer.clear()
        except OSError as error:
            raise UserError(
                f"cannot write temporary token files in {self._directory.parent}: {error}. They need about 5 "
                "bytes a token; set TMPDIR to a directory with more room"
            ) from None
        self._buffered = 0


def bucket_of(places: NDArray[np.uint64], buckets: int) -> NDArray[np.int64]:
    """The bucket of each place: equal shares of the 64-bit range, in rising order."""
    return ((places >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)).astype(np.int64)


def bucket_count(input_bytes: int) -> int:
    """Buckets for a dataset of that size on disk: a token takes 5 bytes here and rarely less than 2 in a file."""
    return min(65536, 1 + input_bytes * 5 // (2 * BUCKET_BYTES))
