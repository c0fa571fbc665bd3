"""The container is plain USTAR: what stock tools read, and what it cannot hold is said."""

from __future__ import annotations

import io
import tarfile

import pytest

from dflash_stream.errors import UserError
from dflash_stream.shards import tar


def archive(*members: tuple[str, bytes]) -> bytes:
    return (
        b"".join(tar.header(name, len(body)) + body + tar.padding(len(body)) for name, body in members)
        + tar.END
    )


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 8**11 - 1])
def test_stock_tarfile_takes_the_header_for_its_own(size: int) -> None:
    block = tar.header("00000012-0a0b0c0d.safetensors", size)
    info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    assert (info.name, info.size, info.mtime, info.uid, info.gid, info.mode) == (
        "00000012-0a0b0c0d.safetensors", size, 0, 0, 0, 0o644,
    )  # fmt: skip
    assert info.isreg()
    assert not info.pax_headers
    assert tar.member_bytes(size) == 512 + size + len(tar.padding(size))


def test_stock_tarfile_reads_members_and_end() -> None:
    members = [("a.x", b"1" * 700), ("b" * 98 + ".x", b""), ("__index__", b"{}")]
    with tarfile.open(fileobj=io.BytesIO(archive(*members)), mode="r:") as found:
        read = [(info.name, found.extractfile(info).read()) for info in found]  # type: ignore[union-attr]
    assert read == members


@pytest.mark.parametrize(("name", "size"), [("a" * 101, 1), ("", 1), ("ä", 1), ("a", 8**11), ("a", -1)])
def test_what_ustar_cannot_hold_is_refused(name: str, size: int) -> None:
    with pytest.raises(UserError, match="tar member"):
        tar.header(name, size)


def test_the_last_member_is_found_from_the_tail_alone() -> None:
    body = b'{"samples":[]}' * 100
    whole = archive(("a.x", tar.header("__index__", 3) * 2), ("__index__", body))
    for tail in (whole, whole[-(len(tar.END) + tar.member_bytes(len(body))) :]):
        found = tar.find_last(tail, "__index__")
        assert found is not None
        assert tail[found[0] : found[0] + found[1]] == body
    assert tar.find_last(whole[-len(tar.END) - 512 :], "__index__") is None, "its header is not in this tail"
    assert tar.find_last(whole[:-512], "__index__") is None, "cut"
    assert tar.find_last(whole[: -len(tar.END)] + archive(("b.x", b"")), "__index__") is None, (
        "not the last member"
    )
