"""A tiny random target, and a drafter trained on it for a few seconds: it gets some drafts right, not all."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from dflash_stream.config import TargetSettings
from dflash_stream.head import Head
from dflash_stream.stream.sample import Sample
from dflash_stream.target.load import Target, load_target
from tests.tiny_targets import VOCAB, save_tiny
from train.blocks import choose_anchors, collate
from train.drafter import Drafter, DrafterConfig
from train.objective import block_loss

LAYERS, TAPS = 4, [0, 2]
MASK = VOCAB - 1
BLOCK = 6
NEW_TOKENS = 40


def tiny_target(family: str) -> Target:
    """A random target of the family on the CPU in fp32; no token ends its text."""
    with tempfile.TemporaryDirectory() as directory:
        path = save_tiny(family, Path(directory) / family, layers=LAYERS)
        attention: Any = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
        settings = TargetSettings(id=str(path), dtype="float32", attention=attention)
        target = load_target(settings, layers=TAPS, whole=True, device="cpu")
    target.model.generation_config.eos_token_id = None
    target.eos = frozenset()
    return target


def head_of(target: Target) -> Head:
    return Head(
        embed_tokens=target.model.get_input_embeddings().weight,
        lm_head=target.model.get_output_embeddings().weight,
        norm=target.backbone.norm.weight,
        num_layers=LAYERS,
    )


def states_of(target: Target, ids: list[int]) -> Tensor:
    """Tapped states [T, K, H] of one clean forward pass, in fp32."""
    with torch.no_grad():
        states = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[tap + 1][0] for tap in TAPS], dim=1)


def drafter_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": 32, "vocab_size": VOCAB, "num_target_layers": LAYERS, "target_layer_ids": TAPS,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
        "intermediate_size": 64, "block_size": BLOCK, "mask_token_id": MASK,
        "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    return DrafterConfig(**values | changes)


@dataclass(frozen=True)
class Pair:
    """A target, its head, a trained drafter, and the samples it was trained on: random prompts of 9 tokens with
    the target's continuation, which is all that is supervised."""

    target: Target
    head: Head
    drafter: Drafter
    samples: list[Sample]

    @property
    def prompts(self) -> list[list[int]]:
        return [sample.input_ids[:9].tolist() for sample in self.samples]


@cache
def trained_pair(steps: int = 150) -> Pair:
    """About five seconds; made once a session."""
    target = tiny_target("qwen3")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)  # text that does not soon repeat itself
    samples = [_sample(target, row) for row in range(16)]
    head = head_of(target)
    return Pair(target, head, fit(Drafter(drafter_config()).initialize(0), head, samples, steps), samples)


def fit(drafter: Drafter, head: Head, samples: list[Sample], steps: int) -> Drafter:
    """Train a drafter on a few samples until it knows much of them by heart. Returns it."""
    config = drafter.config
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        chosen = [samples[(step * 4 + i) % len(samples)] for i in range(4)]
        anchors = [choose_anchors(np.asarray(s.loss_mask), 16, seed=0, row=s.row, epoch=step) for s in chosen]
        blocks = collate(
            chosen, anchors, block_size=config.block_size, mask_token_id=config.mask_token_id, gamma=3.0
        )
        hidden = drafter(
            F.embedding(blocks.block_ids, head.embed_tokens),
            drafter.project(blocks.hidden_states.to(head.embed_tokens.dtype)),
            blocks.anchors,
            blocks.keep,
        )
        sums = block_loss(hidden, head.lm_head, blocks.labels, blocks.weights, chunk_rows=4096)
        (sums.loss_sum / sums.weight_sum).backward()
        clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def _sample(target: Target, row: int) -> Sample:
    prompt = torch.randint(0, MASK, (9,)).tolist()
    ids = prompt + target.greedy([prompt], NEW_TOKENS)[0]
    mask = torch.arange(len(ids)) >= len(prompt)
    states = states_of(target, ids)
    return Sample(
        f"sample-{row}", row, 0, torch.tensor(ids), mask, states, torch.tensor(ids), states, len(prompt)
    )
