"""Our forward passes against the published inference code, on equal weights and inputs, and its sensitivity."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_stream.stream.sample import Sample
from dflash_stream.target.layers import dflash_layers
from tests.oracle.environment import ask
from tests.train.drafter_cases import FULL, HIDDEN, MASK, SLIDING, TAPS, loud_drafter, tables, tiny_config
from train.blocks import collate
from train.drafter import Drafter, DrafterCache

ANCHORS = [1, 3, 4, 9, 11, 20, 21, 33, 46]
KINDS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": [FULL] * 3},
    "sliding": {"layer_types": [SLIDING] * 3, "sliding_window": 7},
    "mixed": {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 7},
}


class Case:
    """One kind of drafter, its weights, a sequence, and what the published code made of them."""

    def __init__(self, directory: Path, kind: dict[str, Any]) -> None:
        self.directory = directory
        directory.mkdir()
        self.drafter: Drafter = loud_drafter(tiny_config(block_size=6, rope_theta=5000.0, **kind)).eval()
        generator = torch.Generator().manual_seed(3)
        self.states = torch.randn(50, TAPS + 1, HIDDEN, generator=generator)
        self.input_ids = torch.randint(0, MASK, (50,), generator=generator)
        self.embedding, _ = tables()
        inputs = {
            "input_ids": self.input_ids,
            "anchors": torch.tensor(ANCHORS),
            "embedding": self.embedding,
            "states": self.states.flatten(1),
        }
        save_file(inputs, directory / "inputs.safetensors")
        save_file(self.drafter.state_dict(), directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.drafter.config.to_json()))

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        return load_file(self.directory / "outputs.safetensors")

    @cached_property
    def read(self) -> dict[str, Any]:
        return json.loads((self.directory / "read.json").read_text())

    @torch.no_grad()
    def trained(self, attention: str) -> Tensor:
        """All blocks at once, as in training."""
        sample = Sample("s", 0, 0, self.input_ids, torch.ones(50, dtype=torch.bool), self.states[:, :TAPS])
        blocks = collate([sample], [np.array(ANCHORS)], block_size=6, mask_token_id=MASK, gamma=1.0)
        context = self.drafter.project(blocks.hidden_states)
        embedded = self.embedding[blocks.block_ids]
        return self.drafter(embedded, context, blocks.anchors, blocks.keep, attention=attention)[0]  # type: ignore[arg-type]

    def drafted(self) -> Tensor:
        """One block after the other with our cache, as in decoding."""
        context = self.drafter.project(self.states[None, :, :TAPS])
        cache, outputs = DrafterCache(), []
        for anchor in ANCHORS:
            ids = torch.tensor([[int(self.input_ids[anchor])] + [MASK] * 5])
            new = context[:, cache.tokens : anchor]
            outputs.append(self.drafter.draft(self.embedding[ids], new, cache, anchor)[0])
        return torch.stack(outputs)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("kinds")
    made = {name: Case(root / name, kind) for name, kind in KINDS.items()}
    ask("forward", root)  # one process for all of them: its seconds go into imports
    return made


@pytest.fixture(params=list(KINDS))
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


@pytest.mark.parametrize("attention", ["sdpa", "grouped"])
@pytest.mark.parametrize("published", ["right", "right, cached"])
def test_the_training_forward_is_the_published_inference(case: Case, attention: str, published: str) -> None:
    difference = (case.trained(attention) - case.outputs[published]).abs().max().item()
    assert difference < 1e-4


def test_our_decoding_is_the_published_inference(case: Case) -> None:
    assert (case.drafted() - case.outputs["right"]).abs().max().item() < 1e-4


def test_each_deliberate_mistake_would_show(case: Case) -> None:
    """The comparison above is worth something: a thousand times its tolerance lies between right and wrong."""
    trained = case.trained("sdpa")
    differences = {
        name: (trained - output).abs().max().item()
        for name, output in case.outputs.items()
        if not name.startswith("right")
    }
    assert len(differences) == 7
    assert all(difference > 0.1 for difference in differences.values()), differences


def test_the_published_code_reads_our_config_as_we_meant_it(case: Case) -> None:
    config = case.drafter.config
    assert case.read["block_size"] == config.block_size
    assert case.read["mask_token_id"] == config.mask_token_id
    assert case.read["target_layer_ids"] == config.target_layer_ids
    assert case.read["tensors"] == len(case.drafter.state_dict())


def test_the_tapped_layers_are_those_of_the_published_rule(case: Case) -> None:
    for pair, layers in case.read["layer_ids_by_rule"].items():
        num_layers, num_taps = map(int, pair.split(","))
        if len(set(layers)) == num_taps and min(layers) >= 0:
            assert dflash_layers(num_layers, num_taps) == layers, pair
