"""Real groups of processes: the same training whatever their number, and an end that no rank waits for in vain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from dflash_stream import layout
from dflash_stream.store import Store, open_store
from tests.train.tiny_run import make_run, settings
from train import checkpoint
from train.checkpoint import MODEL

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sys.executable).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}
LAUNCH = [
    str(SCRIPTS / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
]  # fmt: skip
CUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow": {"tokens_per_batch": 1},
    "idle": {"batch_samples": 1, "max_steps": 12},
    "uneven": {"batch_samples": 3, "tokens_per_batch": 40, "max_steps": 8},
}


def plan(url: str, name: str, **changes: Any) -> dict[str, Any]:
    """Settings of a training, as train_ranks.py wants them."""
    beside = {key: changes.pop(key) for key in ("stop_at", "take_over_at") if key in changes}
    config = settings(url, train={"name": name, "epochs": 3.0, "lr": 1e-3} | changes)
    return json.loads(config.model_dump_json()) | beside


def run_ranks(launcher: list[str], directory: Path, plans: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """[rank][training] → what train_ranks.py wrote."""
    directory.mkdir()
    (directory / "plan.json").write_text(json.dumps(plans))
    command = [
        *launcher,
        str(ROOT / "tests/train/train_ranks.py"),
        str(directory / "plan.json"),
        str(directory),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank-*.json"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, dict[str, list[dict[str, Any]]]]:
    """Each training in one process, and in a group of two: the store, and training → results of its ranks."""
    directory = tmp_path_factory.mktemp("ranks")
    url = f"file://{directory}/run"
    make_run(url, train=24, refused={9})
    names = [*CUTS, "resumed"]
    alone = [plan(url, f"{name}-1", **change) for name, change in CUTS.items()]
    alone.append(plan(url, "resumed-2", stop_at=4))
    together = [plan(url, f"{name}-2", **change) for name, change in CUTS.items()]
    together.append(plan(url, "resumed-2"))
    ends = {
        "stopped": plan(url, "stopped", stop_at=3),
        "changed": plan(url, "plain-1", seed=5),
        "forgotten": plan(url, "forgotten", checkpoint_every_steps=2, take_over_at=3),
    }
    one = run_ranks([sys.executable], directory / "one", alone)
    two = run_ranks(LAUNCH, directory / "two", together + list(ends.values()))
    assert (len(one), len(two)) == (1, 2)
    assert {result["world"] for result in one[0]} == {1}
    assert {result["world"] for rank in two for result in rank} == {2}
    assert {result["backend"] for rank in two for result in rank} == {"gloo"}
    found = {f"{name}-1": [one[0][place]] for place, name in enumerate(names)}
    found |= {f"{name}-2": [rank[place] for rank in two] for place, name in enumerate(names)}
    found |= {name: [rank[len(names) + place] for rank in two] for place, name in enumerate(ends)}
    return open_store(settings(url).store), found


def weights(store: Store, name: str) -> dict[str, torch.Tensor]:
    record = checkpoint.newest_checkpoint(store, name)
    return load(store.get(record.prefix + MODEL)[0])


@pytest.mark.parametrize("name", [*CUTS, "resumed"])
def test_number_of_processes_changes_the_training(
    trained: tuple[Store, dict[str, list[dict[str, Any]]]], name: str
) -> None:
    """Up to the order of fp32 sums: losses to 1e-4, weights to 1e-4 of their size after all steps."""
    store, results = trained
    assert len(results[f"{name}-2"]) == 2
    whole = "plain" if name in ("resumed", "narrow") else name
    single = results[f"{whole}-1"][0]["logged"]
    for rank in results[f"{name}-2"]:
        for step, logged in rank["logged"].items():
            for figure in ("train/loss", "train/grad_norm", "train/agreement_length"):
                assert logged[figure] == pytest.approx(single[step][figure], rel=1e-4), (step, figure)
    assert results[f"{name}-2"][0]["logged"][max(single, key=int)].keys() == single[max(single, key=int)].keys()
    ours, theirs = weights(store, f"{name}-2"), weights(store, f"{whole}-1")
    for tensor in ours:
        torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=1e-4, atol=1e-4)


def test_every_rank_reads_everything(trained: tuple[Store, dict[str, list[dict[str, Any]]]]) -> None:
    _, results = trained
    alone = results["plain-1"][0]["samples_read"]
    shares = [result["samples_read"] for result in results["plain-2"]]
    assert sum(shares) == alone == 3 * 23
    assert min(shares) > alone / 3
    assert results["idle-2"][1]["samples_read"] == 0


def test_signal_to_one_rank_stops_only_that_one(trained: tuple[Store, dict[str, list[dict[str, Any]]]]) -> None:
    store, results = trained
    assert [max(map(int, rank["logged"])) for rank in results["stopped"]] == [4, 4]
    assert {rank["summary"]["stopped_by"] for rank in results["stopped"]} == {signal.SIGTERM}
    assert checkpoint.newest_checkpoint(store, "stopped").step == 4


def test_error_on_the_first_rank_leaves_the_others_waiting(
    trained: tuple[Store, dict[str, list[dict[str, Any]]]],
) -> None:
    _, results = trained
    assert all("train.seed: the checkpoint has 0" in rank["error"] for rank in results["changed"])
    assert "taken over by another trainer" in results["forgotten"][0]["error"]
    assert "rank 0 could not publish" in results["forgotten"][1]["error"]


SAYS_WORLD = """
import train_drafter
from dflash_stream import entry
from train import trainer

join = trainer.join

def said(**options):
    ranks = join(**options)
    print(f"rank {ranks.rank} of {ranks.world}", flush=True)
    return ranks

trainer.join = said
entry.run(train_drafter.main)
"""


def entry(
    url: str, tmp_path: Path, launcher: list[str], script: Path = ROOT / "train_drafter.py", **changes: Any
) -> subprocess.Popen[str]:
    """The daily command on a run."""
    config = tmp_path / "settings.yaml"
    config.write_text(settings(url, train=changes).model_dump_json())  # JSON is YAML
    return subprocess.Popen(
        [*launcher, str(script), "--config", str(config)],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def lines_until(process: subprocess.Popen[str], text: str) -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


def test_signal_loses_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    make_run(url, train=8)
    process = entry(url, tmp_path, [sys.executable], epochs=1e5)
    list(lines_until(process, "step 2/"))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as a launcher repeats what the terminal has sent
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    step = checkpoint.newest_checkpoint(open_store(settings(url).store), "drafter").step
    assert step >= 2
    assert f"step {step} of" in output.splitlines()[-1], output


def test_death_of_the_launcher_leaves_its_ranks_behind(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    make_run(url, train=8)
    single = [*LAUNCH[:2], "--num_processes", "1", "--num_machines", "1", *LAUNCH[7:]]
    process = entry(url, tmp_path, single, epochs=1e5)
    list(lines_until(process, "step 2/"))
    process.kill()
    assert process.stdout is not None
    process.stdout.read()  # until the last process that holds the pipe has ended
    process.wait()
    assert checkpoint.newest_checkpoint(open_store(settings(url).store), "drafter").step >= 2


def test_every_rank_repeats_the_same_message(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    make_run(url, train=8).store.delete([layout.record(1)])
    script = tmp_path / "says_world.py"
    script.write_text(SAYS_WORLD)
    process = entry(url, tmp_path, LAUNCH, script)
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "rank 0 of 2" in output
    assert "rank 1 of 2" in output
    assert output.count("not extracted yet") == 1, output


def test_launched_ranks_are_killed_before_they_save(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    make_run(url, train=8)
    process = entry(url, tmp_path, LAUNCH, epochs=1e5)
    before = list(lines_until(process, "step 2/"))
    assert [url in line for line in before if "2 processes on cpu" in line] == [True], (
        "said once, with the store"
    )
    began = time.monotonic()
    process.terminate()
    output = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert time.monotonic() - began < 25, output
    assert checkpoint.newest_checkpoint(open_store(settings(url).store), "drafter").step >= 2
