"""How a command ends when it is asked to stop."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.commands import start

SLEEPER = """
import tempfile, time
from dflash_stream import entry

def command():
    with tempfile.TemporaryDirectory(dir={directory!r}):
        print("working", flush=True)
        time.sleep(60)

entry.run(command)
"""

RETRYING_HUB = """
import logging
from dflash_stream import entry

def command():
    import huggingface_hub
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s")

entry.run(command)
"""


def test_warnings_of_the_hub_appear_twice() -> None:
    process = start(sys.executable, "-c", RETRYING_HUB)
    output, _ = process.communicate(timeout=60)
    assert output.count("Retrying in 1s") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_leaves_temporary_files_or_a_traceback(tmp_path: Path, number: int) -> None:
    process = start(sys.executable, "-c", SLEEPER.format(directory=str(tmp_path)))
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    os.kill(process.pid, number)
    output, _ = process.communicate(timeout=20)
    assert output == f"stopped by {signal.Signals(number).name}\n"
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []
