"""The demo's closing table, and what an interrupt leaves behind. (CI runs the whole demo with `make demo`.)"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_stream.config import build
from dflash_stream.extract import extract
from dflash_stream.head import write_head
from dflash_stream.store import open_store
from launch import demo as demo_module
from launch.s3_server import S3Server
from tests.tiny_runs import publish_run
from tests.tiny_targets import VOCAB, save_tiny
from train.evaluate import evaluate
from train.trainer import train

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


DEMO = """
from pathlib import Path
from launch import demo
demo.WORK = Path({directory!r})  # what an earlier demo left in .demo stays
demo.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_no_process(smollm2: Path, tmp_path: Path, number: signal.Signals) -> None:
    marker = f"DEMO_TEST={os.urandom(8).hex()}"
    name, value = marker.split("=")
    demo = subprocess.Popen(
        [sys.executable, "-c", DEMO.format(directory=str(tmp_path / "demo"))],
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


def test_the_closing_table_lacks_a_figure(
    s3_server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Of a run of a tiny target, as its phases left it in the store."""
    prefix = s3_url.rsplit("/", 1)[1]
    target = save_tiny("qwen3", tmp_path / "target")
    config = build(
        {
            "store": {"url": s3_url, "pool_bytes": 10 << 20, "part_bytes": 5 << 20},
            "target": {"id": str(target), "dtype": "float32"},
            "drafter": {
                "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                "intermediate_size": 64, "block_size": 4, "mask_token_id": VOCAB - 1,
            },
            "train": {"name": prefix, "epochs": 2.0, "batch_samples": 4, "precision": "fp32"},
            "tracking": {"directory": str(tmp_path)},
        }
    )  # fmt: skip
    store = open_store(config.store)
    run = publish_run(store, target, units=3, new_tokens=24)
    write_head(store, config.store, config.target)
    extract(config)
    summary = train(config)
    evaluated = evaluate(config)
    capsys.readouterr()
    monkeypatch.setattr(demo_module, "NAME", prefix)
    monkeypatch.setenv("COLUMNS", "400")
    demo_module.report(s3_server, tmp_path / "export", 90.0)
    printed = capsys.readouterr().out
    shown = dict(re.findall(r"│ (\S.*?) +│ (\S.*?) +│", printed))
    assert shown["samples"] == "18 (6 held out)"
    assert shown["tokens"] == f"{run.identity.tokens:,}"
    assert shown["shards"] == "3"
    assert int(shown["bytes in shards"].replace(",", "")) > run.identity.tokens * run.identity.bytes_per_token
    assert float(re.sub(r",| tokens/s", "", shown["extraction"])) > 0
    assert shown["training"].endswith(f"tokens/s, {summary.steps} steps")
    assert shown["loss, first → last"] == f"{summary.first_loss:.3f} → {summary.last_loss:.3f}"
    assert evaluated.untrained is not None
    assert evaluated.trained is not None
    for which, score in (("untrained", evaluated.untrained), ("trained", evaluated.trained)):
        low, high = score.interval
        expected = f"{score.acceptance_length:.3f} (95 % interval {low:.3f} … {high:.3f})"
        assert shown[f"acceptance length, {which}"] == expected
    assert (ROOT / shown["export"]).resolve() == tmp_path / "export"
    for phase in ("extraction", "training"):
        assert list((ROOT / shown[f"wandb, {phase}"]).glob("*.wandb"))
    assert shown["all in all"] == "1.5 minutes"
