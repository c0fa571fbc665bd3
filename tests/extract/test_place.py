"""Threads of a process on CPU: the cores shared out, unless a person has said otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_stream.extract.place import cpu_threads


@pytest.mark.parametrize(
    ("given", "launched", "threads"),
    [(None, True, 4), ("1", True, 4), ("1", False, 1), ("3", True, 3), ("3", False, 3), (None, False, 4)],
)
def test_a_launchers_single_thread_is_taken_for_a_wish(
    given: str | None, launched: bool, threads: int, monkeypatch: Any
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert cpu_threads(16, 4) == threads


def test_more_processes_than_cores_get_no_thread(monkeypatch: Any) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cpu_threads(2, 8) == 1
