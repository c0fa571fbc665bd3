"""Trainings from beginning to end: they learn, stop, continue exactly, and refuse what would not be a continuation."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from dflash_stream import layout
from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.store import Store, open_store
from dflash_stream.store.local import LocalStore
from dflash_stream.stream import reader
from tests.train.tiny_run import make_run, settings
from train import ahead as ahead_module
from train import checkpoint, trainer
from train.ahead import ahead
from train.checkpoint import MODEL, OPTIMIZER
from train.trainer import Training, train


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"file://{tmp_path}/run"
    make_run(url)
    return url


class Recorder:
    """A tracker that keeps what it is told."""

    where = "here"

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.summarised: dict[str, Any] = {}
        self.state = ""

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged.setdefault(step, {}).update(values)

    def summary(self, values: dict[str, Any]) -> None:
        self.summarised = dict(values)

    def close(self, state: str = "finished") -> None:
        self.state = state


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    made: list[Recorder] = []

    def open_recorder(*_: Any, **__: Any) -> Recorder:
        made.append(Recorder())
        return made[-1]

    monkeypatch.setattr(trainer, "open_tracker", open_recorder)
    return made


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, act: Callable[[Training], None]) -> None:
    """Have `act` called right after this step was counted."""
    count = Training._count

    def counted(self: Training, *arguments: Any) -> None:
        count(self, *arguments)
        if self.step == step:
            act(self)

    monkeypatch.setattr(Training, "_count", counted)


def crash(_: Training) -> None:
    raise RuntimeError("pulled the plug")


def losses(recorders: list[Recorder]) -> dict[int, float]:
    return {step: values["train/loss"] for recorder in recorders for step, values in recorder.logged.items()}


def weights(store: Store, name: str) -> dict[str, torch.Tensor]:
    record = checkpoint.newest_checkpoint(store, name)
    return {
        **load(store.get(record.prefix + MODEL)[0]),
        **load(store.get(record.prefix + OPTIMIZER)[0]),
    }


def test_drafter_learns_nothing(url: str, recorders: list[Recorder]) -> None:
    config = settings(
        url, train={"epochs": 8.0, "lr": 2e-2, "validate_every_steps": 20, "validation_samples": 2}
    )
    summary = train(config)
    assert (summary.steps, summary.total_steps, summary.stopped_by) == (40, 40, None)
    assert summary.last_loss < 0.75 * summary.first_loss
    recorder = recorders[0]
    assert sorted(recorder.logged) == list(range(1, 41))
    assert recorder.logged[20]["validation/samples"] == 2
    assert recorder.logged[40]["validation/samples"] == 4, "the last one takes all"
    assert recorder.logged[40]["validation/acceptance_length"] == summary.acceptance
    assert recorder.logged[40]["validation/loss"] < recorder.logged[20]["validation/loss"]
    assert all(0 <= recorder.logged[40][f"validation/accuracy/slot_{slot}"] <= 1 for slot in (1, 2, 3))
    assert {"train/lr", "train/grad_norm", "train/tokens_per_s", "train/samples_per_s", "train/data_wait_share",
            "train/accuracy/slot_1", "train/agreement_length"} <= recorder.logged[5].keys()  # fmt: skip
    assert recorder.summarised["last_loss"] == summary.last_loss
    assert recorder.state == "finished"


@pytest.mark.parametrize("end", ["crash", "signal"])
def test_resumed_training_is_another_one(
    url: str, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Bit for bit: fp32, CPU, one process, one number of threads."""
    train(settings(url, train={"name": "whole", "checkpoint_every_steps": 4}))
    whole = losses(recorders)
    recorders.clear()
    config = settings(url, train={"name": "broken", "checkpoint_every_steps": 4})
    with monkeypatch.context() as patch:
        if end == "crash":
            at_step(patch, 11, crash)
            with pytest.raises(RuntimeError, match="plug"):
                train(config)
        else:
            at_step(patch, 10, lambda _: signal.raise_signal(signal.SIGTERM))
            stopped = train(config)
            assert (stopped.steps, stopped.stopped_by) == (11, signal.SIGTERM)
            assert recorders[0].state == "stopped"
    assert recorders[0].logged.keys() <= set(range(1, 12))
    summary = train(config)
    assert min(recorders[1].logged) == (9 if end == "crash" else 12), "continues after the newest checkpoint"
    assert losses(recorders) == whole
    assert summary.first_loss == whole[1]
    store = open_store(config.store)
    ours, theirs = weights(store, "broken"), weights(store, "whole")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_layout_of_the_machine_ends_a_training(
    url: str, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, 6, lambda _: signal.raise_signal(signal.SIGINT))
        assert train(settings(url)).stopped_by == signal.SIGINT
    changed = settings(url, train={"tokens_per_batch": 40, "lr": 1e-3}, stream={"threads": 1})
    assert train(changed).steps == 20


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("train", "batch_samples", 4),
        ("train", "seed", 1),
        ("train", "epochs", 8.0),
        ("train", "anchors", 4),
        ("stream", "block_bytes", 1),
        ("drafter", "block_size", 8),
        ("drafter", "intermediate_size", 32),
    ],
)
def test_changed_setting_continues_another_training(url: str, section: str, name: str, value: Any) -> None:
    before = settings(url, train={"max_steps": 1})
    train(before)
    old = getattr(getattr(before, section), name)
    changed = settings(url, **{section: {name: value}})
    with pytest.raises(
        UserError, match=rf"{section}\.{name}: the checkpoint has {old}, these settings give {value}"
    ):
        train(changed)


def test_finished_training_trains_on(
    url: str, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(url, train={"max_steps": 3})
    first = train(config)
    store = open_store(config.store)
    owner, _ = store.get(layout.owner("drafter"))
    monkeypatch.setattr(trainer, "Training", crash)
    again = train(config)
    assert (again.steps, again.first_loss, again.last_loss) == (first.steps, first.first_loss, first.last_loss)
    assert store.get(layout.owner("drafter"))[0] == owner


def test_failed_publication_goes_unnoticed(
    url: str, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step reports it and is not counted; nothing after it is published."""
    save = Training._save

    def take_over(training: Training) -> None:
        training.publisher.settle()
        checkpoint.Ownership(
            training.store,
            "drafter",
            training.plan.run.identity.fingerprint,
            training.ownership.record.settings,
        ).take()

    def save_and_wait(training: Training) -> None:
        save(training)
        training.publisher.settle()

    config = settings(url, train={"checkpoint_every_steps": 2})
    at_step(monkeypatch, 3, take_over)
    monkeypatch.setattr(Training, "_save", save_and_wait)
    with pytest.raises(UserError, match="taken over by another trainer"):
        train(config)
    assert recorders[0].state == "failed"
    assert max(recorders[0].logged) == 4
    record = checkpoint.newest_checkpoint(open_store(config.store), "drafter")
    assert record.step == 2


def test_diverged_training_is_published(
    url: str, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(training: Training) -> None:
        with torch.no_grad():
            training.learner.drafter.fc.weight[0, 0] = torch.nan

    at_step(monkeypatch, 2, spoil)
    with pytest.raises(UserError, match=r"step 3: loss nan.*diverged"):
        train(settings(url, train={"checkpoint_every_steps": 1}))
    found = checkpoint.read_owner(open_store(settings(url).store), "drafter")
    assert found is not None
    assert [record.step for record in found[0].checkpoints] == [1, 2]


def test_refused_samples_shift_the_steps(tmp_path: Path, recorders: list[Recorder]) -> None:
    """Steps of nothing but refused samples are counted and change nothing; whole steps are as without them."""
    url = f"file://{tmp_path}/run"
    make_run(url, train=6, refused={4, 5, 6})
    summary = train(settings(url, train={"batch_samples": 1, "epochs": 2.0}, stream={"block_bytes": 1}))
    assert summary.steps == 12
    norms = [values["train/grad_norm"] for values in recorders[0].logged.values()]
    assert norms.count(0.0) == 6


def test_missing_units_are_skipped(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    run = make_run(url)
    run.store.delete([layout.record(3)])
    with pytest.raises(UserError, match=r"1 of 5 are missing \(3\).*extract"):
        train(settings(url))


def test_bf16_computes_in_fp32_or_fails(url: str, recorders: list[Recorder]) -> None:
    summary = train(settings(url, train={"precision": "bf16", "max_steps": 8, "lr": 2e-2}))
    assert summary.last_loss < summary.first_loss
    assert {t.dtype for t in weights(open_store(settings(url).store), "drafter").values()} == {torch.float32}


def test_training_fails_against_a_real_server(s3_url: str, recorders: list[Recorder]) -> None:
    make_run(s3_url, train=16)
    config: Config = settings(s3_url, train={"epochs": 3.0, "checkpoint_every_steps": 1, "keep_checkpoints": 2})
    summary = train(config)
    assert summary.steps == 6
    store = open_store(config.store)
    found = checkpoint.read_owner(store, "drafter")
    assert found is not None
    assert [record.step for record in found[0].checkpoints] == [5, 6]
    assert len(list(store.list(layout.checkpoints("drafter")))) == 6
    assert not list(store.list_uploads(layout.drafter("drafter")))
    assert train(settings(s3_url, train={"epochs": 3.0})).steps == 6


def test_signal_waits_for_the_upload_of_a_checkpoint_before(
    url: str, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher would kill the process in the middle of it. Nothing half-published is left either way."""
    going_on = threading.Event()
    upload = checkpoint.Publisher._upload

    def slow(publisher: checkpoint.Publisher, prefix: str, snapshot: checkpoint.Snapshot) -> Any:
        going_on.wait(20)
        return upload(publisher, prefix, snapshot)

    monkeypatch.setattr(checkpoint.Publisher, "_upload", slow)
    monkeypatch.setattr(trainer, "GRACE_S", 1.0)
    monkeypatch.setattr(trainer, "ABORT_S", 0.1)
    at_step(monkeypatch, 3, lambda _: signal.raise_signal(signal.SIGTERM))
    begun = time.monotonic()
    summary = train(settings(url, train={"checkpoint_every_steps": 2}))
    going_on.set()
    assert time.monotonic() - begun < 15
    assert (summary.stopped_by, summary.checkpoint) == (signal.SIGTERM, None)


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_signal_is_not_heard_while_the_store_is_silent(
    url: str, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch, reads_ahead: bool
) -> None:
    """With and without the thread that makes micro-batches ahead, as it does on a GPU."""
    going_on, asked = threading.Event(), threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    read, make = LocalStore.read_into, Training.__init__

    def silent(store: LocalStore, key: str, *arguments: Any, **options: Any) -> None:
        if key.startswith(layout.SHARDS) and recorders[0].logged:
            if not asked.ident:
                asked.start()
            going_on.wait(10)
        read(store, key, *arguments, **options)

    def made(training: Training, *arguments: Any) -> None:
        make(training, *arguments)
        if reads_ahead:
            training._prepared = ahead(training._prepare())

    monkeypatch.setattr(LocalStore, "read_into", silent)
    monkeypatch.setattr(Training, "__init__", made)
    monkeypatch.setattr(trainer, "GRACE_S", 0.5)
    monkeypatch.setattr(reader, "_JOIN_S", 0.1)
    monkeypatch.setattr(ahead_module, "JOIN_S", 0.1)
    with pytest.raises(SystemExit) as end:
        train(settings(url, stream={"block_bytes": 1, "prefetch_bytes": 1, "threads": 1}))
    going_on.set()
    assert end.value.code == 128 + signal.SIGTERM
    assert recorders[0].state == "failed"


@pytest.mark.parametrize("file", [MODEL, OPTIMIZER, checkpoint.STATE])
def test_deleted_file_of_the_newest_checkpoint_ends_a_training_for_ever(
    url: str, recorders: list[Recorder], caplog: pytest.LogCaptureFixture, file: str
) -> None:
    train(settings(url, train={"name": "whole", "max_steps": 6}))
    config = settings(url, train={"max_steps": 6, "checkpoint_every_steps": 2})
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 5, crash)
        with pytest.raises(RuntimeError, match="plug"):
            train(config)
    store = open_store(config.store)
    found = checkpoint.read_owner(store, "drafter")
    assert found is not None
    older, newest = found[0].checkpoints
    store.delete([newest.prefix + file])
    assert train(config).steps == 6
    assert f"{file} is missing" in caplog.text
    assert min(recorders[-1].logged) == older.step + 1
    ours, theirs = weights(store, "drafter"), weights(store, "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_no_checkpoint_that_is_whole_starts_from_nothing(url: str, recorders: list[Recorder]) -> None:
    config = settings(url, train={"max_steps": 2})
    train(config)
    store = open_store(config.store)
    store.delete([checkpoint.newest_checkpoint(store, "drafter").prefix + MODEL])
    with pytest.raises(UserError, match=r"is missing.*begin anew under another --train\.name"):
        train(settings(url, train={"max_steps": 4}))
    store.delete([layout.owner("drafter")])
    with pytest.raises(UserError, match=r"owner is missing, while there are 2 objects of checkpoints"):
        train(config)
