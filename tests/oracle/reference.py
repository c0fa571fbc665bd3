"""Runs beside the package `dflash`: loads a drafter directory as its users do, and writes what it computes.

    python reference.py forward DIRECTORY     inputs.safetensors → outputs.safetensors, read.json
    python reference.py generate DIRECTORY    prompts.json, target/ → answers.json

DIRECTORY is that of a drafter or holds several. Blocks are drafted one at a time, by the inference code: no
training code is published. Imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from dflash import model as published  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file
from torch import Tensor


class Blocks:
    """One sequence and the blocks to draft in it; states [S, (K + 1) · H], the last H of a layer further up."""

    def __init__(self, drafter: published.DFlashDraftModel, inputs: dict[str, Tensor]) -> None:
        self.drafter = drafter
        self.input_ids, self.anchors = inputs["input_ids"], inputs["anchors"]
        self.embedding = inputs["embedding"]
        hidden = drafter.config.hidden_size
        self.states = inputs["states"][None, :, :-hidden]
        self.shifted_states = inputs["states"][None, :, hidden:]

    def block(self, anchor: int) -> Tensor:
        ids = torch.full((1, self.drafter.block_size), self.drafter.mask_token_id)
        ids[0, 0] = self.input_ids[anchor]
        return F.embedding(ids, self.embedding)

    def one_by_one(
        self,
        *,
        context_end: int = 0,
        context_start: int = 0,
        position: int = 0,
        causal: bool | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Each block by itself, without a cache. The arguments are deliberate mistakes."""
        states = self.states if states is None else states
        outputs = []
        for anchor in self.anchors.tolist():
            end = anchor + context_end
            context = torch.arange(context_start, end)
            block = torch.arange(anchor, anchor + self.drafter.block_size) + position
            mask = None
            if causal is not None:
                square = torch.ones(len(block), len(block), dtype=torch.bool)
                own = square.tril() if causal else square
                mask = torch.cat([torch.ones(len(block), len(context), dtype=torch.bool), own], dim=1)[
                    None, None
                ]
            outputs.append(
                self.drafter(
                    position_ids=torch.cat([context, block])[None],
                    noise_embedding=self.block(anchor),
                    target_hidden=states[:, context_start:end],
                    attention_mask=mask,
                )[0]
            )
        return torch.stack(outputs)

    def cached(self) -> Tensor:
        """Each block after the other with the draft cache, as in generation."""
        cache, done, outputs = published._make_cache(self.drafter.config), 0, []
        for anchor in self.anchors.tolist():
            output = self.drafter(
                position_ids=torch.arange(done, anchor + self.drafter.block_size)[None],
                noise_embedding=self.block(anchor),
                target_hidden=self.states[:, done:anchor],
                past_key_values=cache,
                use_cache=True,
            )
            published._crop_to(cache, anchor)
            done = anchor
            outputs.append(output[0])
        return torch.stack(outputs)


def forward(directory: Path, drafter: published.DFlashDraftModel) -> None:
    """What is right, twice, and what each of six mistakes would give."""
    blocks = Blocks(drafter, load_file(directory / "inputs.safetensors"))
    sliding = drafter.config.layer_types[0] == "sliding_attention"
    outputs = {
        "right": blocks.one_by_one(),
        "right, cached": blocks.cached(),
        "positions one late": blocks.one_by_one(position=1),
        "context includes the anchor": blocks.one_by_one(context_end=1),
        "context lacks its last token": blocks.one_by_one(context_end=-1),
        "taps one layer up": blocks.one_by_one(states=blocks.shifted_states),
        "block in the other direction": blocks.one_by_one(causal=not sliding),
    }
    for name in ("hidden_norm.weight", "layers.0.self_attn.k_norm.weight"):
        weight = drafter.get_parameter(name)
        kept = weight.clone()
        weight.fill_(1)
        outputs[f"{name} ignored"] = blocks.one_by_one()
        weight.copy_(kept)
    save_file(outputs, directory / "outputs.safetensors")
    read = {
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": drafter.target_layer_ids,
        "tensors": len(drafter.state_dict()),
        "layer_ids_by_rule": {
            f"{layers},{taps}": published.build_target_layer_ids(layers, taps)
            for layers in range(8, 97)
            for taps in range(1, 9)
        },
    }
    (directory / "read.json").write_text(json.dumps(read))


def generate(directory: Path, drafter: published.DFlashDraftModel) -> None:
    """Speculative decoding at temperature 0: the tokens, and how many each round gained."""
    from transformers import AutoModelForCausalLM

    published._cuda_time = time.perf_counter
    target = AutoModelForCausalLM.from_pretrained(directory / "target", dtype=torch.float32).eval()
    asked = json.loads((directory / "prompts.json").read_text())
    answers = []
    for prompt in asked["prompts"]:
        done = published.dflash_generate(
            drafter, target, torch.tensor([prompt]), asked["new_tokens"], None, return_stats=True
        )
        answers.append({"ids": done.output_ids[0].tolist(), "accepted": done.acceptance_lengths})
    (directory / "answers.json").write_text(json.dumps(answers))


def main() -> None:
    answer, root = {"forward": forward, "generate": generate}[sys.argv[1]], Path(sys.argv[2])
    for directory in [root] if (root / "config.json").exists() else sorted(root.iterdir()):
        drafter = published.DFlashDraftModel.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            answer(directory, drafter)


if __name__ == "__main__":
    main()
