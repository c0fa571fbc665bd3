"""`prepare` as a whole, from files to a run in a store: what it writes, refuses, repeats and leaves out."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from dflash_stream import config, layout
from dflash_stream.errors import UserError
from dflash_stream.head import WEIGHTS, load_head, load_tokenizer
from dflash_stream.prepare import pipeline, prepare
from dflash_stream.prepare.viewer import show
from dflash_stream.run import Run, SampleTable
from dflash_stream.shards.codec import raw_payload_bytes
from dflash_stream.shards.tar import member_bytes
from dflash_stream.store import LocalStore, Store, StoreError, open_store

ROOT = Path(__file__).resolve().parents[2]
Prepare = Callable[..., Run]


@pytest.fixture(scope="session")
def target(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random target with SmolLM2's tokenizer and template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
            num_hidden_layers=8, tie_word_embeddings=True,
        )
    ).save_pretrained(directory)  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, directory)
    return directory


@pytest.fixture
def run_prepare(target: Path, tmp_path: Path) -> Prepare:
    """prepare(inputs, **settings of the section) into tmp_path/run, or `url`."""

    def call(*inputs: Path | str, url: str = f"file://{tmp_path}/run", **settings: Any) -> Run:
        return prepare(make_config(target, url, *inputs, **settings), log=lines.append)

    lines: list[str] = []
    call.lines = lines  # type: ignore[attr-defined]
    return call


def make_config(target: Path, url: str, *inputs: Path | str, **settings: Any) -> config.Config:
    defaults = {"workers": 1, "layers": [1, 3], "validation_fraction": 0.0, "unit_bytes": 1 << 20}
    section = {**defaults, "inputs": [str(path) for path in inputs], **settings}
    return config.build({"store": {"url": url}, "target": {"id": str(target)}, "prepare": section})


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def tokenised(count: int, seed: int = 0, length: int = 60) -> list[dict[str, Any]]:
    """Rows of random tokens, each with the second half supervised."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        size = int(random.integers(4, length))
        mask = [int(i >= size // 2) for i in range(size)]
        rows.append({"input_ids": random.integers(0, 49152, size).tolist(), "loss_mask": mask})
    return rows


def chats(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"Say {i}."},
                {"role": "assistant", "content": f"I say {i}, gladly."},
            ]
        }
        for i in range(count)
    ]


def contents(store: Store) -> dict[str, bytes]:
    """Every object of a run, run.json included."""
    return {info.key: store.get(info.key)[0] for info in store.list("")}


def in_order(table: SampleTable) -> list[tuple[str, int]]:
    return list(zip(table.source, table.row.tolist(), strict=True))


# --- what is written


def test_chats_become_units_whose_samples_are_those_of_the_table(run_prepare: Prepare) -> None:
    run = run_prepare(ROOT / "data/chats_heldout.jsonl", max_tokens=300, validation_fraction=0.3)
    identity, table = run.identity, run.samples
    assert identity.samples == len(table) == 30  # two have no answer within 300 tokens
    assert identity.tokens == int(table.tokens.sum())
    assert identity.text.chat_template_sha256
    assert identity.tensors["hidden_states"] == {"shape": "[T, 2, 8]", "dtype": "bfloat16"}
    assert 0 < identity.validation.samples < 20
    place = 0
    for unit in range(identity.units):
        for sample in run.unit(unit):
            assert sample.key == table.key[place]
            assert table.unit[place] == unit
            assert len(sample.input_ids) == len(sample.loss_mask) == table.tokens[place] <= 300
            assert sample.loss_mask.sum() == table.supervised[place]
            assert sample.loss_mask[-1] == 1
            assert sample.input_ids.dtype == np.int32
            place += 1
    assert place == len(table)
    assert len(set(table.key)) == place
    units = table.unit[table.validation]
    assert units.max() == identity.validation.units - 1
    assert table.unit[~table.validation].min() == identity.validation.units


def test_what_is_supervised_is_the_answers_text(run_prepare: Prepare, tmp_path: Path) -> None:
    run = run_prepare(write_jsonl(tmp_path / "c.jsonl", chats(5)))
    tokenizer = load_tokenizer(run.store)
    for sample, row in zip(run.unit(0), run.samples.row.tolist(), strict=True):
        assert tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) == f"I say {row}, gladly.<|im_end|>"


def test_the_run_lands_in_s3_with_its_head(s3_url: str, target: Path, run_prepare: Prepare) -> None:
    run_prepare(ROOT / "data/chats_heldout.jsonl", url=s3_url)
    run = Run.open(open_store(config.build({"store": {"url": s3_url}}).store))
    assert len(run.samples) == sum(len(run.unit(unit)) for unit in range(run.identity.units)) == 32
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target)
    head = load_head(run.store)
    assert torch.equal(head.embed_tokens, model.get_input_embeddings().weight)
    assert head.num_layers == 8


def test_units_go_up_with_more_requests_than_allowed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(900, length=400))
    settings = make_config(target, f"file://{tmp_path}/run", path)
    settings = settings.model_copy(
        update={"store": settings.store.model_copy(update={"max_concurrent_uploads": 2})}
    )
    put, flying, seen = LocalStore.put, [], []

    def slow(self: LocalStore, key: str, body: bytes, **conditions: Any) -> str:
        flying.append(key)
        seen.append(len(flying))
        time.sleep(0.2)
        flying.remove(key)
        return put(self, key, body, **conditions)

    monkeypatch.setattr(LocalStore, "put", slow)
    assert prepare(settings, log=lambda line: None).identity.units > 4
    assert max(seen) == 2


def test_units_hold_as_many_bytes_as_they_may(run_prepare: Prepare, tmp_path: Path) -> None:
    run = run_prepare(write_jsonl(tmp_path / "t.jsonl", tokenised(900, length=400)))
    sizes = np.zeros(run.identity.units, np.int64)
    for unit, tokens in zip(run.samples.unit.tolist(), run.samples.tokens.tolist(), strict=True):
        sizes[unit] += member_bytes(raw_payload_bytes(tokens, 2, 8))
    largest = member_bytes(raw_payload_bytes(400, 2, 8))
    assert len(sizes) > 3
    assert (sizes <= 1 << 20).all()
    assert (sizes[:-1] > (1 << 20) - largest).all()


def test_every_format_gives_the_same_run(run_prepare: Prepare, tmp_path: Path) -> None:
    """Rows in plain and compressed JSONL, in Parquet, over several files and globs."""
    rows = tokenised(40)
    url = f"file://{tmp_path}/{{}}"
    plain = run_prepare(write_jsonl(tmp_path / "rows", rows), url=url.format("plain"))
    packed = tmp_path / "z"
    packed.mkdir()
    (packed / "rows").write_bytes(gzip.compress((tmp_path / "rows").read_bytes()))
    table = tmp_path / "p"
    table.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), table / "rows", row_group_size=7)
    for name, files in {"gzip": packed, "parquet": table}.items():
        other = run_prepare(files / "*", url=url.format(name))
        assert other.identity == plain.identity
    halves = tmp_path / "h"
    halves.mkdir()
    write_jsonl(halves / "a.jsonl", rows[:20])
    write_jsonl(halves / "b.jsonl", rows[20:])
    split = run_prepare(halves / "*.jsonl", url=url.format("split"))
    assert sorted(in_order(split.samples)) == [
        (name, row) for name in ("a.jsonl", "b.jsonl") for row in range(20)
    ]


def test_chats_in_parquet_equal_chats_in_jsonl(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = chats(6)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    rows[2]["messages"][1]["tool_calls"] = [call]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c")
    table = run_prepare(tmp_path / "c", url=f"file://{tmp_path}/a")
    (tmp_path / "c").unlink()
    lines = run_prepare(write_jsonl(tmp_path / "c", rows), url=f"file://{tmp_path}/b")
    assert table.identity == lines.identity


# --- the same run again


def test_order_and_bytes_do_not_depend_on_the_number_of_workers(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [*tokenised(700), "broken\n", *tokenised(700, seed=1)])
    alone = run_prepare(path, url=f"file://{tmp_path}/one", workers=1, validation_fraction=0.1)
    many = run_prepare(path, url=f"file://{tmp_path}/many", workers=2, validation_fraction=0.1)
    assert contents(alone.store) == contents(many.store)
    assert in_order(alone.samples) != sorted(in_order(alone.samples))


def test_the_seed_alone_changes_the_order(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(200))
    settings: dict[str, Any] = {"validation_fraction": 0.1}
    first = run_prepare(path, url=f"file://{tmp_path}/0", **settings).samples
    other = run_prepare(path, url=f"file://{tmp_path}/1", seed=1, **settings).samples
    assert in_order(first) != in_order(other)
    assert sorted(in_order(first)) == sorted(in_order(other))
    held_out = [sorted(np.array(t.row)[t.validation].tolist()) for t in (first, other)]
    assert held_out[0] == held_out[1]


def test_a_subset_is_the_beginning_of_the_whole(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(200))
    whole = run_prepare(path, url=f"file://{tmp_path}/whole").samples
    few = run_prepare(path, url=f"file://{tmp_path}/few", max_samples=17).samples
    assert in_order(few) == in_order(whole)[:17]
    short = run_prepare(path, url=f"file://{tmp_path}/short", max_total_tokens=1000).samples
    assert in_order(short) == in_order(whole)[: len(short)]
    assert 1000 - 60 < short.tokens.sum() <= 1000


def test_a_prepared_run_is_left_alone(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(50))
    before = contents(run_prepare(path).store)
    run = run_prepare(path)
    assert contents(run.store) == before
    assert "prepared already" in run_prepare.lines[-1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"max_tokens": 40},
            r"text\.max_tokens \(prepare\.max_tokens\): the run has 2048, these settings give 40",
        ),
        ({"truncation": "drop"}, r"text\.truncation \(prepare\.truncation\): the run has 'right'"),
        ({"codec": "fp8"}, r"codec \(prepare\.codec\): the run has 'bf16'"),
        ({"layers": [1, 2]}, r"layers \(prepare\.layers\): the run has \[1, 3\]"),
        ({"max_samples": 9}, r"samples: the run has 50, these settings give 9"),
    ],
)
def test_other_settings_are_refused_by_name(
    run_prepare: Prepare, tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(50))
    before = contents(run_prepare(path).store)
    with pytest.raises(UserError, match=told):
        run_prepare(path, **settings)
    assert contents(open_store(make_config(tmp_path, f"file://{tmp_path}/run").store)) == before


def test_the_thinking_mode_of_chats_is_recorded(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", chats(5))
    assert run_prepare(path, thinking=False).identity.text.thinking is False
    with pytest.raises(UserError, match=r"text\.thinking \(prepare\.thinking\): the run has False"):
        run_prepare(path, thinking=True)


def test_other_data_are_refused(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(50))
    run_prepare(path)
    write_jsonl(path, tokenised(50, seed=5))
    with pytest.raises(UserError, match="samples_sha256"):
        run_prepare(path)


@pytest.mark.parametrize("fatal", [1, 4, 7])
def test_an_interrupted_run_repeated_is_the_run_that_was_never_interrupted(
    run_prepare: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(900, length=400))
    whole = contents(run_prepare(path, url=f"file://{tmp_path}/whole", max_samples=600).store)
    broken = f"file://{tmp_path}/broken"
    failing(monkeypatch, fatal)
    with pytest.raises(StoreError, match="lost"):
        run_prepare(path, url=broken)  # would have had more units than the repetition
    monkeypatch.undo()
    assert layout.RUN not in contents(open_store(make_config(tmp_path, broken).store))
    repeated = contents(run_prepare(path, url=broken, max_samples=600).store)
    assert repeated == whole


def failing(monkeypatch: pytest.MonkeyPatch, put: int) -> None:
    """Makes the put of that number, and all after it, fail."""
    made = 0

    def open_failing(settings: Any) -> Store:
        store = open_store(settings)
        real = store.put

        def put_or_fail(key: str, body: bytes, **conditions: Any) -> str:
            nonlocal made
            made += key.startswith((layout.TOKENS, layout.HEAD, layout.RUN))
            if made >= put:
                raise StoreError("lost")
            return real(key, body, **conditions)

        store.put = put_or_fail  # type: ignore[method-assign,assignment]
        return store

    monkeypatch.setattr(pipeline, "open_store", open_failing)


# --- bad rows


def test_bad_rows_are_listed_with_their_number_and_stored(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = [*chats(18), "{not json\n", "\n", {"messages": [{"role": "user", "content": "?"}]}]
    run = run_prepare(write_jsonl(tmp_path / "c.jsonl", rows), max_rejected_fraction=0.1)
    stored = [json.loads(line) for line in run.store.get("tokens/rejected.jsonl")[0].splitlines()]
    assert [(entry["row"], entry["kind"]) for entry in stored] == [(18, "rejected"), (20, "rejected")]
    assert stored[0]["reason"].startswith("not JSON")
    assert stored[0]["reason"].endswith("at character 2")
    shown = "\n".join(run_prepare.lines)  # type: ignore[attr-defined]
    assert "c.jsonl row 20: no assistant message" in shown
    assert "20 read, 2 rejected" in shown


def test_too_many_bad_rows_stop_it(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [*chats(18), {"x": 1}, {"y": 1}])
    with pytest.raises(UserError, match=r"2 of 20 rows are rejected \(10.0%\).*\n.*no messages"):
        run_prepare(path)
    assert not (tmp_path / "run" / "run.json").exists()


def test_wrong_settings_are_noticed_before_the_whole_dataset_is_read(
    run_prepare: Prepare, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"x": 1}] * 5000)
    with pytest.raises(UserError, match="all of the first 1024 rows are rejected"):
        run_prepare(path)


def test_an_empty_result_says_why(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1]}] * 3
    with pytest.raises(UserError, match=r"3 rows gave no sample\n  3 × no two consecutive supervised tokens"):
        run_prepare(write_jsonl(tmp_path / "t.jsonl", rows))
    with pytest.raises(UserError, match="no rows"):
        run_prepare(write_jsonl(tmp_path / "empty.jsonl", []))
    with pytest.raises(UserError, match="no training samples"):
        run_prepare(write_jsonl(tmp_path / "t.jsonl", tokenised(5)), max_total_tokens=1)


def test_inputs_that_cannot_be_read_say_so(run_prepare: Prepare, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prepare\.inputs is empty"):
        run_prepare()
    with pytest.raises(UserError, match="matches no file"):
        run_prepare(tmp_path / "*.jsonl")
    (tmp_path / "array.json").write_text('[{"messages": []}]')
    with pytest.raises(UserError, match="jq -c"):
        run_prepare(tmp_path / "array.json")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="has the columns text"):
        run_prepare(tmp_path / "t.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:60])
    with pytest.raises(UserError, match=r"cannot read .*cut\.parquet"):
        run_prepare(tmp_path / "cut.parquet")


def test_a_mask_over_everything_stops_it_but_long_answers_do_not(
    run_prepare: Prepare, target: Path, tmp_path: Path
) -> None:
    marked = shutil.copytree(target, tmp_path / "marked")
    (marked / "chat_template.jinja").write_text(
        "{% generation %}{% for m in messages %}{{ m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% endgeneration %}"
    )
    with pytest.raises(UserError, match=r"100.00% of the tokens are supervised.*--show"):
        prepare(make_config(marked, f"file://{tmp_path}/run", write_jsonl(tmp_path / "c.jsonl", chats(5))))
    long = chats(3)
    for row in long:
        row["messages"][1]["content"] = "word " * 1500
    run_prepare(write_jsonl(tmp_path / "c.jsonl", long))
    assert "above 95%" in run_prepare.lines[-3]  # type: ignore[attr-defined]


def test_hardly_any_supervision_stops_it_unless_it_came_tokenised(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = chats(3)
    for row in rows:
        row["messages"][0]["content"] = "word " * 1500
        row["messages"][1]["content"] = "yes"
    with pytest.raises(UserError, match=r"only 0.1\d% of the tokens are supervised"):
        run_prepare(write_jsonl(tmp_path / "c.jsonl", rows))
    ids = {"input_ids": [7] * 1000, "loss_mask": [0] * 998 + [1, 1]}
    assert run_prepare(write_jsonl(tmp_path / "t.jsonl", [ids])).identity.text.tokenizer_sha256 is None


# --- held-out data


def test_no_prompt_is_both_held_out_and_trained_on(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = [{"input_ids": [p % 40, 9, p, p, p + 1], "loss_mask": [0, 0, 1, 1, 1]} for p in range(200)]
    run = run_prepare(
        write_jsonl(tmp_path / "t.jsonl", rows), validation_fraction=0.2, max_validation_samples=12
    )
    table = run.samples
    prompts = table.row % 40
    assert table.validation.sum() == 12
    assert not set(prompts[table.validation].tolist()) & set(prompts[~table.validation].tolist())
    assert 150 < (~table.validation).sum() <= 188  # candidates over the limit are trained on


def test_given_held_out_files_are_used_and_kept_out_of_training(run_prepare: Prepare, tmp_path: Path) -> None:
    held_out = write_jsonl(tmp_path / "v.jsonl", chats(3))
    run = run_prepare(
        write_jsonl(tmp_path / "c.jsonl", chats(10)), validation_inputs=[str(held_out)], validation_fraction=0.5
    )
    table = run.samples
    assert [name for name, held in zip(table.source, table.validation, strict=True) if held] == ["v.jsonl"] * 3
    assert sorted(table.row[~table.validation].tolist()) == list(range(3, 10))
    assert any("3 left out of training" in line for line in run_prepare.lines)  # type: ignore[attr-defined]


def test_a_file_cannot_be_both_training_and_held_out(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", chats(3))
    with pytest.raises(UserError, match="both in"):
        run_prepare(path, validation_inputs=[str(path)])


def test_turns_each_holds_out_whole_conversations(run_prepare: Prepare, tmp_path: Path) -> None:
    rows = chats(60)
    for i, row in enumerate(rows):
        row["messages"] += chats(1000 + i)[-1]["messages"]
    run = run_prepare(write_jsonl(tmp_path / "c.jsonl", rows), turns="each", validation_fraction=0.2)
    table = run.samples
    assert len(table) == 120
    held_out = set(table.row[table.validation].tolist())
    assert held_out
    assert not held_out & set(table.row[~table.validation].tolist())


# --- others


def test_layers_follow_the_dflash_rule_and_are_checked(run_prepare: Prepare, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", tokenised(3))
    assert run_prepare(path, layers=None, num_taps=3).identity.layers == [1, 3, 5]
    with pytest.raises(UserError, match="decoder layers 0 to 7"):
        run_prepare(path, layers=[1, 8])


def test_show_marks_what_is_supervised(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [*chats(2), {"x": 1}, *chats(5)])
    settings = make_config(target, f"file://{tmp_path}/run", path)
    show(settings, 3, console=Console(width=200, color_system=None))
    printed = capsys.readouterr().out
    assert printed.count("⟦") == 3
    assert "<|im_start|>assistant\n⟦I say 1, gladly.<|im_end|>⟧" in printed
    assert "c.jsonl row 2: no messages" in printed
    show(settings, 1, console=Console(width=200, force_terminal=True, color_system="standard"))
    printed = capsys.readouterr().out
    assert "⟦" not in printed
    assert "\x1b[1;32mI say 0, gladly.<|im_end|>\x1b[0m" in printed
    assert not (tmp_path / "run").exists()


def test_shards_of_a_run_that_is_gone_are_taken_for_the_new_ones(run_prepare: Prepare, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", tokenised(20))
    store = run_prepare(source).store
    store.put(layout.record(0), b"{}")
    store.delete([layout.RUN])
    with pytest.raises(
        UserError, match=r"left of a run without its run\.json.*shard-000000\.json.*another store\.url"
    ):
        run_prepare(source, seed=1)


def test_what_was_deleted_from_a_run_stays_missing(run_prepare: Prepare, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", tokenised(20))
    store = run_prepare(source).store
    before = contents(store)
    for key in (layout.unit_tokens(0), layout.SAMPLES, WEIGHTS):
        store.delete([key])
        run = Run.open(store)
        if key != WEIGHTS:
            with pytest.raises(UserError, match=rf"{key} is missing: run dflash-stream prepare again"):
                assert [run.unit(0), run.samples]
        with pytest.raises(UserError, match="another run"):
            run_prepare(source, seed=1)
        run_prepare(source)
        assert contents(store) == before
