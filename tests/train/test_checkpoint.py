"""Checkpoints exist whole or not at all, belong to one trainer, and are told apart from damaged ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from dflash_stream import layout
from dflash_stream.config import StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.store import ObjectUpload, Store, StoreError, Uploader, open_store
from train import checkpoint
from train.checkpoint import (
    MODEL,
    OPTIMIZER,
    CheckpointRecord,
    LostOwnership,
    Ownership,
    Publisher,
    Snapshot,
    TrainState,
)

SETTINGS = {"train.seed": 0, "drafter.block_size": 16}


@pytest.fixture
def settings(tmp_path: Path) -> StoreSettings:
    return StoreSettings(url=f"file://{tmp_path}/run", pool_bytes=10 << 20, part_bytes=5 << 20, deadline_s=5.0)


@pytest.fixture
def store(settings: StoreSettings) -> Store:
    return open_store(settings)


@pytest.fixture
def uploader(store: Store, settings: StoreSettings) -> Iterator[Uploader]:
    with Uploader(store, settings) as uploader:
        yield uploader


def owner_of(store: Store, **changed: Any) -> Ownership:
    ownership = Ownership(store, "d", "fingerprint", SETTINGS | changed)
    ownership.take()
    return ownership


def snapshot(step: int, elements: int = 1000) -> Snapshot:
    state = TrainState(
        step=step,
        total_steps=100,
        optimizer_steps=step,
        tokens=step,
        first_loss=2.0,
        last_loss=1.0,
        acceptance=None,
        stream={"position": step},
        drafter={},
        fingerprint="fingerprint",
        settings=SETTINGS,
    )
    tensor = torch.full((elements,), float(step))
    return Snapshot(state, {"fc.weight": tensor}, {"exp_avg.fc.weight": tensor, "exp_avg_sq.fc.weight": tensor})


def objects(store: Store) -> set[str]:
    return {info.key for info in store.list(layout.checkpoints("d"))}


def load_all(store: Store, record: CheckpointRecord) -> None:
    checkpoint.read_state(store, record)
    checkpoint.load_tensors(store, record, MODEL, {"fc.weight": torch.zeros(1000)})


def steps(store: Store) -> list[int]:
    found = checkpoint.read_owner(store, "d")
    assert found is not None
    return [record.step for record in found[0].checkpoints]


def test_checkpoint_cannot_be_read_back(store: Store, uploader: Uploader) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    publisher.start(snapshot(7, elements=3_000_000))  # more than one part
    publisher.wait()
    record = checkpoint.newest_checkpoint(store, "d")
    assert checkpoint.read_state(store, record).stream == {"position": 7}
    model = {"fc.weight": torch.zeros(3_000_000)}
    checkpoint.load_tensors(store, record, MODEL, model)
    assert bool((model["fc.weight"] == 7).all())
    body, _ = store.get(record.prefix + OPTIMIZER)
    assert load(body)["exp_avg_sq.fc.weight"].shape == (3_000_000,), "stock safetensors reads it"


def test_old_checkpoints_fill_the_store(store: Store, uploader: Uploader) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    for step in (1, 2, 3, 4):
        publisher.start(snapshot(step))
    publisher.wait()
    assert steps(store) == [3, 4]
    assert len(objects(store)) == 6


def test_forgotten_trainer_publishes_over_its_successor(store: Store, uploader: Uploader) -> None:
    old = Publisher(uploader, owner_of(store), keep=1)
    old.start(snapshot(1))
    old.wait()
    new = Publisher(uploader, owner_of(store), keep=1)
    new.start(snapshot(2))
    new.wait()
    before = objects(store)
    old.start(snapshot(3))
    with pytest.raises(LostOwnership, match=r"generation 2.*generation 1.*step 3"):
        old.wait()
    assert steps(store) == [2]
    assert objects(store) == before, "nothing of the other one is touched, nothing of its own is left"


def test_two_trainers_that_start_at_once_both_believe_to_own(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Ownership(store, "d", "fingerprint", SETTINGS) for _ in range(2))
    read = checkpoint.read_owner

    def read_late(*arguments: Any) -> Any:
        found = read(*arguments)
        if first._record is None:
            monkeypatch.setattr(checkpoint, "read_owner", read)
            second.take()
        return found

    monkeypatch.setattr(checkpoint, "read_owner", read_late)
    with pytest.raises(UserError, match="another trainer took over"):
        first.take()
    found = read(store, "d")
    assert found is not None
    assert found[0].token == second.token


def test_half_uploaded_checkpoint_is_published(
    store: Store, uploader: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    publisher.start(snapshot(1))
    publisher.wait()

    def fail(*_: Any, **__: Any) -> Any:
        raise StoreError("the store is full")

    monkeypatch.setattr(store, "put_part", fail)
    publisher.start(snapshot(2, elements=3_000_000))
    with pytest.raises(StoreError, match="full"):
        publisher.wait()
    monkeypatch.undo()
    assert steps(store) == [1]
    assert len(objects(store)) == 3
    assert not list(store.list_uploads(""))


def test_stopped_trainer_leaves_a_half_checkpoint(
    store: Store, uploader: Uploader, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    finish = ObjectUpload.finish

    def finish_then_close(self: ObjectUpload) -> Any:
        done = finish(self)
        publisher._closed.set()
        return done

    monkeypatch.setattr(ObjectUpload, "finish", finish_then_close)
    publisher.start(snapshot(1))
    publisher.close(timeout_s=5)
    assert steps(store) == []
    with pytest.raises(UserError, match="no checkpoint yet"):
        checkpoint.newest_checkpoint(store, "d")


def test_leftovers_of_killed_trainers_stay_for_ever(store: Store, uploader: Uploader) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    publisher.start(snapshot(1))
    publisher.wait()
    orphan = layout.checkpoint("d", 2, "killed") + MODEL
    store.put(orphan, b"uploaded, never named")
    store.create_upload(layout.checkpoint("d", 3, "killed") + MODEL, part_bytes=5 << 20)
    named = objects(store) - {orphan}
    owner_of(store)
    assert objects(store) == named
    assert not list(store.list_uploads(layout.checkpoints("d")))
    assert steps(store) == [1]


def test_changed_settings_continue_silently(store: Store, uploader: Uploader) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    owner_of(store, **{"train.seed": 5})  # nothing is published yet: may start anew
    publisher._ownership = owner_of(store)
    publisher.start(snapshot(1))
    publisher.wait()
    with pytest.raises(UserError, match=r"(?s)train.seed: the checkpoint has 0, these settings give 1.*step 1"):
        owner_of(store, **{"train.seed": 1})
    with pytest.raises(UserError, match="another run"):
        Ownership(store, "d", "other", SETTINGS).inspect()
    found = checkpoint.read_owner(store, "d")
    assert found is not None
    assert found[0].token == publisher._ownership.token, "a refused trainer takes nothing"


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
@pytest.mark.parametrize("file", [MODEL, "state.json"])
def test_damaged_checkpoint_is_loaded(store: Store, uploader: Uploader, damage: str, file: str) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    publisher.start(snapshot(1))
    publisher.wait()
    record = checkpoint.newest_checkpoint(store, "d")
    key = record.prefix + file
    body = bytearray(store.get(key)[0])
    body[-3] ^= 1
    if damage == "gone":
        store.delete([key])
    else:
        store.put(key, bytes(body[:-1] if damage == "short" else body))
    with pytest.raises(UserError, match=key):
        load_all(store, record)


def test_other_geometry_is_loaded(store: Store, uploader: Uploader) -> None:
    publisher = Publisher(uploader, owner_of(store), keep=2)
    publisher.start(snapshot(1))
    publisher.wait()
    record = checkpoint.newest_checkpoint(store, "d")
    with pytest.raises(UserError, match=r"fc.weight \[1000\].*has \[10\]"):
        checkpoint.load_tensors(store, record, MODEL, {"fc.weight": torch.zeros(10)})
    wanted = {"fc.weight": torch.zeros(1000), "norm.weight": torch.zeros(4)}
    with pytest.raises(UserError, match=r"lacks norm.weight"):
        checkpoint.load_tensors(store, record, MODEL, wanted)


def test_training_changes_a_checkpoint_that_is_on_its_way() -> None:
    live = {"a": torch.zeros(4), "b": torch.zeros(2, 3).T}
    copy = checkpoint.host_copy(live)
    for tensor in live.values():
        tensor += 1
    assert all(not tensor.any() and tensor.is_contiguous() for tensor in copy.values())
