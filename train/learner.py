"""From samples to sums: what a drafter makes of a micro-batch, in training and in validation alike.

Anchors are chosen, blocks collated, embedded with the frozen table of the target, taken through the drafter and
through the frozen lm_head. Weights are fp32; with `bf16` the matmuls run under autocast, and the frozen tables
are held in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

import torch
from torch.nn import functional as F

from dflash_stream.config import TrainSettings
from dflash_stream.head import Head
from dflash_stream.stream.sample import Sample
from train import attention
from train.blocks import Blocks, choose_anchors, collate, decay_gamma
from train.drafter import Drafter
from train.objective import LossSums, block_loss


def compute_dtype(settings: TrainSettings) -> torch.dtype:
    """What activations and the frozen tables are held in."""
    return torch.bfloat16 if settings.precision == "bf16" else torch.float32


@dataclass(frozen=True)
class Learner:
    """A drafter with all that it needs to be measured on samples. `head` is on `device`, in the compute dtype."""

    drafter: Drafter
    head: Head
    settings: TrainSettings
    device: torch.device

    def blocks(self, samples: Sequence[Sample]) -> Blocks | None:
        """The draft blocks of some samples, on the host; None when none of them has an anchor."""
        settings, config = self.settings, self.drafter.config
        anchors = [
            choose_anchors(
                sample.loss_mask.numpy(),
                settings.anchors,
                seed=settings.seed,
                row=sample.row,
                epoch=sample.epoch,
            )
            for sample in samples
        ]
        if not any(len(chosen) for chosen in anchors):
            return None
        return collate(
            samples,
            anchors,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            gamma=settings.loss_gamma or decay_gamma(config.block_size),
        )

    def pinned(self, blocks: Blocks) -> Blocks:
        """The same in memory that a GPU copies from while it computes."""
        return Blocks(**{field.name: getattr(blocks, field.name).pin_memory() for field in fields(blocks)})

    def measure(self, blocks: Blocks) -> LossSums:
        """Loss sum (with its graph, where gradients are on) and counts of some blocks."""
        on_device = blocks.to(self.device, non_blocking=True)
        with self.autocast():
            context = self.drafter.project(on_device.hidden_states.to(self.head.embed_tokens.dtype))
            hidden = self.drafter(
                F.embedding(on_device.block_ids, self.head.embed_tokens),
                context,
                on_device.anchors,
                on_device.keep,
                attention=attention.resolve(self.settings.attention, self.device),
            )
            return block_loss(
                hidden,
                self.head.lm_head,
                on_device.labels,
                on_device.weights,
                chunk_rows=self.settings.head_chunk_rows,
            )

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which the drafter computes."""
        if compute_dtype(self.settings) is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)
