"""The published checkpoint: complete, exactly what was trained, traceable, and refused when it is not whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_stream import layout
from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.store import crc32c, open_store
from dflash_stream.tensorfile import pieces
from tests.train.tiny_pair import drafter_config
from tests.train.tiny_run import make_run, settings
from train.checkpoint import MODEL, load_tensors, newest_checkpoint
from train.drafter import Drafter
from train.export import export, load_export, shapes, write_directory
from train.trainer import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A run with a drafter trained on it for a few steps, and its export in a directory."""
    directory = tmp_path_factory.mktemp("export")
    url = f"file://{directory}/run"
    make_run(url)
    config = settings(url, train={"max_steps": 6, "name": "small"}, drafter={"num_hidden_layers": 2})
    train(config)
    places = export(config, destination=directory / "out")
    assert places == [str(directory / "out"), f"{url}/drafters/small/export/"]
    return config, directory / "out"


def inputs(config: Any) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    taps, hidden = len(config.target_layer_ids), config.hidden_size
    blocks = torch.randn(1, 2, config.block_size, hidden, generator=generator)
    states = torch.randn(1, 12, taps, hidden, generator=generator)
    return blocks, states, torch.tensor([[5, 11]]), torch.ones(1, 2, dtype=torch.bool)


def forward(drafter: Drafter) -> torch.Tensor:
    blocks, states, anchors, keep = inputs(drafter.config)
    with torch.no_grad():
        return drafter(blocks, drafter.project(states), anchors, keep)


def test_export_has_the_published_names_shapes_and_dtype(trained: tuple[Config, Path]) -> None:
    _, directory = trained
    weights = load_file(directory / "model.safetensors")
    layer = {
        "self_attn.q_proj.weight": [32, 32], "self_attn.k_proj.weight": [16, 32],
        "self_attn.v_proj.weight": [16, 32], "self_attn.o_proj.weight": [32, 32],
        "self_attn.q_norm.weight": [16], "self_attn.k_norm.weight": [16],
        "mlp.gate_proj.weight": [64, 32], "mlp.up_proj.weight": [64, 32], "mlp.down_proj.weight": [32, 64],
        "input_layernorm.weight": [32], "post_attention_layernorm.weight": [32],
    }  # fmt: skip
    expected = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    expected |= {"fc.weight": [32, 64], "hidden_norm.weight": [32], "norm.weight": [32]}
    assert {name: list(tensor.shape) for name, tensor in weights.items()} == expected
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    header = (directory / "model.safetensors").read_bytes()
    header = header[8 : 8 + int.from_bytes(header[:8], "little")]
    assert json.loads(header)["__metadata__"] == {"format": "pt"}


def test_reloaded_export_computes_what_the_trained_drafter_does(trained: tuple[Config, Path]) -> None:
    config, directory = trained
    store = open_store(config.store)
    loaded_config, loaded = load_export(directory, dtype=torch.float32)
    original = Drafter(loaded_config)
    load_tensors(store, newest_checkpoint(store, "small"), MODEL, dict(original.named_parameters()))
    assert (forward(original) - forward(Drafter(loaded_config).initialize(0))).abs().max() > 0.1
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.copy_(parameter.bfloat16())
    assert torch.equal(forward(loaded), forward(original))
    assert load_export(directory)[1].fc.weight.dtype == torch.bfloat16


def test_store_holds_the_same_export_as_the_directory(trained: tuple[Config, Path]) -> None:
    config, directory = trained
    store = open_store(config.store)
    for file in ("config.json", "model.safetensors", "provenance.json"):
        assert store.get(layout.exported("small", file))[0] == (directory / file).read_bytes()
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]


def test_served_drafter_can_be_traced_to_its_data(trained: tuple[Config, Path]) -> None:
    config, directory = trained
    run = Run.open(open_store(config.store))
    found = json.loads((directory / "provenance.json").read_text())
    assert found["run"] == run.identity.fingerprint
    assert found["identity"] == run.identity.model_dump(mode="json")
    assert (found["step"], found["drafter"]) == (6, "small")
    assert found["settings"]["train.seed"] == config.train.seed
    assert int(found["model_crc32c"], 16) == crc32c((directory / "model.safetensors").read_bytes())


def test_export_again_replaces_the_old_one(trained: tuple[Config, Path], tmp_path: Path) -> None:
    config, directory = trained
    shutil.copytree(directory, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"old")
    export(config, destination=tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        directory / "model.safetensors"
    ).read_bytes()


def test_interrupted_export_cannot_be_loaded(
    trained: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old config.json must not stand beside new weights, nor half a file under its final name."""
    _, directory = trained
    shutil.copytree(directory, tmp_path / "out")

    def broken(tensor: torch.Tensor) -> memoryview:
        raise KeyboardInterrupt

    monkeypatch.setattr(pieces, "bytes_of", broken)
    weights, text = load_file(directory / "model.safetensors"), (directory / "config.json").read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_directory(tmp_path / "out", weights, {"config.json": text})
    with pytest.raises(UserError, match="is no drafter"):
        load_export(tmp_path / "out")


def _drop(weights: dict[str, torch.Tensor]) -> None:
    del weights["hidden_norm.weight"]


def _rename(weights: dict[str, torch.Tensor]) -> None:
    weights["context_norm.weight"] = weights.pop("hidden_norm.weight")


def _prefix(weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights.pop("norm.weight")


def _reshape(weights: dict[str, torch.Tensor]) -> None:
    weights["fc.weight"] = weights["fc.weight"][:, :-1].contiguous()


def _spoil(weights: dict[str, torch.Tensor]) -> None:
    weights["layers.1.mlp.up_proj.weight"][3, 4] = torch.nan


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        (_drop, "hidden_norm.weight is missing"),
        (_rename, "context_norm.weight is no tensor of a drafter"),
        (_prefix, "model.norm.weight is no tensor"),
        (_reshape, "fc.weight has shape"),
        (_spoil, "layers.1.mlp.up_proj.weight has values that are not finite"),
    ],
)
def test_tensors_that_servers_would_ignore_are_refused(
    trained: tuple[Config, Path], tmp_path: Path, mistake: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    _, directory = trained
    shutil.copytree(directory, tmp_path / "out")
    weights = load_file(directory / "model.safetensors")
    mistake(weights)
    save_file(weights, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=named):
        load_export(tmp_path / "out")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_cut_file_is_refused_with_its_place(trained: tuple[Config, Path], tmp_path: Path, file: str) -> None:
    _, directory = trained
    shutil.copytree(directory, tmp_path / "out")
    whole = (directory / file).read_bytes()
    (tmp_path / "out" / file).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=str(tmp_path / "out")):
        load_export(tmp_path / "out")


def test_drafter_without_a_checkpoint_is_named(trained: tuple[Config, Path]) -> None:
    config, _ = trained
    other = config.model_copy(update={"train": config.train.model_copy(update={"name": "nobody"})})
    with pytest.raises(UserError, match=r"drafters/nobody/.*no checkpoint"):
        export(other)


def test_directory_that_cannot_be_written_is_named(trained: tuple[Config, Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        export(trained[0], destination=tmp_path / "file")


def test_published_geometry_has_58_tensors_for_five_layers() -> None:
    assert len(shapes(drafter_config(num_hidden_layers=5, layer_types=["full_attention"] * 5))) == 58


def test_export_to_s3(s3_url: str) -> None:
    make_run(s3_url, train=16)
    config = settings(s3_url, train={"max_steps": 1})
    train(config)
    (place,) = export(config)
    assert place == f"{s3_url}/drafters/drafter/export/"
    names = {
        info.key.rpartition("/")[2] for info in open_store(config.store).list(layout.exported("drafter", ""))
    }
    assert names == {"config.json", "model.safetensors", "provenance.json"}
