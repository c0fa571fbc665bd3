"""CRC32C, the checksum of every part, sample and record: hardware speed, from awscrt."""

from __future__ import annotations

import base64

from awscrt import checksums


def crc32c(data: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """CRC32C (Castagnoli) of contiguous `data`; `previous` continues from the checksum of what came before."""
    return checksums.crc32c(data, previous)


def crc32c_header(value: int) -> str:
    """A CRC32C as S3 wants it in x-amz-checksum-crc32c: base64 of four big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()
