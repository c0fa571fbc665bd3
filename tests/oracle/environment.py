"""The published DFlash code (package `dflash` on PyPI, MIT) as an oracle: what a drafter must compute.

It pins another transformers than this project uses, so it runs in a process of its own, where a directory with
its packages (requirements.txt here; 130 MB, made once under .cache/) precedes those of this environment. torch,
numpy and safetensors are shared. Tensors go in and out as files: `reference.py` is what runs over there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache"


def ensure() -> Path:
    """The directory with the oracle's packages, made when it is not there yet; whole or absent."""
    requirements = HERE / "requirements.txt"
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    packages = CACHE / f"oracle-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]}-{version}"
    if not packages.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            made = Path(scratch) / "packages"
            command = [
                sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                "--only-binary=:all:", "--target", str(made), "--requirement", str(requirements),
            ]  # fmt: skip
            # A constraint on this environment's own transformers would forbid the other one.
            environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
            subprocess.run(command, check=True, env=environment, timeout=600)
            try:
                made.rename(packages)
            except OSError:  # another test process was faster
                if not packages.exists():
                    raise
    return packages


def ask(question: str, directory: Path) -> None:
    """Run `reference.py QUESTION DIRECTORY` beside the oracle's packages; AssertionError when it fails."""
    environment = os.environ | {"PYTHONPATH": str(ensure()), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "reference.py"), question, str(directory)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"the oracle failed on {question}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
