"""What the tests share: one real S3 server, prefixes in it, small real and tiny random targets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.s3_server import S3Server
from launch.smollm2 import ensure

ROOT = Path(__file__).resolve().parent.parent
for _name, _value in {
    "OMP_WAIT_POLICY": "passive",  # on shared cores spinning threads halve the speed of everyone
    "GOMP_SPINCOUNT": "0",
    "HF_HUB_OFFLINE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A SeaweedFS server on loopback for the whole test session; its credentials are in os.environ meanwhile."""
    with S3Server() as server:
        before = {name: os.environ.get(name) for name in server.environment}
        os.environ.update(server.environment)
        yield server
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@pytest.fixture
def s3_url(s3_server: S3Server, request: pytest.FixtureRequest) -> str:
    """An address of this test's own: s3://bucket/prefix."""
    safe = "".join(c if c.isalnum() else "-" for c in request.node.nodeid)[-80:]
    return f"s3://{s3_server.bucket}/{safe}-{os.urandom(3).hex()}"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a model directory, converted once and kept in .cache/."""
    return ensure(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")


@pytest.fixture
def run_command(s3_server: S3Server) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command line from the repository root with this environment's scripts on PATH, against the S3 server."""

    def run(
        *command: str, check: bool = True, timeout: float = 300, **env: str
    ) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(
                f"{' '.join(command)} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
            )
        return done

    return run
