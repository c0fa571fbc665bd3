"""Files of a dataset: how they are named, and what happens when one is damaged."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from dflash_stream.config import MiB, PrepareSettings
from dflash_stream.errors import UserError
from dflash_stream.prepare import workers
from dflash_stream.prepare.inputs import find_files, read_chunks


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path: Path) -> None:
    for name in ("chats[v2].jsonl", "chatsv.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert find_files([str(tmp_path / "chats[v2].jsonl")], "x") == [tmp_path / "chats[v2].jsonl"]
    assert find_files([str(tmp_path / "chats[vw].jsonl")], "x") == [tmp_path / "chatsv.jsonl"]


def test_a_damaged_gzip_file_is_named_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"number": %d}\n' % (number**3) for number in range(200)))
    for place in range(12, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"cannot read .*chats\.jsonl\.gz"):
            list(read_chunks(path, 0))


def test_cores_are_left_idle_while_there_is_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "usable_cores", lambda: 12)
    assert workers.worker_count(PrepareSettings(), 1000 * MiB) == 12
    assert workers.worker_count(PrepareSettings(), 12 * MiB) == 3  # a process takes seconds to start
    assert workers.worker_count(PrepareSettings(), 0) == 1
    assert workers.worker_count(PrepareSettings(workers=5), 1000 * MiB) == 5
