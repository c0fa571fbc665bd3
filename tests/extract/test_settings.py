"""A process that was given other settings than the run's is refused, and one that was given none joins."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_stream import layout
from dflash_stream.config import Config, StoreSettings, build
from dflash_stream.errors import UserError
from dflash_stream.extract.settings import check_settings, check_target
from dflash_stream.run import Identity, Run
from dflash_stream.store import open_store
from dflash_stream.target.identity import describe_target, target_settings
from tests.tiny_runs import publish_at
from tests.tiny_targets import save_tiny


@pytest.fixture
def run(tiny_llama: Path, tmp_path: Path) -> Run:
    return publish_at(f"file://{tmp_path}/run", tiny_llama, units=1)


def given(**values: Any) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        section, name = dotted.split("__")
        sections.setdefault(section, {})[name] = value
    return build(sections)


OTHERS = [
    ("target__id", "someone/other", "target.id", "someone/other"),
    ("target__dtype", "bfloat16", "dtype", "bfloat16"),
    ("prepare__layers", [1, 2], "layers", r"\[1, 2\]"),
    ("prepare__codec", "fp8", "codec", "fp8"),
    ("prepare__final_state", "pre_norm", "final_state", "pre_norm"),
    ("prepare__seed", 7, "seed", "7"),
    ("prepare__unit_bytes", 1 << 30, "unit_bytes", str(1 << 30)),
    ("prepare__max_tokens", 99, "text.max_tokens", "99"),
    ("prepare__num_taps", 2, "layers", r"\[1, 5\]"),
    ("prepare__validation_new_tokens", 999, "validation.new_tokens", "999"),
]


@pytest.mark.parametrize(("setting", "value", "field", "shown"), OTHERS)
def test_a_differing_setting_is_mixed_into_the_run(
    run: Run, setting: str, value: Any, field: str, shown: str
) -> None:
    with pytest.raises(
        UserError,
        match=rf"(?s){field}( \([a-z_.]+\))?: the run has .* these settings give .*{shown}.*store\.url",
    ):
        check_settings(run.identity, given(**{setting: value}), run.store.url)


FREE = ["extract__tokens_per_batch", "store__max_concurrent_uploads", "train__epochs", "prepare__workers"]


def test_settings_that_change_no_content_are_refused(run: Run) -> None:
    check_settings(run.identity, given(**dict.fromkeys(FREE, 3)), run.store.url)
    check_settings(run.identity, Config(), run.store.url)
    same = given(prepare__layers=[1, 3, 5], target__dtype="float32", target__id=run.identity.target.id)
    check_settings(run.identity, same, run.store.url)


def test_a_missing_setting_replaces_the_recorded_one(run: Run) -> None:
    settings = target_settings(run.identity, Config().target)
    assert (settings.id, settings.dtype) == (run.identity.target.id, "float32")


def check(identity: Identity, config: Config) -> None:
    check_settings(identity, config, "here")
    check_target(identity, describe_target(target_settings(identity, config.target)), "here")


def test_the_same_model_in_another_directory_is_refused(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "copy")
    check(run.identity, given(target__id=str(tmp_path / "copy")))


def test_another_model_in_a_directory_is_taken(run: Run, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "other", layers=6)
    with pytest.raises(UserError, match=r"target\.num_layers: the run has 8, these settings give 6"):
        check(run.identity, given(target__id=str(tmp_path / "other")))


def test_the_same_shape_with_another_rope_is_taken(run: Run, tiny_llama: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama, tmp_path / "copy")
    config = tmp_path / "copy" / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    with pytest.raises(UserError, match=r"target\.config_sha256"):
        check(run.identity, given(target__id=str(tmp_path / "copy")))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"format"', "delimiter"),
        (b"\xff\xfe\xfa", "decode"),
        (b'{"format": 1}', "15 of its fields are wrong, target: Field required"),
    ],
)
def test_a_damaged_run_json_is_no_readable_error(tmp_path: Path, body: bytes, complaint: str) -> None:
    store = open_store(StoreSettings(url=f"file://{tmp_path}/run"))
    store.put(layout.RUN, body)
    with pytest.raises(UserError, match=rf"run\.json is not valid: .*{complaint}.*another store\.url"):
        Run.open(store)
