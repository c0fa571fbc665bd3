"""From samples to draft blocks: which tokens are anchors, what a block holds, what it is to predict.

A block starts at an anchor a: slot 0 holds the token at a, slots 1 … L-1 hold the mask token. Slot k is trained
to predict the token at a + k (no shift); slot 0 is given and never trained. The choice of anchors is a hash, so
it is equal on every device and for every number of processes. Nothing here knows of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_stream.hashing import mix64
from dflash_stream.stream.sample import Sample


def decay_gamma(block_size: int) -> float:
    """The default decay of the loss: 4, 5, 7 for blocks of 8, 10, 16 (DFlash paper, A.1), linear in between.

    Below 8 it stays half the block, above 16 it goes on rising by a third of a token for each one.
    """
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


def slot_weights(block_size: int, gamma: float) -> Tensor:
    """Weight of each slot, [L] fp32: 0 for slot 0, exp(-(k-1)/gamma) for slot k (DFlash paper, Eq. 4)."""
    slot = torch.arange(block_size, dtype=torch.float64)
    weights = torch.exp(-(slot - 1) / gamma)
    weights[0] = 0
    return weights.float()


def choose_anchors(
    loss_mask: NDArray[np.bool_], count: int, *, seed: int, row: int, epoch: int
) -> NDArray[np.int64]:
    """At most `count` anchors of a sample, sorted.

    loss_mask [T]. A candidate is a supervised token that is followed by another one; those with the smallest
    hash of (seed, row, epoch, position) are taken: a uniform draw without replacement, anew in every epoch.
    """
    mask = np.asarray(loss_mask, dtype=np.bool_)
    candidates = np.flatnonzero(mask[:-1] & mask[1:])
    if len(candidates) > count:
        order = np.argsort(mix64(seed, row, epoch, candidates), kind="stable")
        candidates = np.sort(candidates[order[:count]])
    return candidates.astype(np.int64)


@dataclass(frozen=True)
class Blocks:
    """One micro-batch of draft blocks. Samples are padded on the right to S tokens and N blocks.

    hidden_states [B, S, K, H] bf16    the target's tapped states
    input_ids     [B, S] int64
    anchors       [B, N] int64         sorted in each sample; padding repeats the last one
    keep          [B, N] bool          False for padding
    block_ids     [B, N, L] int64      the anchor's token, then mask tokens
    labels        [B, N, L] int64      the tokens at anchor … anchor + L - 1, 0 where there is none
    weights       [B, N, L] fp32       decay of the slot where its label is supervised, else 0; 0 in slot 0
    """

    hidden_states: Tensor
    input_ids: Tensor
    anchors: Tensor
    keep: Tensor
    block_ids: Tensor
    labels: Tensor
    weights: Tensor

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Blocks:
        """The same on another device."""
        return Blocks(
            **{f.name: getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)}
        )


def collate(
    samples: Sequence[Sample],
    anchors: Sequence[NDArray[np.int64]],
    *,
    block_size: int,
    mask_token_id: int,
    gamma: float,
) -> Blocks:
    """Samples and the anchors chosen in each → one padded micro-batch; no anchors, nothing but padding."""
    B = len(samples)
    S = max(len(sample.input_ids) for sample in samples)
    N = max(1, *(len(chosen) for chosen in anchors))
    taps, hidden_size = samples[0].hidden_states.shape[1:]
    hidden_states = torch.zeros(B, S, taps, hidden_size, dtype=samples[0].hidden_states.dtype)
    # Ids and mask go on for a block past the longest sample: a block that hangs over its end finds no label
    # there.
    input_ids = torch.zeros(B, S + block_size, dtype=torch.int64)
    supervised = torch.zeros(B, S + block_size, dtype=torch.bool)
    padded_anchors = torch.zeros(B, N, dtype=torch.int64)
    keep = torch.zeros(B, N, dtype=torch.bool)
    for b, (sample, chosen) in enumerate(zip(samples, anchors, strict=True)):
        T, n = len(sample.input_ids), len(chosen)
        hidden_states[b, :T] = sample.hidden_states
        input_ids[b, :T] = sample.input_ids
        supervised[b, :T] = sample.loss_mask.bool()
        if n:
            padded_anchors[b, :n] = torch.from_numpy(np.asarray(chosen, dtype=np.int64))
            padded_anchors[b, n:] = int(chosen[-1])
            keep[b, :n] = True
    positions = (padded_anchors[..., None] + torch.arange(block_size)).flatten(1)
    labels = input_ids.gather(1, positions).view(B, N, block_size)
    valid = supervised.gather(1, positions).view(B, N, block_size) & keep[..., None]
    block_ids = torch.full_like(labels, mask_token_id)
    block_ids[..., 0] = labels[..., 0]
    return Blocks(
        hidden_states=hidden_states,
        input_ids=input_ids[:, :S],
        anchors=padded_anchors,
        keep=keep,
        block_ids=block_ids,
        labels=labels,
        weights=valid * slot_weights(block_size, gamma),
    )
