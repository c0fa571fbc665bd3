"""Tiny drafters with weights large enough that a mistake shows, and samples to run them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_stream.stream.sample import Sample
from train.blocks import Blocks, choose_anchors, collate
from train.drafter import Drafter, DrafterConfig

FULL, SLIDING = "full_attention", "sliding_attention"
HIDDEN, TAPS, VOCABULARY, MASK = 32, 3, 40, 39


def tiny_config(**changes: Any) -> DrafterConfig:
    """Three layers, blocks of 4; changes override the fields of the config."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_target_layers": 8,
        "target_layer_ids": [1, 3, 5],
        "mask_token_id": MASK,
        "num_hidden_layers": 3,
        "layer_types": [FULL] * 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "block_size": 4,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "dtype": "float32",
    }
    return DrafterConfig(**values | changes)


def loud_drafter(config: DrafterConfig, seed: int = 0, **options: Any) -> Drafter:
    """Matrices of std 0.25, norms 1 ± 0.2: at the usual 0.02 a wrong mask hardly moves the output."""
    drafter = Drafter(config, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.25 * noise)
    return drafter


def random_sample(tokens: int, row: int = 0, *, prompt: int = 2, dtype: torch.dtype = torch.float32) -> Sample:
    """A sample whose first `prompt` tokens are not supervised."""
    generator = torch.Generator().manual_seed(1000 * row + tokens)
    return Sample(
        key=f"sample-{row}",
        row=row,
        epoch=0,
        input_ids=torch.randint(0, MASK, (tokens,), generator=generator),
        loss_mask=torch.arange(tokens) >= prompt,
        hidden_states=torch.randn(tokens, TAPS, HIDDEN, generator=generator).to(dtype),
    )


def tables(seed: int = 0) -> tuple[Tensor, Tensor]:
    """An embedding and an lm_head, [V, H] each."""
    generator = torch.Generator().manual_seed(seed)
    embedding, head = torch.randn(2, VOCABULARY, HIDDEN, generator=generator)
    return embedding, head


def collated(samples: list[Sample], anchors: int, *, config: DrafterConfig, gamma: float = 3.0) -> Blocks:
    chosen = [choose_anchors(s.loss_mask.numpy(), anchors, seed=0, row=s.row, epoch=s.epoch) for s in samples]
    return collate(samples, chosen, block_size=config.block_size, mask_token_id=MASK, gamma=gamma)
