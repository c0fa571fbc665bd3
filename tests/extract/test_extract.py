"""Extraction of a whole run in this process: what lands in the store, and what if something is wrong."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_stream import layout
from dflash_stream.config import Config, StoreSettings, TargetSettings, build
from dflash_stream.errors import Interrupted, UserError
from dflash_stream.extract import extract, session, worker
from dflash_stream.extract.claims import Claims
from dflash_stream.run import Run
from dflash_stream.shards import index as index_module
from dflash_stream.shards.codec import decode
from dflash_stream.shards.index import committed_units, load_index, read_record
from dflash_stream.store import LocalStore, Store, StoreError, open_store
from dflash_stream.target.load import Target, load_target
from tests.tiny_runs import LAYERS, publish_at


def config_for(url: str, **extract_settings: Any) -> Config:
    return build({"store": {"url": url}, "tracking": {"wandb": False}, "extract": extract_settings})


def read_samples(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """Every sample of every committed shard, by key. Each key may come once."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for unit in sorted(committed_units(run.store)):
        record = read_record(run.store, unit)
        for entry in record.samples:
            assert entry.key not in found
            found[entry.key] = decode(run.store.get_range(record.object, entry.offset, entry.size), entry.key)
    return found


def whole_target(path: Path) -> Target:
    return load_target(TargetSettings(id=str(path), dtype="float32"), layers=LAYERS, whole=True, device="cpu")


def assert_nothing_left(store: Store) -> None:
    assert list(store.list(layout.CLAIMS)) == []
    assert list(store.list_uploads("")) == []


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_hybrid"])
def test_shards_hold_other_states_than_the_target_gives(
    family: str, request: pytest.FixtureRequest, s3_url: str
) -> None:
    path = request.getfixturevalue(family)
    run = publish_at(s3_url, path, units=3, final_state=family == "tiny_hybrid")
    summary = extract(config_for(s3_url, tokens_per_batch=120))
    assert (summary.shards, summary.samples, summary.refused) == (3, 18, 0)
    assert summary.tokens == run.identity.tokens
    assert_nothing_left(run.store)
    index = load_index(run.store, run, range(3))
    assert all(index.locate(row) for row in range(18))

    found = read_samples(run)
    assert list(found) == run.samples.key
    target = whole_target(path)
    for unit in range(3):
        for sample in run.unit(unit):
            tensors = found[sample.key]
            (expected,) = target.states([sample.input_ids])
            torch.testing.assert_close(tensors["hidden_states"], expected, rtol=2**-7, atol=1e-4)
            assert tensors["input_ids"].tolist() == sample.input_ids.tolist()
            assert tensors["loss_mask"].tolist() == sample.loss_mask.tolist()
            assert ("final_state" in tensors) == (family == "tiny_hybrid")
            assert ("greedy.input_ids" in tensors) == (unit == 0)
            if unit == 0:
                prompt = int(tensors["greedy.prompt_tokens"])
                assert prompt == int(np.argmax(sample.loss_mask))
                text = tensors["greedy.input_ids"].tolist()
                assert text[:prompt] == sample.input_ids[:prompt].tolist()
                assert [text[prompt:]] == target.greedy([sample.input_ids[:prompt]], 8)
                (own,) = target.states([text])
                torch.testing.assert_close(tensors["greedy.hidden_states"], own, rtol=2**-7, atol=1e-4)


def test_training_units_come_before_the_held_out_ones(
    tiny_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=12, validation_units=3)
    taken: list[int] = []
    take = Claims.take

    def noted(self: Claims, unit: int) -> bool:
        taken.append(unit)
        return take(self, unit)

    monkeypatch.setattr(Claims, "take", noted)
    extract(config_for(run.store.url))
    assert set(taken[:3]) == {0, 1, 2}
    assert len(taken) == 12
    assert all(unit <= place + 3 for place, unit in enumerate(taken))


def test_a_finished_run_loads_the_model_again(
    tiny_llama: Path, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama)
    extract(config_for(run.store.url))
    monkeypatch.setattr(session, "load_target", lambda *args, **options: pytest.fail("loaded the model"))
    caplog.set_level("INFO")
    before = {info.key: info.etag for info in run.store.list("")}
    assert extract(config_for(run.store.url)).shards == 0
    assert "all 4 units are extracted" in caplog.text
    assert {info.key: info.etag for info in run.store.list("")} == before


def test_a_trainer_reads_a_record_for_every_unit(tiny_llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(index_module, "BLOCK_UNITS", 2)
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=5)
    extract(config_for(run.store.url))
    assert len(list(run.store.list(layout.BLOCKS))) == 3
    monkeypatch.setattr(index_module, "read_record", lambda store, unit: pytest.fail(f"read record {unit}"))
    index = load_index(run.store, run, range(4))
    assert all(index.locate(row) for row in np.flatnonzero(run.samples.unit < 4).tolist())


def test_an_index_that_cannot_be_gathered_fails_the_extraction(
    tiny_llama: Path, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    put = LocalStore.put

    def refuse_blocks(self: LocalStore, key: str, body: bytes, **conditions: Any) -> str:
        if key.startswith(layout.BLOCKS):
            raise StoreError(f"writing {key}: the quota of this user is used up")
        return put(self, key, body, **conditions)

    monkeypatch.setattr(LocalStore, "put", refuse_blocks)
    run = publish_at(f"file://{tmp_path}/run", tiny_llama)
    assert extract(config_for(run.store.url)).shards == 4
    assert "index was not gathered" in caplog.text
    assert "quota" in caplog.text
    assert_nothing_left(run.store)


def test_records_that_are_not_the_runs_pass_for_its_units(tiny_llama: Path, tmp_path: Path) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=2)
    for name in ("shard-000071.json", "shard-000072.json", "shard-1.json", "notes.txt"):
        run.store.put(layout.INDEX + name, b"{}")
    run.store.put(layout.CLAIMS + "unit-\u00b2", b"{}")
    assert extract(config_for(run.store.url)).shards == 2


def test_committed_units_are_made_again(tiny_llama: Path, tmp_path: Path) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama)
    extract(config_for(run.store.url))
    shards = {info.key for info in run.store.list(layout.SHARDS)}
    lost = read_record(run.store, 2)
    run.store.delete([layout.record(2)])
    assert extract(config_for(run.store.url)).shards == 1
    now = {info.key for info in run.store.list(layout.SHARDS)}
    assert shards < now
    assert len(now - shards) == 1
    assert read_record(run.store, 2).object != lost.object


def test_a_run_without_held_out_text_generates(tiny_llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=2, new_tokens=0)
    monkeypatch.setattr(Target, "greedy", lambda *args: pytest.fail("generated"))
    extract(config_for(run.store.url))
    assert not any(name.startswith("greedy") for tensors in read_samples(run).values() for name in tensors)


def poison(monkeypatch: Any, token: int) -> None:
    """Make the states of every sample with that token not finite."""
    load = session.load_target

    def loaded(*args: Any, **options: Any) -> Target:
        target = load(*args, **options)
        with torch.no_grad():
            target.model.get_input_embeddings().weight[token] = float("nan")
        return target

    monkeypatch.setattr(session, "load_target", loaded)


def test_unusable_states_are_stored(tiny_llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, new_tokens=0)
    samples = [sample for unit in range(4) for sample in run.unit(unit)]
    token = int(samples[0].input_ids[0])
    bad = [sample.key for sample in samples if token in sample.input_ids]
    assert 0 < len(bad) < len(samples)
    poison(monkeypatch, token)
    summary = extract(config_for(run.store.url, max_bad_fraction=0.9))
    assert summary.refused == len(bad)
    refused = {
        refusal.key: refusal.reason for unit in range(4) for refusal in read_record(run.store, unit).refused
    }
    assert sorted(refused) == sorted(bad)
    assert "not finite" in refused[bad[0]]
    assert sorted(read_samples(run)) == sorted(set(run.samples.key) - set(bad))
    index = load_index(run.store, run, range(4))
    assert [index.locate(row) is None for row in range(24)] == [key in bad for key in run.samples.key]


def test_a_broken_target_fills_the_store_with_refusals(
    tiny_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, new_tokens=0)
    first = run.unit(0)[0]
    poison(monkeypatch, int(first.input_ids[0]))
    with pytest.raises(
        UserError, match=rf"(?s)1 of the 6 samples of unit 0.*{first.key}: states of layer 1, 3, 5"
    ):
        extract(config_for(run.store.url))
    assert 0 not in committed_units(run.store)
    assert_nothing_left(run.store)


def test_a_token_outside_the_vocabulary_reaches_the_device(
    tiny_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama)
    unit = Run.unit

    def damaged(self: Run, number: int) -> Any:
        first, second, *rest = unit(self, number)
        return [first, replace(second, input_ids=np.asarray([5, 5000, 6], np.int32)), *rest]

    monkeypatch.setattr(Run, "unit", damaged)
    with pytest.raises(UserError, match=r"sample 0000\d{4}-.*vocabulary of 128"):
        extract(config_for(run.store.url))


def test_another_process_committing_first_is_an_error(
    tiny_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=2)
    extract(config_for(run.store.url))
    body, _ = run.store.get(layout.record(1))
    run.store.delete([layout.record(1)])
    read = worker.Worker._read

    def slow(self: Any, unit: int) -> Any:
        run.store.put(layout.record(unit), body)  # the other one gets there while this one works
        return read(self, unit)

    monkeypatch.setattr(worker.Worker, "_read", slow)
    summary = extract(config_for(run.store.url))
    assert summary.shards == 0
    assert run.store.get(layout.record(1))[0] == body
    assert len(list(run.store.list(layout.SHARDS))) == 2
    assert_nothing_left(run.store)


def test_a_unit_claimed_by_a_dead_process_is_never_made(tiny_llama: Path, tmp_path: Path) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama)
    dead = Claims(run.store, 1.5)
    assert dead.take(0)
    dead._closed.set()  # it renews no more
    summary = extract(config_for(run.store.url, claim_ttl_s=1.5))
    assert summary.shards == 4
    assert_nothing_left(run.store)


def test_a_living_process_is_not_waited_for(tiny_llama: Path, tmp_path: Path) -> None:
    """While another process works on the last units this one waits, and is done when they are committed."""
    run = publish_at(f"file://{tmp_path}/run", tiny_llama)
    extract(config_for(run.store.url))
    body, _ = run.store.get(layout.record(3))
    run.store.delete([layout.record(3)])
    with Claims(run.store, 5.0) as living:
        living.take(3)

        def commit() -> None:
            run.store.put(layout.record(3), body)
            living.release(3)

        timer = threading.Timer(1.0, commit)
        timer.start()
        assert extract(config_for(run.store.url, claim_ttl_s=5.0)).shards == 0
        timer.join()
    assert run.store.get(layout.record(3))[0] == body


def test_a_failing_store_is_noticed_at_the_end(tiny_llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=30, samples_per_unit=3)
    complete, failing = LocalStore.put, threading.Event()

    def put(self: LocalStore, key: str, body: bytes, **options: Any) -> str:
        broken = key.startswith(layout.SHARDS) and "shard-000005" in key
        if broken or (failing.is_set() and key.startswith(layout.INDEX)):
            failing.set()
            raise StoreError("the disk is full")
        return complete(self, key, body, **options)

    monkeypatch.setattr(LocalStore, "put", put)
    with pytest.raises(UserError, match="the disk is full"):
        extract(config_for(run.store.url))
    assert 5 not in committed_units(run.store)
    assert len(committed_units(run.store)) < 29  # what was committed before
    assert_nothing_left(run.store)


def interrupt_when(monkeypatch: Any, number: signal.Signals, moment: Callable[[], bool]) -> None:
    """Send this process a signal at the first batch at which `moment` holds."""
    submit = Target.submit
    sent: list[int] = []

    def interrupted(self: Target, batch: Any) -> Any:
        if not sent and moment():
            sent.append(number)
            os.kill(os.getpid(), number)
        return submit(self, batch)

    monkeypatch.setattr(Target, "submit", interrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_loses_what_was_committed(
    number: signal.Signals, tiny_llama: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    run = publish_at(f"file://{tmp_path}/run", tiny_llama, units=30)
    interrupt_when(monkeypatch, number, lambda: len(list(run.store.list(layout.INDEX))) >= 4)
    with pytest.raises(Interrupted) as stopped:
        extract(config_for(run.store.url))
    assert stopped.value.exit_code == 128 + number
    done = committed_units(run.store)
    assert 4 <= len(done) < 30
    assert_nothing_left(run.store)
    assert extract(config_for(run.store.url)).shards == 30 - len(done)
    assert sorted(read_samples(run)) == sorted(run.samples.key)


def test_an_interrupt_leaves_parts_in_the_store(tiny_llama: Path, s3_url: str, monkeypatch: Any) -> None:
    """Shards of 7 MiB go up in parts of 5 MiB; the signal comes when an upload is open."""
    run = publish_at(s3_url, tiny_llama, units=2, samples_per_unit=180, lengths=(190, 240), new_tokens=0)
    seen: list[bool] = []

    def upload_is_open() -> bool:
        seen.append(bool(list(run.store.list_uploads(""))))
        return seen[-1]

    interrupt_when(monkeypatch, signal.SIGTERM, upload_is_open)
    config = config_for(s3_url, tokens_per_batch=1024)
    config = config.model_copy(update={"store": config.store.model_copy(update={"part_bytes": 5 << 20})})
    with pytest.raises(Interrupted):
        extract(config)
    assert seen[-1], "no upload was ever open"
    assert_nothing_left(run.store)
    assert len(committed_units(run.store)) < 2


def test_an_unprepared_store_is_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dflash-stream prepare"):
        extract(config_for(f"file://{tmp_path}/empty"))


def test_a_missing_target_is_told_after_the_units_are_claimed(tiny_llama: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(tiny_llama, tmp_path / "model")
    run = publish_at(f"file://{tmp_path}/run", tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(UserError, match=r"target\.id"):
        extract(config_for(run.store.url))
    assert_nothing_left(open_store(StoreSettings(url=run.store.url)))
