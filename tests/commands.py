"""Commands that tests start as a user would, each in a process group of its own so that it can be killed whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    """A command from the repository root, stdout and stderr together in one pipe."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], *, timeout_s: float = 300) -> str:
    """Wait until it has ended well; its output."""
    output, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, output[-6000:]
    return output
