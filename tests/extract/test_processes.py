"""Extraction by several processes under accelerate, killed and started again; and what goes to disk."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_stream import layout
from dflash_stream.run import Run
from dflash_stream.shards.index import committed_units, load_index, read_record
from tests.commands import ROOT, finish, start
from tests.tiny_runs import publish_at

TTL_S = 3.0


def launch(url: str, processes: int) -> subprocess.Popen[str]:
    """extract.py under accelerate."""
    several = ["--config_file", "launch/accelerate/cpu_2.yaml", "--num_processes", str(processes)]
    return start(
        "accelerate", "launch", *(several if processes > 1 else []), "extract.py",
        "--store.url", url, "--tracking.wandb", "false", "--extract.claim_ttl_s", str(TTL_S),
    )  # fmt: skip


def wait_for_units(run: Run, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 100
    while len(committed_units(run.store)) < count:
        assert process.poll() is None, process.communicate()[0][-5000:]
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.05)


def assert_whole(run: Run) -> None:
    """The keys in the shards are those of the sample table, each once and in its order."""
    keys = []
    for unit in range(run.identity.units):
        record = read_record(run.store, unit)
        assert run.store.head(record.object).size_bytes == record.size
        keys += [entry.key for entry in record.samples]
    assert keys == run.samples.key
    index = load_index(run.store, run, range(run.identity.units))
    assert all(index.locate(row) for row in range(len(run.samples)))


def test_killed_processes_lose_or_repeat_samples(tiny_llama: Path, s3_url: str) -> None:
    """Two are killed in the middle, one goes on and is killed too, two finish: 60 units, each made once."""
    run = publish_at(s3_url, tiny_llama, units=60, samples_per_unit=8, new_tokens=16)
    records: dict[str, str] = {}
    outputs = []
    for processes in (2, 1):
        process = launch(s3_url, processes)
        wait_for_units(run, process, len(records) + random.randint(4, 12))
        os.killpg(process.pid, signal.SIGKILL)
        outputs.append(process.communicate(timeout=30)[0])
        now = {info.key: info.etag for info in run.store.list(layout.INDEX)}
        assert records.items() <= now.items()
        records = now
    assert len(records) < 60, "nothing was left to do: kill earlier"
    outputs.append(finish(launch(s3_url, 2)))
    now = {info.key: info.etag for info in run.store.list(layout.INDEX)}
    assert records.items() <= now.items()
    assert_whole(run)
    for processes, output in zip((2, 1, 2), outputs, strict=True):
        for rank in range(processes):
            assert f"process {rank} of {processes} on cpu" in output
    made_last = [int(count) for count in re.findall(r"extracted: (\d+) shards", outputs[-1])]
    assert sum(made_last) == 60 - len(records)
    assert len(made_last) == 2
    # attempts whose object is whole but has no record are possible, objects that two records name are not
    named = [read_record(run.store, unit).object for unit in range(60)]
    assert len(set(named)) == 60
    assert set(named) <= {info.key for info in run.store.list(layout.SHARDS)}


def test_a_signal_to_the_launcher_leaves_claims(tiny_llama: Path, tmp_path: Path) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=300, samples_per_unit=16, lengths=(50, 100))
    process = launch(run.store.url, 2)
    wait_for_units(run, process, 3)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    # at least by one: the other may still have been starting
    assert re.search(r"process [01] of 2 on cpu", output), output[-3000:]
    assert "stopped by SIGTERM" in output
    assert list(run.store.list(layout.CLAIMS)) == []
    assert 3 <= len(committed_units(run.store)) < 300


def test_a_process_outlives_its_launcher(tiny_llama: Path, tmp_path: Path) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=300, samples_per_unit=16, lengths=(50, 100))
    process = launch(run.store.url, 1)
    wait_for_units(run, process, 3)
    process.kill()
    output = process.communicate(timeout=30)[0]  # ends when the process has closed its output
    assert "the process that started this one has died" in output
    assert "stopped by SIGTERM" in output
    assert len(committed_units(run.store)) < 300
    assert list(run.store.list(layout.CLAIMS)) == []


SMALL_BYTES = 16 << 10
WATCHED = """
import json, os, resource, sys
sys.path.insert(0, {root!r})
opened = []
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        path, mode, flags = args
        if (flags or 0) & (os.O_WRONLY | os.O_RDWR) or any(c in (mode or "") for c in "wax+"):
            opened.append(os.fsdecode(path))
    elif event in ("shutil.copyfile", "tempfile.mkstemp", "os.truncate", "os.link", "os.symlink"):
        opened.append(f"{{event}} {{args}}")
sys.addaudithook(hook)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from dflash_stream.config import build
from dflash_stream.extract import extract
store = {{"url": {url!r}, "part_bytes": 5 << 20, "pool_bytes": 10 << 20}}
summary = extract(build({{"store": store, "tracking": {{"wandb": False}}}}))
sys.stdout.write(json.dumps({{"shards": summary.shards, "bytes": summary.bytes, "opened": opened}}))
"""


def test_hidden_states_touch_a_local_file(
    tiny_llama: Path, s3_url: str, run_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Under a limit of 16 KiB a file, every path that is opened for writing is recorded: none but /dev/null.

    Started again, the finished run is left as it is, without loading the target.
    """
    run = publish_at(s3_url, tiny_llama, units=3, samples_per_unit=40, lengths=(100, 200))
    program = WATCHED.format(root=str(ROOT), limit=SMALL_BYTES, url=s3_url)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["shards"] == 3
    assert told["bytes"] > 100 * SMALL_BYTES
    assert [path for path in told["opened"] if path != os.devnull] == []
    assert_whole(run)
    again = run_command(sys.executable, "extract.py", "--store.url", s3_url, "--tracking.wandb", "false")
    assert "all 3 units are extracted: nothing to do" in again.stderr
    assert "loaded" not in again.stderr


def test_the_limit_of_the_test_above_limits_nothing(tmp_path: Path) -> None:
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({SMALL_BYTES},) * 2)"
    program = f"{limit}; open('f', 'wb').write(bytes(99999))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=30, check=False
    )
    assert done.returncode != 0


def test_mistakes_are_tracebacks(
    run_command: Callable[..., subprocess.CompletedProcess[str]], s3_url: str
) -> None:
    for arguments, message in (
        (["--store.url", s3_url], "error: no run at s3://"),
        (["--store.ulr", s3_url], "did you mean store.url?"),
        (["--extract.tokens_per_batch", "-3"], "extract.tokens_per_batch"),
    ):
        done = run_command(sys.executable, "extract.py", *arguments, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
