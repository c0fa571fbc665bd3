"""Figures reach wandb and the heartbeat, and nothing that goes wrong there reaches the work."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from dflash_stream import layout
from dflash_stream.config import Config, build
from dflash_stream.store import open_store
from dflash_stream.tracking import open_tracker
from dflash_stream.tracking.heartbeat import Heartbeat, worker_name
from dflash_stream.tracking.tracker import has_wandb_key


def settings(tmp_path: Path, **tracking: object) -> Config:
    return build(
        {"store": {"url": f"file://{tmp_path}/run"}, "tracking": {"directory": str(tmp_path), **tracking}}
    )


def test_figures_lie_in_an_offline_run_file_when_no_key_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-that-must-not-appear")
    config = settings(tmp_path)
    tracker = open_tracker(config, open_store(config.store), "train", settings={"lr": 0.5}, primary=True)
    assert capsys.readouterr().out.count("no key is set") == 1
    tracker.log({"loss": 2.25}, step=1)
    tracker.log({"loss": 1.125}, step=2)
    tracker.summary({"last_loss": 1.125})
    tracker.close()
    (file,) = Path(tracker.where).glob("run-*.wandb")
    deadline = time.monotonic() + 20
    while b"last_loss" not in (content := file.read_bytes()):  # wandb's own process writes it a little later
        assert time.monotonic() < deadline, content
        time.sleep(0.05)
    assert b"2.25" in content
    assert b"1.125" in content
    assert b"a-secret-that-must-not-appear" not in content


def test_a_wandb_that_cannot_start_is_said_once_and_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def broken(**_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(wandb, "init", broken)
    config = settings(tmp_path)
    tracker = open_tracker(config, open_store(config.store), "extract", settings={}, primary=True)
    tracker.log({"tokens": 1.0}, step=1)
    tracker.close()
    assert capsys.readouterr().err.count("going on without it") == 1


def test_wandb_is_told_more_of_the_store_than_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    told: dict[str, object] = {}

    def init(**arguments: object) -> None:
        told.update(arguments)
        raise OSError("it has been told enough")

    monkeypatch.setattr(wandb, "init", init)
    config = settings(tmp_path)
    sent = config.model_dump(mode="json")
    sent["store"]["endpoint"] = "https://me:hush@example.com"
    open_tracker(config, open_store(config.store), "train", settings=sent, primary=True).close()
    assert told["config"] == {**sent, "store": f"file://{tmp_path}/run"}


def test_the_heartbeat_shows_the_latest_figures_and_how_the_process_ended(tmp_path: Path) -> None:
    config = settings(tmp_path, wandb=False)
    store = open_store(config.store)
    tracker = open_tracker(config, store, "extract", settings={}, primary=True)
    tracker.log({"tokens": 1.0}, step=1)
    tracker.log({"tokens": 2.0}, step=2)
    tracker.summary({"shards": 3})
    tracker.close("interrupted")
    body, _ = store.get(f"{layout.STATUS}extract-{worker_name()}.json")
    beat = json.loads(body)
    told = {name: beat[name] for name in ("tokens", "step", "summary", "state")}
    assert told == {"tokens": 2.0, "step": 2, "summary": {"shards": 3}, "state": "interrupted"}


def test_the_heartbeat_beats_by_itself(tmp_path: Path) -> None:
    store = open_store(settings(tmp_path).store)
    heartbeat = Heartbeat(store, "train", interval_s=0.01)
    heartbeat.update({"loss": 7})
    heartbeat._closed.wait(0.3)
    body, _ = store.get(f"{layout.STATUS}train-{worker_name()}.json")
    assert json.loads(body)["state"] == "running"
    heartbeat.close("finished")


def test_a_store_that_is_down_keeps_the_process_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr("dflash_stream.tracking.heartbeat.CLOSE_S", 0.2)
    down = {"url": "s3://bucket/run", "endpoint": "http://127.0.0.1:9", "deadline_s": 60.0}
    heartbeat = Heartbeat(open_store(build({"store": down}).store), "train")
    began = time.monotonic()
    heartbeat.close("failed")
    assert time.monotonic() - began < 5
    heartbeat._thread.join(10)
    assert not heartbeat._thread.is_alive()


def test_a_key_in_netrc_counts_as_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert has_wandb_key()
