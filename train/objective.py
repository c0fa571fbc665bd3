"""The loss of draft blocks: decayed cross-entropy as sums, and how many leading tokens of each block are right.

Only rows with weight go through the target's lm_head, a chunk at a time, and each chunk's gradient is taken
while its logits are there: no [rows, vocabulary] tensor outlives its chunk, and nothing is computed twice.
Sums, not means: a trainer divides once, by the weight of the whole global batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class LossSums:
    """Sums over a micro-batch; those of several micro-batches add up.

    loss_sum    scalar fp32, Σ weight · cross-entropy; differentiable
    weight_sum  scalar fp32, Σ weight
    correct     [L-1] int64, slots 1 … L-1 whose most likely token is the label
    count       [L-1] int64, slots that have a label
    prefix_sum  scalar int64, Σ over blocks of 1 + the right slots before the first one that is wrong or without
                label: the tokens a round of decoding would gain, were the text the target's own
    blocks      scalar int64, blocks that have a label
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct: Tensor
    count: Tensor
    prefix_sum: Tensor
    blocks: Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """(rows [R, H], lm_head [V, H], labels [R], weights [R]) → (Σ weight · CE, right [R] bool), lm_head frozen.

    The gradient of the rows needs nothing from what follows but one scalar factor, so forward computes it along
    with the loss and backward only scales it: two matmuls, where recomputing the logits would take three.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, lm_head: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        dtype = (
            torch.get_autocast_dtype(rows.device.type)
            if torch.is_autocast_enabled(rows.device.type)
            else lm_head.dtype
        )
        head = lm_head.to(dtype)
        loss_sum = torch.zeros((), dtype=torch.float32, device=rows.device)
        right = torch.empty(len(rows), dtype=torch.bool, device=rows.device)
        gradient = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        for start in range(0, len(rows), chunk_rows):
            part = slice(start, start + chunk_rows)
            log_probabilities = F.log_softmax(F.linear(rows[part].to(dtype), head).float(), dim=-1)
            label = labels[part, None]
            right[part] = log_probabilities.argmax(dim=-1, keepdim=True).eq(label).squeeze(-1)
            loss_sum -= (log_probabilities.gather(-1, label).squeeze(-1) * weights[part]).sum()
            if gradient is not None:
                error = log_probabilities.exp_().scatter_add_(
                    -1, label, torch.full_like(label, -1, dtype=torch.float32)
                )
                gradient[part] = error.mul_(weights[part, None]).to(dtype) @ head
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(right)
        return loss_sum, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient.to(gradient.dtype), None, None, None, None


def block_loss(
    hidden: Tensor, lm_head: Tensor, labels: Tensor, weights: Tensor, *, chunk_rows: int
) -> LossSums:
    """The sums of one micro-batch.

    hidden [B, N, L, H] after the drafter's final norm, lm_head [V, H] (frozen: it gets no gradient), labels and
    weights [B, N, L] as `blocks.collate` makes them. Matmuls run in the autocast dtype, or else in that of
    lm_head; the cross-entropy in fp32. chunk_rows bounds the memory: three times chunk_rows · V fp32 numbers.
    """
    valid = weights > 0
    where = valid.flatten().nonzero().squeeze(-1)
    rows = hidden.flatten(0, -2).index_select(0, where)
    loss_sum, right_rows = _ChunkedCrossEntropy.apply(
        rows, lm_head.detach(), labels.flatten()[where], weights.flatten()[where], chunk_rows
    )
    right = torch.zeros_like(valid).flatten().index_copy(0, where, right_rows).view_as(valid)[..., 1:]
    has_label = valid[..., 1:].any(-1)
    leading = right.long().cumprod(-1).sum(-1)
    return LossSums(
        loss_sum=loss_sum,
        weight_sum=weights.sum(),
        correct=right.flatten(0, -2).sum(0),
        count=valid[..., 1:].flatten(0, -2).sum(0),
        prefix_sum=(leading + 1)[has_label].sum(),
        blocks=has_label.sum(),
    )
