"""A shard is published whole, once, by the first who commits; or not at all."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as stock_load

from dflash_stream import layout
from dflash_stream.config import StoreSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.shards import (
    Committed,
    SampleError,
    ShardWriter,
    commit,
    decode,
    read_index_member,
    read_record,
)
from dflash_stream.shards.record import ShardRecord
from dflash_stream.store import LocalStore, Store, StoreError, Uploader, crc32c, open_store
from tests.shards.shard_stores import LyingStore, MiB, RefusingStore, SilentStore, local_settings, members
from tests.synthetic_run import extract_run, prepare_run, sample_tensors

HIDDEN = 16
LAYERS = 2


def small_run(store: Store, *, units: int = 2, codec: str = "bf16") -> Run:
    return prepare_run(
        store, units=units, each=4, validation_units=0, layers=LAYERS, hidden=HIDDEN, codec=codec
    )


def fill(writer: ShardWriter, run: Run, unit: int = 0) -> None:
    for row in (run.samples.unit == unit).nonzero()[0].tolist():
        writer.add(run.samples.key[row], sample_tensors(row, int(run.samples.tokens[row]), LAYERS, HIDDEN))


def objects(store: Store) -> tuple[list[str], list[str]]:
    """(keys of shards, keys of records)."""
    return [i.key for i in store.list(layout.SHARDS)], [i.key for i in store.list(layout.INDEX)]


def nothing_left(store: Store) -> bool:
    return objects(store) == ([], []) and not list(store.list_uploads(layout.SHARDS))


@pytest.fixture
def settings(s3_url: str) -> StoreSettings:
    return StoreSettings(url=s3_url, part_bytes=5 * MiB, pool_bytes=10 * MiB, max_concurrent_uploads=2)


def test_stock_tools_read_a_shard_from_the_real_server(settings: StoreSettings, tmp_path: Path) -> None:
    store = open_store(settings)
    run = small_run(store)
    extract_run(run, settings, units=[0])
    record = read_record(store, 0)
    body, etag = store.get(record.object)
    assert (record.size, record.etag) == (len(body), etag)
    files = members(body)
    assert list(files) == [f"{key}.safetensors" for key in run.samples.key[:4]] + ["__index__"]
    for row, entry in enumerate(record.samples):
        payload = files[f"{entry.key}.safetensors"]
        assert body[entry.offset : entry.offset + entry.size] == payload
        assert (entry.offset % 512, crc32c(payload)) == (0, entry.crc32c)
        expected = sample_tensors(row, int(run.samples.tokens[row]), LAYERS, HIDDEN)
        found = stock_load(payload)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert entry.tokens == len(expected["input_ids"])
    inside = ShardRecord.from_bytes(files["__index__"], "the member")
    assert inside == record.model_copy(update={"object": "", "size": 0, "etag": ""})
    assert read_index_member(store, record.object, record.size) == inside
    (tmp_path / "shard.tar").write_bytes(body)
    listed = subprocess.run(
        ["tar", "-tf", "shard.tar"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert (listed.stdout.split(), listed.stderr) == (list(files), "")


@pytest.mark.parametrize("codec", ["bf16", "bf16z", "fp8"])
def test_what_was_added_is_found_through_the_record(codec: str, tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    store = open_store(settings)
    run = small_run(store, codec=codec)
    extract_run(run, settings)
    for unit in (0, 1):
        record = read_record(store, unit)
        for place, entry in enumerate(record.samples):
            row = 4 * unit + place
            found = decode(store.get_range(record.object, entry.offset, entry.size, etag=record.etag))
            expected = sample_tensors(row, entry.tokens, LAYERS, HIDDEN)
            states = found.pop("hidden_states"), expected.pop("hidden_states")
            assert torch.allclose(*states, rtol=0.07, atol=0.02) if codec == "fp8" else torch.equal(*states)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_equal_samples_make_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a part and the time: only the attempt's token differs, and only in the index."""
    bodies = []
    for number, (token, part_mib) in enumerate([("aaaaaaaaaaaa", 5), ("aaaaaaaaaaaa", 6), ("bbbbbbbbbbbb", 5)]):
        settings = local_settings(tmp_path / str(number)).model_copy(update={"part_bytes": part_mib * MiB})
        store = open_store(settings)
        run = small_run(store)
        monkeypatch.setattr(layout, "new_token", lambda token=token: token)
        extract_run(run, settings, units=[0])
        monkeypatch.undo()
        bodies.append(store.get(read_record(store, 0).object)[0])
    assert bodies[0] == bodies[1]
    assert bodies[2] == bodies[0].replace(b"a" * 12, b"b" * 12)


def test_overhead_of_the_container_is_under_a_thousandth_at_a_megabyte(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    store = open_store(settings)
    run = prepare_run(store, units=1, each=24, validation_units=0, tokens=(180, 190), layers=5, hidden=576)
    extract_run(run, settings)
    record = read_record(store, 0)
    payloads = sum(sample.size for sample in record.samples)
    assert 0.95e6 < payloads / 24 < 1.15e6
    assert record.size / payloads - 1 < 0.001
    tensors = sum(int(tokens) * (5 * 576 * 2 + 5) for tokens in run.samples.tokens)
    assert record.size / tensors - 1 < 0.0015, "with the safetensors headers"


def test_an_exception_in_the_body_publishes_nothing(settings: StoreSettings) -> None:
    """Also when a part has been sent already, and without waiting for a garbage collection."""
    store = open_store(settings)
    run = prepare_run(store, units=1, each=4, validation_units=0, tokens=(1200, 1200), layers=5, hidden=256)
    with Uploader(store, settings) as uploader:
        tensors = sample_tensors(0, 1200, 5, 256)

        kept: list[ShardWriter] = []

        def write_and_fail() -> None:
            with ShardWriter(uploader, store, run.identity, 0, made_with={}) as writer:
                for row in range(2):
                    writer.add(run.samples.key[row], tensors)
                while not uploader.stats.bytes_sent:
                    time.sleep(0.01)
                kept.append(writer)  # no finalizer may do what leaving the context must
                assert list(store.list_uploads(layout.SHARDS)), "a multipart upload is under way"
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_and_fail()
        assert nothing_left(store)
        ShardWriter(uploader, store, run.identity, 0, made_with={}).add("k", tensors)  # dropped without a word
    assert nothing_left(store)


def test_two_racing_writers_leave_one_record_and_one_object(settings: StoreSettings) -> None:
    store = open_store(settings)
    run = small_run(store, units=4)
    results: dict[int, list[Committed]] = {unit: [] for unit in range(4)}
    start = threading.Barrier(2)

    def write() -> None:
        own = open_store(settings)
        with Uploader(own, settings) as uploader:
            for unit in results:
                with ShardWriter(uploader, own, run.identity, unit, made_with={}) as writer:
                    fill(writer, run, unit)
                    start.wait(60)
                    future = writer.finish()
                results[unit].append(future.result(60))

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    shards, records = objects(store)
    assert records == [layout.record(unit) for unit in range(4)]
    assert sorted(shards) == sorted(read_record(store, unit).object for unit in range(4))
    for unit, pair in results.items():
        assert sorted(committed.ours for committed in pair) == [False, True]
        assert pair[0].record == pair[1].record == read_record(store, unit)
    assert not list(store.list_uploads(layout.SHARDS))


def test_the_next_unit_starts_while_the_last_one_drains(tmp_path: Path) -> None:
    """finish must not wait for the store: here every put hangs until the second shard has been filled."""
    settings = local_settings(tmp_path)
    go = threading.Event()

    class Slow(LocalStore):
        def put(self, key: str, body: bytes | memoryview, **conditions: object) -> str:  # type: ignore[override]
            assert key == layout.RUN or key == layout.SAMPLES or go.wait(60)
            return super().put(key, body, **conditions)  # type: ignore[arg-type]

    store = Slow(settings)
    run = small_run(store)
    with Uploader(store, settings) as uploader:
        futures = []
        for unit in (0, 1):
            with ShardWriter(uploader, store, run.identity, unit, made_with={}) as writer:
                fill(writer, run, unit)
                futures.append(writer.finish())
        assert not any(future.done() for future in futures)
        assert not futures[0].cancel(), "what is being published cannot be called off by a future"
        go.set()
        assert [future.result(60).record.unit for future in futures] == [0, 1]


def write_unit(store: Store, run: Run, settings: StoreSettings) -> Committed:
    with (
        Uploader(store, settings) as uploader,
        ShardWriter(uploader, store, run.identity, 0, made_with={}) as writer,
    ):
        fill(writer, run)
        return writer.finish().result(60)


def test_a_refusal_of_our_own_record_is_a_success(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    committed = write_unit(LyingStore(settings), run, settings)
    assert committed.ours
    assert objects(run.store) == ([committed.record.object], [layout.record(0)])


@pytest.mark.parametrize(("store_kind", "record"), [(SilentStore, None), (LocalStore, b"not JSON")])
def test_in_doubt_the_object_stays_and_the_error_says_so(
    store_kind: type[LocalStore], record: bytes | None, tmp_path: Path
) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    if record is not None:
        run.store.put(layout.record(0), record)
    with pytest.raises(UserError, match=r"whether it was committed is not known(.|\n)*run extract\.py again"):
        write_unit(store_kind(settings), run, settings)
    assert len(objects(run.store)[0]) == 1


def test_the_object_that_the_record_names_is_never_deleted(tmp_path: Path) -> None:
    """Whoever put the record: repair may have adopted our object meanwhile, under a record of its own."""
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    ours = write_unit(run.store, run, settings).record
    adopted = ours.model_copy(update={"made_with": {"adopted": True}, "attempt": "another"})
    run.store.put(layout.record(0), adopted.to_bytes())
    assert commit(run.store, ours) == Committed(adopted, ours=True)
    assert objects(run.store)[0] == [ours.object]


def test_a_loser_that_cannot_delete_its_object_still_knows_that_the_unit_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    winner = write_unit(run.store, run, settings)

    def refuse(keys: object) -> None:
        raise StoreError(f"deleting {keys}: access denied")

    monkeypatch.setattr(run.store, "delete", refuse)
    loser = write_unit(run.store, run, settings)
    assert not loser.ours
    assert loser.record == winner.record
    assert "was left behind" in caplog.text


def test_the_record_of_another_run_is_not_taken_for_a_winner(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    other = write_unit(run.store, run, settings).record.model_copy(update={"run": "0" * 64, "attempt": "other"})
    run.store.put(layout.record(0), other.model_copy(update={"object": layout.shard(0, "other")}).to_bytes())
    with pytest.raises(UserError, match="another run"):
        write_unit(run.store, run, settings)
    assert len(objects(run.store)[0]) == 2, "nothing may be deleted"


def test_a_bad_sample_can_be_refused_and_the_shard_goes_on(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    good = sample_tensors(0, 6, LAYERS, HIDDEN)
    with Uploader(run.store, settings) as uploader, ShardWriter(
        uploader, run.store, run.identity, 0, made_with={"torch": "2.13"}
    ) as writer:  # fmt: skip
        for tensors, message in (
            (sample_tensors(0, 6, LAYERS + 1, HIDDEN), r"sample a of unit 0: .*expected \[T=6, K=2, H=16\]"),
            (good | {"final_state": good["hidden_states"][:, 0]}, "has also final_state"),
        ):
            with pytest.raises(SampleError, match=message):
                writer.add("a", tensors)
        writer.refuse("a", "not finite")
        writer.add("b", good)
        for key, message in (
            ("a", "comes twice"),
            ("b", "comes twice"),
            ("c.d", "cannot be the key"),
            ("", "cannot"),
        ):
            with pytest.raises(UserError, match=message):
                writer.add(key, good)
        future = writer.finish()
        with pytest.raises(UserError, match="already"):
            writer.finish()
    record = future.result(60).record
    assert [(r.key, r.reason) for r in record.refused] == [("a", "not finite")]
    assert [sample.key for sample in record.samples] == ["b"]
    assert read_record(run.store, 0) == record
    assert record.made_with == {"torch": "2.13"}


def test_a_run_that_stores_final_states_gets_them(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    identity = run.identity.model_copy(update={"final_state": "pre_norm"})
    tensors = sample_tensors(0, 6, LAYERS, HIDDEN)
    with Uploader(run.store, settings) as uploader, ShardWriter(
        uploader, run.store, identity, 0, made_with={}
    ) as writer:  # fmt: skip
        with pytest.raises(SampleError, match="lacks final_state"):
            writer.add("a", tensors)
        tensors["final_state"] = tensors["hidden_states"][:, 1] * 2
        writer.add("a", tensors)
        record = writer.finish().result(60).record
    body, _ = run.store.get(record.object)
    assert torch.equal(decode(members(body)["a.safetensors"])["final_state"], tensors["final_state"])


def test_a_sample_cut_by_an_interrupt_cannot_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    with Uploader(run.store, settings) as uploader, ShardWriter(
        uploader, run.store, run.identity, 0, made_with={}
    ) as writer:  # fmt: skip
        real, calls = writer._upload.write, []

        def write(data: bytes | memoryview) -> None:
            calls.append(len(data))
            if len(calls) == 3:
                raise KeyboardInterrupt
            real(data)

        monkeypatch.setattr(writer._upload, "write", write)
        with pytest.raises(KeyboardInterrupt):
            writer.add("a", sample_tensors(0, 6, LAYERS, HIDDEN))
        monkeypatch.undo()
        with pytest.raises(UserError, match="a sample is cut"):
            writer.finish()
    assert nothing_left(run.store)


def test_a_failed_upload_reaches_the_producer_and_commits_nothing(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)

    store = RefusingStore(settings)
    run = prepare_run(store, units=1, each=4, validation_units=0, tokens=(1200, 1200), layers=5, hidden=256)
    tensors = sample_tensors(0, 1200, 5, 256)

    def write_until_told() -> None:
        with Uploader(store, settings) as uploader:
            with ShardWriter(uploader, store, run.identity, 0, made_with={}) as writer:
                for number in range(40):
                    writer.add(f"k{number}", tensors)

    with pytest.raises(StoreError, match=r"part \d+ of shards/.*refused"):  # whichever is refused first
        write_until_told()
    assert nothing_left(store)


def test_a_shard_cut_or_not_of_ours_is_not_read_as_one(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    run = small_run(open_store(settings))
    record = write_unit(run.store, run, settings).record
    body, _ = run.store.get(record.object)
    for damaged in (body[:-512], body[:-1], body[:1024], b"", body[:512] + body, bytes(len(body))):
        run.store.put("shards/00/other.tar", damaged)
        with pytest.raises(UserError, match=r"is no whole shard|is damaged"):
            read_index_member(run.store, "shards/00/other.tar", len(damaged))


def test_an_index_larger_than_the_first_look_is_found(tmp_path: Path) -> None:
    settings = local_settings(tmp_path)
    run = prepare_run(
        open_store(settings), units=1, each=800, validation_units=0, tokens=(4, 4), layers=1, hidden=2
    )
    extract_run(run, settings)
    record = read_record(run.store, 0)
    assert len(record.to_bytes()) > 1 << 16
    assert read_index_member(run.store, record.object, record.size).samples == record.samples
