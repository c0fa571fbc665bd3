"""Attention of draft blocks: every block reads the context before its anchor and its own tokens, nothing else.

The rule (`visible_context`, `visible_block`) is written once; three implementations compute the same thing.
`sdpa` masks densely over all blocks at once and is the reference. `grouped` walks over runs of neighbouring
blocks and cuts the context at each run's last anchor: fast where nothing else skips masked pairs. `flex` hands
the rule to flex_attention, whose kernels skip whole tiles on CUDA. Nothing here holds a parameter.

Shapes: B samples, N blocks of L tokens each, S context tokens, d the width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_stream.errors import UserError

Implementation = Literal["sdpa", "grouped", "flex"]
# (query [B, heads, N·L, d], context keys and values [B, kv_heads, S, d], block keys and values
# [B, kv_heads, N·L, d]) → [B, heads, N·L, d]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

RUN_QUERIES = 128  # queries of a run: enough for a full matmul, few enough to cut the context closely
FLEX_TILE = 128  # queries and keys of a flex_attention tile
# Kernels that flex_attention may be compiled into. One is made for each kind of shape (one sample or several, sizes
# that fit one tile or more), for each window, with and without gradients: some twenty; dynamo's own limit is 8.
FLEX_VARIANTS = 64


def resolve(attention: str, device: torch.device) -> Implementation:
    """The implementation that train.attention names: `auto` is flex on CUDA and grouped elsewhere.

    UserError for flex anywhere but on CUDA: it has no backward there.
    """
    if attention == "auto":
        return "flex" if device.type == "cuda" else "grouped"
    if attention == "flex" and device.type != "cuda":
        raise UserError(f"train.attention = flex trains on CUDA only, this is {device.type}: set it to auto")
    if attention not in ("sdpa", "grouped", "flex"):
        raise UserError(f"train.attention = {attention!r}: choose auto, sdpa, grouped or flex")
    return cast(Implementation, attention)


def visible_context(
    anchors: Tensor, keep: Tensor, positions: Tensor, block_tokens: int, window: int | None
) -> Tensor:
    """Which context positions each slot of each block reads.

    anchors [B, N], keep [B, N] bool, positions [S] → [B, N, L, S] bool. Strictly before the anchor: in decoding
    the anchor is the newest token, whose hidden state the target has not computed yet. A window counts the
    query itself: the slot at position p reads positions greater than p - window. Padded blocks read no context.
    """
    before = ((positions < anchors[..., None]) & keep[..., None])[:, :, None]
    if window is None:
        return before.expand(-1, -1, block_tokens, -1)
    slots = anchors[..., None] + torch.arange(block_tokens, device=anchors.device)
    return before & (positions > slots[..., None] - window)


def visible_block(block_tokens: int, window: int | None, device: torch.device) -> Tensor:
    """Which slots of its own block each slot reads, [L, L] bool: all; under a window those up to itself."""
    slot = torch.arange(block_tokens, device=device)
    distance = slot[:, None] - slot[None, :]
    return distance < block_tokens if window is None else (distance >= 0) & (distance < window)


def dense_mask(
    anchors: Tensor, keep: Tensor, start: int, stop: int, block_tokens: int, window: int | None
) -> Tensor:
    """Blocks against context start … stop-1, then against all block keys: [B, 1, N·L, stop-start+N·L] bool."""
    samples, blocks = anchors.shape
    positions = torch.arange(start, stop, device=anchors.device)
    context = visible_context(anchors, keep, positions, block_tokens, window).reshape(
        samples, blocks * block_tokens, -1
    )
    one = visible_block(block_tokens, window, anchors.device)
    own = torch.block_diag(*[one] * blocks).bool().expand(samples, -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def build(
    attention: Implementation,
    anchors: Tensor,
    keep: Tensor,
    *,
    context_tokens: int,
    block_tokens: int,
    window: int | None,
) -> Attend:
    """The attention of one micro-batch for every layer that has this window: masks are made here, once.

    anchors [B, N] int64 and keep [B, N] bool as `blocks.collate` makes them; sorted anchors make it faster.
    """
    if attention == "flex":
        return _build_flex(anchors, keep, context_tokens, block_tokens, window)
    if attention == "grouped":
        return _build_grouped(anchors, keep, block_tokens, window)
    return partial(_masked, mask=dense_mask(anchors, keep, 0, context_tokens, block_tokens, window))


def _masked(query: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, *, mask: Tensor) -> Tensor:
    keys, values = torch.cat([ck, bk], dim=2), torch.cat([cv, bv], dim=2)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def _build_grouped(anchors: Tensor, keep: Tensor, block_tokens: int, window: int | None) -> Attend:
    blocks = max(1, RUN_QUERIES // block_tokens)
    runs = [
        [
            _run(anchors[b : b + 1, i : i + blocks], keep[b : b + 1, i : i + blocks], block_tokens, window)
            for i in range(0, anchors.shape[1], blocks)
        ]
        for b in range(len(anchors))
    ]

    def attend(query: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
        samples = []
        for b, sample_runs in enumerate(runs):
            keys, values = ck[b : b + 1], cv[b : b + 1]
            parts = (x[b : b + 1].split(blocks * block_tokens, dim=2) for x in (query, bk, bv))
            outputs = [
                _masked(q, keys[:, :, read], values[:, :, read], k, v, mask=mask)
                for q, k, v, (read, mask) in zip(*parts, sample_runs, strict=True)
            ]
            samples.append(torch.cat(outputs, dim=2))
        return torch.cat(samples)

    return attend


def _run(anchors: Tensor, keep: Tensor, block_tokens: int, window: int | None) -> tuple[slice, Tensor]:
    """The context that neighbouring blocks of one sample read (none for padding), and their mask."""
    kept = anchors[keep].tolist() or [0]
    stop = max(kept)
    start = 0 if window is None else min(stop, max(0, min(kept) - window + 1))
    return slice(start, stop), dense_mask(anchors, keep, start, stop, block_tokens, window)


def flex_rule(
    anchors: Tensor, keep: Tensor, context_tokens: Tensor, block_tokens: int, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The rule for flex_attention: (sample, head, query, key) → visible; the keys are context, then blocks.

    context_tokens is a scalar tensor and not a number, so that a new length does not compile anew.
    """

    def rule(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // block_tokens, query % block_tokens
        anchor, other = anchors[sample, block], key - context_tokens
        context = (key < context_tokens) & (key < anchor) & keep[sample, block]
        own = (other >= 0) & (other // block_tokens == block)
        if window is None:
            return context | own
        distance = slot - other % block_tokens
        return (context & (key > anchor + slot - window)) | (own & (distance >= 0) & (distance < window))

    return rule


@cache
def _compiled_flex() -> tuple[Any, Any]:
    """flex_attention and create_block_mask, compiled: as they are, both materialise the dense grid.

    fullgraph: past the limit of variants dynamo would run them as they are, in silence and out of memory.
    """
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    config.recompile_limit = max(config.recompile_limit, FLEX_VARIANTS)
    compiled = partial(torch.compile, dynamic=True, fullgraph=True)
    return compiled(flex_attention), compiled(create_block_mask)


def _build_flex(
    anchors: Tensor, keep: Tensor, context_tokens: int, block_tokens: int, window: int | None
) -> Attend:
    if anchors.is_cuda:
        flex_attention, create_block_mask = _compiled_flex()
    else:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    samples, blocks = anchors.shape
    queries = blocks * block_tokens
    length = torch.full((), context_tokens, device=anchors.device)
    rule = flex_rule(anchors, keep, length, block_tokens, window)
    mask = create_block_mask(
        rule, samples, None, queries, context_tokens + queries, device=anchors.device, BLOCK_SIZE=FLEX_TILE
    )

    def attend(query: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor) -> Tensor:
        keys, values = torch.cat([ck, bk], dim=2), torch.cat([cv, bv], dim=2)
        return flex_attention(query, keys, values, block_mask=mask, enable_gqa=True)

    return attend
