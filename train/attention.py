"""Attention of draft blocks: every block reads the context before its anchor and its own tokens, nothing else.

The rule (`visible_context`, `visible_block`) is written once; three implementations compute the same thing.
`sdpa` masks densely over all blocks at once and is the reference. `grouped` walks over runs of neighbouring blocks and
cuts the context at each run's last anchor, which is what makes it fast where nothing can skip a masked pair.
`flex` hands the rule to flex_attention, whose kernels skip whole tiles on CUDA. Nothing here holds a parameter.

Shapes: B samples, N blocks of L tokens each, S context tokens, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_stream.errors import UserError

Implementation = Literal["sdpa", "grouped", "flex"]
# (query [B, heads, N·L, d], context keys, context values [B, kv_heads, S, d], block keys, block values
# [B, kv_heads, N·L, d]) → [B, heads, N·L, d]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

GROUP_QUERIES = 128  # queries of a run: enough for a full matmul, few enough that their own keys cost little
FLEX_TILE = 128  # keys and queries of a flex_attention tile


def resolve(attention: str, device: torch.device) -> Implementation:
    """The implementation that a setting names: `auto` is flex on CUDA and grouped elsewhere."""
    if attention == "auto":
        return "flex" if device.type == "cuda" else "grouped"
    if attention in ("sdpa", "grouped", "flex"):
        return attention  # type: ignore[return-value]
    raise UserError(f"train.attention = {attention!r}: choose auto, sdpa, grouped or flex")


def visible_context(
    anchors: Tensor, keep: Tensor, positions: Tensor, block_tokens: int, window: int | None
) -> Tensor:
    """Which context positions each slot of each block reads.

    anchors [B, N], keep [B, N] bool, positions [S] → [B, N, L, S] bool. Strictly before the anchor: when the drafter
    runs, the anchor is a token whose hidden state the target has not computed yet. A window counts the query itself:
    the slot at position p reads positions greater than p - window. Padded blocks read no context.
    """
    before = (positions < anchors[..., None]) & keep[..., None]
    if window is None:
        return before[:, :, None].expand(-1, -1, block_tokens, -1)
    slot_positions = anchors[..., None] + torch.arange(block_tokens, device=anchors.device)
    return before[:, :, None] & (positions > slot_positions[..., None] - window)


def visible_block(block_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Which slots of its own block each slot reads, [L, L] bool: all of them, or with a window those up to itself."""
    slot = torch.arange(block_tokens, device=device)
    if window is None:
        return torch.ones(block_tokens, block_tokens, dtype=torch.bool, device=device)
    distance = slot[:, None] - slot[None, :]
    return (distance >= 0) & (distance < window)


def build(
    attention: Implementation,
    anchors: Tensor,
    keep: Tensor,
    *,
    context_tokens: int,
    block_tokens: int,
    window: int | None,
) -> Attend:
    """Masks for one micro-batch, ready to be used by every layer that has this window.

    anchors [B, N] int64, each row sorted, and keep [B, N] bool as `blocks.collate` makes them.
    """
    if attention == "flex":
        return _build_flex(anchors, keep, context_tokens, block_tokens, window)
    if attention == "grouped":
        return _build_grouped(anchors, keep, context_tokens, block_tokens, window)
    mask = dense_mask(anchors, keep, 0, context_tokens, block_tokens, window)
    return partial(_masked, mask=mask)


def dense_mask(
    anchors: Tensor, keep: Tensor, start: int, stop: int, block_tokens: int, window: int | None
) -> Tensor:
    """The mask of blocks against context positions start..stop-1 and their own keys: [B, 1, N·L, stop-start+N·L] bool."""
    samples, blocks = anchors.shape
    queries = blocks * block_tokens
    context = visible_context(
        anchors, keep, torch.arange(start, stop, device=anchors.device), block_tokens, window
    )
    own = torch.block_diag(*[visible_block(block_tokens, window, anchors.device)] * blocks).bool()
    both = torch.cat([context.reshape(samples, queries, -1), own.expand(samples, -1, -1)], dim=-1)
    return both[:, None]


def _masked(query: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, *, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        query, torch.cat([ck, bk], dim=2), torch.cat([cv, bv], dim=2), attn_mask=mask, enable_gqa=True
    )


def _build_grouped(
    anchors: Tensor, keep: Tensor, context_tokens: int, block_tokens: int, window: int | None
) -> Attend:
    blocks_per_run = max(1, GROUP_QUERIES // block_tokens)
    runs = []
    for first in range(0, anchors.shape[1], blocks_per_run):
        part = slice(first, first + blocks_per_run)
        kept = anchors[:, part][keep[:, part]]
        stop = int(kept.max()) if len(kept) else 0
        start = max(0, int(kept.min()) - window + 1) if window is not None and len(kept) else 0
        start, stop = min(start, stop), min(stop, context_tokens)
        mask = dense_mask(anchors[:, part], keep[:, part], start, stop, block_tokens, window)
        runs.append((start, stop, mask))

    def attend(query: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
        size = blocks_per_run * block_tokens
        parts = zip(query.split(size, 2), bk.split(size, 2), bv.split(size, 2), runs, strict=True)
        return torch.cat(
            [
                _masked(q, ck[:, :, start:stop], cv[:, :, start:stop], k, v, mask=mask)
                for q, k, v, (start, stop, mask) in parts
            ],
            dim=2,
        )

    return attend


@cache
def _compiled_flex() -> tuple[Any, Any]:
    """flex_attention and create_block_mask, compiled: uncompiled, both materialise the dense grid."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=True), torch.compile(create_block_mask, dynamic=True)


def flex_rule(anchors: Tensor, keep: Tensor, context_tokens: int, block_tokens: int, window: int | None) -> Any:
    """The rule as a mask function of flex_attention: (sample, head, query, key) → visible, keys = context, then blocks."""

    def rule(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_tokens, query % block_tokens
        anchor = anchors[sample, block]
        in_context = key < context_tokens
        context = in_context & (key < anchor) & keep[sample, block]
        other = key - context_tokens
        own = (~in_context) & (other // block_tokens == block)
        if window is not None:
            distance = slot - other % block_tokens
            context = context & (key > anchor + slot - window)
            own = own & (distance >= 0) & (distance < window)
        return context | own

    return rule


def _build_flex(
    anchors: Tensor, keep: Tensor, context_tokens: int, block_tokens: int, window: int | None
) -> Attend:
    samples, blocks = anchors.shape
    queries = blocks * block_tokens
    if anchors.device.type == "cuda":
        flex_attention, create_block_mask = _compiled_flex()
    else:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        flex_rule(anchors, keep, context_tokens, block_tokens, window),
        samples,
        None,
        queries,
        context_tokens + queries,
        device=anchors.device,
        BLOCK_SIZE=FLEX_TILE,
    )

    def attend(query: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
        keys, values = torch.cat([ck, bk], dim=2), torch.cat([cv, bv], dim=2)
        return flex_attention(query, keys, values, block_mask=mask, enable_gqa=True)

    return attend
