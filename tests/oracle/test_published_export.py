"""Our export in the hands of the published code: it loads, computes the same, and accepts the same drafts."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.oracle.environment import ask
from tests.train.tiny_pair import BLOCK, MASK, NEW_TOKENS, states_of, trained_pair
from train.decode import acceptance_walk, speculative_generate
from train.export import CONFIG, load_export, write_directory

ANCHORS = [1, 5, 6, 20, 37]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained drafter as it is published: rounded to bfloat16."""
    directory = tmp_path_factory.mktemp("published")
    drafter = trained_pair().drafter
    weights = {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
    write_directory(directory, weights, {CONFIG: json.dumps(drafter.config.to_json()).encode()})
    return directory


@torch.no_grad()
def test_published_code_computes_our_forward_from_our_export(exported: Path) -> None:
    pair = trained_pair()
    sample = pair.samples[0]
    more = sample.hidden_states[:, :1].roll(1, dims=2)  # what the oracle takes for a layer further up
    states = torch.cat([sample.hidden_states, more], dim=1)
    inputs = {
        "input_ids": sample.input_ids,
        "anchors": torch.tensor(ANCHORS),
        "embedding": pair.head.embed_tokens.clone(),
        "states": states.flatten(1),
    }
    save_file(inputs, exported / "inputs.safetensors")
    ask("forward", exported)
    outputs = load_file(exported / "outputs.safetensors")
    _, drafter = load_export(exported, dtype=torch.float32)
    ids = torch.full((1, len(ANCHORS), BLOCK), MASK)
    ids[..., 0] = sample.input_ids[ANCHORS]
    ours = drafter(
        F.embedding(ids, pair.head.embed_tokens), drafter.project(sample.hidden_states[None]),
        torch.tensor([ANCHORS]), torch.ones(1, len(ANCHORS), dtype=torch.bool),
    )[0]  # fmt: skip
    assert (ours - outputs["right"]).abs().max() < 1e-4
    assert (ours - outputs["taps one layer up"]).abs().max() > 0.1
    assert json.loads((exported / "read.json").read_text())["tensors"] == len(drafter.state_dict())


def test_published_loop_accepts_the_same_drafts_in_every_round(exported: Path) -> None:
    """Live loop and walk against `dflash_generate`: same text, same rounds.

    It drafts a shorter block where the text has no room for a whole one, which a drafter answers differently:
    rounds are compared up to there.
    """
    pair = trained_pair()
    _, drafter = load_export(exported, dtype=torch.float32)
    pair.target.model.save_pretrained(exported / "target")
    prompts = [*pair.prompts[:8], [3, 1, 4, 1, 5], [9, 2, 6]]
    (exported / "prompts.json").write_text(json.dumps({"prompts": prompts, "new_tokens": NEW_TOKENS}))
    ask("generate", exported)
    answers = json.loads((exported / "answers.json").read_text())
    seen: set[int] = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        live = speculative_generate(pair.target, drafter, pair.head, prompt, NEW_TOKENS)
        assert answer["ids"] == prompt + live.tokens
        states = states_of(pair.target, prompt + live.tokens)
        assert live.lengths == acceptance_walk(
            drafter, pair.head, torch.tensor(answer["ids"]), states, len(prompt)
        )
        whole = sum(done <= NEW_TOKENS - BLOCK for done in accumulate(live.lengths))
        assert answer["accepted"][: whole + 1] == live.lengths[: whole + 1]
        assert sum(answer["accepted"]) == sum(live.lengths)
        seen |= set(live.lengths[: whole + 1])
    assert seen == set(range(1, BLOCK + 1))
