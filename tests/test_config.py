"""Settings: every source, every refusal."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dflash_stream.config import Config, command_line, describe_settings, known_settings, load
from dflash_stream.errors import UserError

ROOT = Path(__file__).resolve().parent.parent


def parse(*arguments: str) -> Config:
    return load(command_line("test", ""), list(arguments))[0]


def test_command_line_wins_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("store:\n  url: s3://b/yaml\n  part_bytes: 8388608\ntrain:\n  lr: 1e-3\n")
    settings = parse("--config", str(file), "--store.url=s3://b/line", "--extract.tokens_per_batch", "512")
    assert settings.store.url == "s3://b/line"
    assert settings.store.part_bytes == 8388608
    assert settings.train.lr == 1e-3  # YAML reads 1e-3 as text
    assert settings.extract.tokens_per_batch == 512
    assert settings.train.epochs == Config().train.epochs


def test_lists_maps_and_unset_values_are_read_from_the_command_line() -> None:
    settings = parse(
        "--prepare.layers", "[1, 2]", "--prepare.inputs", "a.jsonl,b.jsonl", "--prepare.thinking", "false",
        "--prepare.template_kwargs", "{preserve_thinking: true}", "--target.revision", "null",
        "--train.betas", "[0.9, 0.99]",
    )  # fmt: skip
    assert settings.prepare.layers == [1, 2]
    assert settings.prepare.inputs == ["a.jsonl", "b.jsonl"]
    assert settings.prepare.thinking is False
    assert settings.prepare.template_kwargs == {"preserve_thinking": True}
    assert settings.target.revision is None
    assert settings.train.betas == (0.9, 0.99)


def test_a_list_is_read_as_typed() -> None:
    settings = parse("--prepare.inputs", "*.jsonl", "--prepare.layers", "5", "--train.betas", "0.9,0.99")
    assert settings.prepare.inputs == ["*.jsonl"]
    assert settings.prepare.layers == [5]
    assert settings.train.betas == (0.9, 0.99)
    assert parse("--prepare.layers", "null").prepare.layers is None


def test_text_that_looks_like_a_date_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {name: 2026-01-31}\nprepare: {template_kwargs: {date_string: 2026-01-31}}\n")
    settings = parse("--config", str(file))
    assert settings.train.name == "2026-01-31"
    assert settings.prepare.template_kwargs == {"date_string": "2026-01-31"}  # as run.json gives it back
    with pytest.raises(UserError, match=r"template_kwargs.a = .*JSON"):
        parse("--prepare.template_kwargs", "{a: !!set {b}}")


def test_a_config_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"store: {url: 's3://caf\xe9/run'}")
    for path in (file, tmp_path):
        with pytest.raises(UserError, match=f"cannot read the config file {path}"):
            parse("--config", str(path))


def test_text_that_looks_like_a_number_stays_text() -> None:
    assert parse("--train.name", "007").train.name == "007"
    assert parse("--target.revision", "1e5").target.revision == "1e5"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--store.ulr", "x"], "did you mean store.url"),
        (["--lr", "1"], "did you mean train.lr"),
        (["--extract.token_per_batch", "1"], "did you mean extract.tokens_per_batch"),
        (["--train.lr", "fast"], "train.lr = 'fast'"),
        (["--train.lr"], "--train.lr needs a value"),
        (["--train.loss_gamma", "0"], "greater than 0"),
        (["--train.betas", "[0.9, 1.0]"], "train.betas.* less than 1"),
        (["--train.epochs", ".inf"], "train.epochs.* finite"),
        (["--store.max_concurrent_uploads", "101"], "less than or equal to 100"),
        (["train.lr", "1"], "unexpected argument 'train.lr'"),
        (["--config", "absent.yaml"], "no config file absent.yaml"),
    ],
)
def test_wrong_arguments_are_refused_with_the_remedy(arguments: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse(*arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stor:\n  url: x\n", "unknown setting stor in .*: did you mean store\\?"),
        ("trian:\n  lr: 1\n", "unknown setting trian in .*: did you mean train\\?"),
        ("store:\n  endpont: x\n", "did you mean store.endpoint"),
        ("store: x\n", "section store must hold settings"),
        ("- a\n", "expected sections"),
        ("store: {\n", "not valid YAML"),
    ],
)
def test_a_mistyped_yaml_is_refused_naming_file_and_setting(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=expected):
        parse("--config", str(file))


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_that_come_with_the_project_are_valid(file: Path) -> None:
    assert parse("--config", str(file)).target.id


PURE_NUMBERS = {  # shares, ratios, ids and seeds, and what the optimizer and the norms have no unit for
    "prepare.validation_fraction", "prepare.max_rejected_fraction", "prepare.seed", "extract.max_bad_fraction",
    "drafter.mask_token_id", "drafter.rope_theta", "drafter.rms_norm_eps", "train.lr", "train.min_lr_ratio",
    "train.warmup_fraction", "train.weight_decay", "train.max_grad_norm", "train.seed",
}  # fmt: skip


def test_help_shows_every_setting_with_its_unit_and_default() -> None:
    lines = describe_settings(tuple(Config.model_fields)).splitlines()
    without_unit = set()
    for name, field in known_settings().items():
        (place,) = [n for n, line in enumerate(lines) if line.startswith(f"  --{name} ")]
        kind, shown = lines[place].split()[-1], lines[place + 1]
        assert field.description
        unit = field.json_schema_extra["unit"]
        if field.default in (None, "", [], {}):
            assert shown.endswith(f"(default unset, in {unit})" if unit else "(default unset)"), name
        elif unit:
            assert shown.endswith(f"(default {field.default} {unit})"), name
        elif kind in ("INT", "FLOAT"):
            assert shown.endswith(f"(default {field.default})"), name
        if kind in ("INT", "FLOAT") and not unit:
            without_unit.add(name)
    assert without_unit == PURE_NUMBERS
    text = "\n".join(lines)
    assert "(default 16 requests)" in text
    assert "(default true)" in text
    assert "(default [0.9, 0.95])" in text


def test_both_daily_commands_show_their_settings(
    run_command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    extract = run_command("python", "extract.py", "--help").stdout
    train = run_command("python", "train_drafter.py", "--help").stdout
    assert "--extract.tokens_per_batch" in extract
    assert "--train.batch_samples" in train


def test_an_unknown_setting_ends_a_command_with_one_line(
    run_command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_command("python", "extract.py", "--store.ulr", "x", check=False)
    assert done.returncode == 1
    assert (
        done.stderr.strip() == "error: unknown setting store.ulr in the command line: did you mean store.url?"
    )
