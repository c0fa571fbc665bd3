"""Tiny random targets, and a drafter trained on one of them for a few seconds: enough to accept some drafts, not all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from dflash_stream.head import Head
from dflash_stream.stream.sample import Sample
from train.blocks import choose_anchors, collate
from train.drafter import Drafter, DrafterConfig
from train.objective import block_loss

VOCABULARY = 97
PROMPT = [5, 17, 3, 44, 8, 23, 61, 2, 90, 31, 12]
MASK = 96
TAPS = [0, 2]


def tiny_target(family: str, **changes: Any) -> nn.Module:
    """A random model whose greedy text does not fall into a loop at once."""
    common = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=512, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    configs = {
        "llama": lambda: transformers.LlamaConfig(**common),
        "qwen3": lambda: transformers.Qwen3Config(**common),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **common, sliding_window=9, layer_types=["sliding_attention"] * 3 + ["full_attention"]
        ),
        "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
            **common, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        ),
    }  # fmt: skip
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(configs[family](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model


def own_greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """By the library's own generate, with its own cache."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return made[0, len(prompt) :].tolist()


@dataclass(frozen=True)
class Pair:
    """A target, its head, a trained drafter, and the prompts whose continuations it was trained on."""

    model: Any
    head: Head
    drafter: Drafter
    prompts: list[list[int]]


def states_of(model: Any, ids: list[int]) -> Tensor:
    """Tapped states [T, K, H] of one clean forward pass."""
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[tap + 1][0] for tap in TAPS], dim=1)


def drafter_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = dict(
        hidden_size=48, vocab_size=VOCABULARY, num_target_layers=4, target_layer_ids=TAPS, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=12, intermediate_size=96, block_size=6,
        mask_token_id=MASK, layer_types=["full_attention"] * 2, dtype="float32",
    )  # fmt: skip
    return DrafterConfig(**values | changes)


def head_of(model: Any) -> Head:
    return Head(
        embed_tokens=model.get_input_embeddings().weight.detach(),
        lm_head=model.get_output_embeddings().weight.detach(),
        norm=model.model.norm.weight.detach(),
    )


@cache
def trained_pair(steps: int = 150) -> Pair:
    """About five seconds."""
    model = tiny_target("qwen3")
    head = head_of(model)
    torch.manual_seed(0)
    prompts = torch.randint(0, MASK, (16, 9)).tolist()
    samples = []
    for row, prompt in enumerate(prompts):
        ids = prompt + own_greedy(model, prompt, 40)
        mask = torch.arange(len(ids)) >= len(prompt)
        samples.append(Sample(str(row), row, 0, torch.tensor(ids), mask, states_of(model, ids)))
    drafter = Drafter(drafter_config()).initialize(0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        chosen = [samples[(step * 4 + i) % len(samples)] for i in range(4)]
        anchors = [choose_anchors(np.asarray(s.loss_mask), 16, seed=0, row=s.row, epoch=step) for s in chosen]
        blocks = collate(chosen, anchors, block_size=6, mask_token_id=MASK, gamma=3.0)
        hidden = drafter(
            nn.functional.embedding(blocks.block_ids, head.embed_tokens),
            drafter.project(blocks.hidden_states), blocks.anchors, blocks.keep,
        )  # fmt: skip
        sums = block_loss(hidden, head.lm_head, blocks.labels, blocks.weights, chunk_rows=4096)
        (sums.loss_sum / sums.weight_sum).backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return Pair(model, head, drafter.eval(), prompts)
