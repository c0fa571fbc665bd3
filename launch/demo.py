"""The whole pipeline on a small real model and real chats: prepare → extract → train → eval → export.

`make demo` runs it. It starts a local S3 server, runs the commands a user would type, each as a process of its
own, and ends with a table of what came out. Everything it started is gone when it ends, also after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from launch.s3_server import S3Server
from launch.smollm2 import ensure

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
CONFIG = "configs/smollm2-135m.yaml"
NAME = "demo"


class Commands:
    """Runs command lines one after another; `stop` ends the one that runs, with all that it started."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._running: subprocess.Popen[bytes] | None = None

    def run(self, *command: str) -> float:
        """Run to the end and return the seconds it took; SystemExit when it fails."""
        print(f"\n$ {' '.join(command)}", flush=True)
        begun = time.monotonic()
        self._running = subprocess.Popen(command, cwd=ROOT, env=self._environment, start_new_session=True)
        status = self._running.wait()
        self._running = None
        if status:
            raise SystemExit(f"the demo stops: this command exited with {status}")
        return time.monotonic() - begun

    def stop(self) -> None:
        """SIGTERM to the process group, SIGKILL to what is left of it after 30 s."""
        if self._running is None:
            return
        group = self._running.pid
        for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                return
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                self._running.poll()
                try:
                    os.killpg(group, 0)
                except ProcessLookupError:
                    return
                time.sleep(0.1)


def read_json(client: Any, bucket: str, key: str) -> Any:
    """A JSON object of the demo's run."""
    return json.loads(client.get_object(Bucket=bucket, Key=f"{NAME}/{key}")["Body"].read())


def summaries(client: Any, bucket: str, phase: str) -> list[dict[str, Any]]:
    """What each process of a phase left in its heartbeat."""
    found = client.list_objects_v2(Bucket=bucket, Prefix=f"{NAME}/status/{phase}-").get("Contents", [])
    return [json.loads(client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()) for entry in found]


def report(server: S3Server, export: Path, seconds: float) -> None:
    """The closing table, from what the run left in the store."""
    client = server.client()
    run = read_json(client, server.bucket, "run.json")
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=server.bucket, Prefix=f"{NAME}/shards/")
    sizes = [entry["Size"] for page in pages for entry in page.get("Contents", [])]
    (extracted,) = summaries(client, server.bucket, "extract")
    (trained,) = summaries(client, server.bucket, "train")
    evaluated = read_json(client, server.bucket, f"drafters/{NAME}/eval.json")
    table = Table(title="dflash-stream demo: SmolLM2-135M-Instruct", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    training = trained["summary"]
    for name, value in (
        ("samples", f"{run['samples']:,} ({run['validation']['samples']} held out)"),
        ("tokens", f"{run['tokens']:,}"),
        ("shards", f"{len(sizes):,}"),
        ("bytes in shards", f"{sum(sizes):,}"),
        ("extraction", f"{extracted['summary']['tokens_per_s']:,.0f} tokens/s"),
        ("training", f"{training['tokens_per_s']:,.0f} tokens/s, {training['steps']:,} steps"),
        ("loss, first → last", f"{training['first_loss']:.3f} → {training['last_loss']:.3f}"),
        ("acceptance length, untrained", interval(evaluated["untrained"])),
        ("acceptance length, trained", interval(evaluated["trained"])),
        ("export", relative(export)),
        ("wandb, extraction", tracked(extracted["wandb"])),
        ("wandb, training", tracked(trained["wandb"])),
        ("all in all", f"{seconds / 60:.1f} minutes"),
    ):
        table.add_row(name, value)
    Console().print("\n", table)


def interval(measured: dict[str, Any]) -> str:
    low, high = measured["interval"]
    return f"{measured['acceptance_length']:.3f} (95 % interval {low:.3f} … {high:.3f})"


def relative(path: Path) -> str:
    """As a user would type it in the root of the repository."""
    return os.path.relpath(path, ROOT)


def tracked(where: str) -> str:
    """Where a wandb run is: the directory of an offline one, else its URL."""
    return relative(Path(where)) if where.startswith("/") else where


def pipeline(server: S3Server, commands: Commands) -> None:
    """From chats to an export, and the table of what came out."""
    begun = time.monotonic()
    export = WORK / "export"
    url = f"s3://{server.bucket}/{NAME}"
    common = ("--config", CONFIG, "--store.url", url, "--tracking.directory", relative(WORK))
    launch = ("accelerate", "launch", "--config_file", "launch/accelerate/one.yaml")
    commands.run("dflash-stream", "prepare", *common)
    commands.run(*launch, "extract.py", *common)
    commands.run(*launch, "train_drafter.py", *common)
    commands.run("dflash-stream", "eval", *common)
    commands.run("dflash-stream", "export", *common, "--output", relative(export))
    report(server, export, time.monotonic() - begun)


def interrupted(number: int, frame: FrameType | None) -> None:
    """Signal handler: unwind, which stops all that was started."""
    print("\ninterrupted: stopping what was started", flush=True)
    sys.exit(128 + number)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # by hand: a shell's background job would ignore SIGINT
        signal.signal(number, interrupted)
    ensure(ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    beside = Path(sys.executable).parent  # the scripts of this environment come first
    with S3Server(WORK / "s3") as server:
        environment = {
            **os.environ,
            **server.environment,
            "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        }
        commands = Commands(environment)
        try:
            pipeline(server, commands)
        finally:
            commands.stop()
    shutil.rmtree(WORK / "s3", ignore_errors=True)


if __name__ == "__main__":
    main()
