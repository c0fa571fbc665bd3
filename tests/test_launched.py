"""What a process makes of its launcher: threads on the CPU. (Its death is tested where processes run.)"""

from __future__ import annotations

import pytest

from dflash_stream import launched


@pytest.mark.parametrize(
    ("given", "by_launcher", "processes", "threads"),
    [
        (None, False, None, 16),
        (None, True, 4, 4),
        ("1", True, 4, 4),
        ("1", False, None, 1),
        ("3", True, 4, 3),
        ("3", False, None, 3),
        (None, True, 32, 1),
    ],
)
def test_a_launchers_single_thread_is_taken_for_a_wish(
    given: str | None,
    by_launcher: bool,
    processes: int | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {
        "OMP_NUM_THREADS": given,
        "LOCAL_WORLD_SIZE": str(processes) if processes else None,
        "ACCELERATE_MIXED_PRECISION": "no" if by_launcher else None,
        "TORCHELASTIC_RUN_ID": None,
    }
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(launched, "usable_cores", lambda: 16)
    assert launched.cpu_threads() == threads
