"""The demo leaves nothing behind when it is interrupted. (CI runs the whole demo with `make demo`.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def processes_with(marker: str) -> list[str]:
    """Command lines of the live processes whose environment holds `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # ended meanwhile, or not ours to read
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(smollm2: Path, number: signal.Signals) -> None:
    marker = f"DEMO_TEST={os.urandom(8).hex()}"
    name, value = marker.split("=")
    demo = subprocess.Popen(
        [sys.executable, "-m", "launch.demo"],
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("$ accelerate launch") and "extract.py" in line:
                break
        else:
            pytest.fail("the demo ended before it came to the extraction")
        time.sleep(8)  # into the extraction: the launcher and its rank are up
        assert any("extract.py" in command for command in processes_with(marker))
        demo.send_signal(number)
        demo.communicate(timeout=90)
        assert demo.returncode == 128 + number
        assert processes_with(marker) == []
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
