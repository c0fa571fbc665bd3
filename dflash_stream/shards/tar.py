"""The container: USTAR members with fixed metadata, so that equal samples make equal bytes.

Only the layout is here, as pure functions; what goes into the members is `payload` and `codec`, and who writes
them is `writer`. Reading needs no tar parser: the index knows where every payload lies.
"""

from __future__ import annotations

from dflash_stream.errors import UserError

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
MAX_NAME_BYTES = 100  # a longer one needs a second header, which readers of plain USTAR do not know
MAX_MEMBER_BYTES = 8**11 - 1  # 11 octal digits: 8 GiB less one byte


def header(name: str, size: int) -> bytes:
    """The 512 bytes before a member of `size` bytes. UserError for a name or size that USTAR cannot hold.

    Mode 0644, owner and time 0, no names of owners: nothing of the machine that wrote it.
    """
    encoded = name.encode()
    if not name.isascii() or not 0 < len(encoded) <= MAX_NAME_BYTES:
        raise UserError(f"{name!r} cannot name a tar member: 1 to {MAX_NAME_BYTES} ASCII characters can")
    if not 0 <= size <= MAX_MEMBER_BYTES:
        raise UserError(
            f"{name} has {size:,} bytes and a tar member at most {MAX_MEMBER_BYTES:,} (8 GiB): "
            "lower prepare.max_tokens, or tap fewer layers"
        )
    block = bytearray(BLOCK_BYTES)
    block[0 : len(encoded)] = encoded
    block[100:108] = b"0000644\0"  # mode
    block[108:116] = block[116:124] = b"0000000\0"  # uid, gid
    block[124:136] = b"%011o\0" % size
    block[136:148] = b"00000000000\0"  # mtime
    block[148:156] = b" " * 8  # the checksum is taken over blanks in its own place
    block[156:157] = b"0"  # a regular file
    block[257:265] = b"ustar\x0000"
    block[329:337] = block[337:345] = b"0000000\0"  # device
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padding(size: int) -> bytes:
    """The zeros after a member of `size` bytes, up to the next block."""
    return bytes(-size % BLOCK_BYTES)


def member_bytes(size: int) -> int:
    """What a member of `size` bytes takes in all: header, body and padding."""
    return BLOCK_BYTES + size + -size % BLOCK_BYTES


def find_last(tail: bytes, name: str) -> tuple[int, int] | None:
    """Where the last member lies, if it is called `name`: (first byte of its body in `tail`, size).

    `tail` is the end of a whole archive, a multiple of 512 bytes long. None when its header is not within
    `tail`, or when the archive does not end as `END` says.
    """
    if len(tail) % BLOCK_BYTES or not tail.endswith(END):
        return None
    for start in range(len(tail) - len(END) - BLOCK_BYTES, -1, -BLOCK_BYTES):
        if not tail.startswith(name.encode() + b"\0", start):
            continue
        digits = tail[start + 124 : start + 135]
        if not digits.isdigit() or set(digits) & set(b"89"):
            continue
        size = int(digits, 8)
        if tail[start : start + BLOCK_BYTES] == header(name, size) and (
            start + member_bytes(size) + len(END) == len(tail)
        ):
            return start + BLOCK_BYTES, size
    return None
