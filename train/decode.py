"""How many tokens a target's forward pass yields when a drafter drafts for it: the acceptance length.

Two ways to the same list of rounds. The *walk* needs no target: over a text that the target wrote by itself
(greedily) and the states that were stored with it, the drafter drafts at every place at once, and the rounds
are read off. The *live loop* decodes with the real target, and is the proof that the walk is right. Reports and
intervals are `evaluate`'s; the target's cache is `verifier`'s.

What a round is. It begins at an anchor, the last token decided so far. The drafter fills a block of B slots
with it, slots 1 … B-1 are its drafts; the target accepts the leading ones that equal its own greedy choice, and
adds one token of its own. The acceptance length of the round is what it adds to the text: accepted drafts + 1,
in 1 … B.

The ends. The first token comes from the prompt's own forward pass, before any draft: it is the first anchor,
and is not counted. The text ends at the end-of-text token (which belongs to it), or after max_new_tokens; the
last round is cut there and counts what the text still took: min(accepted + 1, tokens left). So the lengths of
all rounds sum to the tokens of the continuation less one. The block is drafted in full in the last round too,
as a server does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_stream.head import Head
from dflash_stream.target.load import Target, cut_at_end
from train.drafter import Drafter, DrafterCache
from train.verifier import Verifier

ANCHORS_AT_ONCE = 256  # of a text that go through the drafter together


# --- the walk


@torch.inference_mode()
def leading_matches(
    drafter: Drafter,
    head: Head,
    input_ids: Tensor,
    hidden_states: Tensor,
    anchors: Tensor,
) -> Tensor:
    """For each anchor, how many leading drafts equal the text.

    input_ids [T] int64; hidden_states [T, K, H], the tapped states of these tokens; anchors [N] int64, sorted,
    in 1 … T-1. Slots behind the text match nothing. → int64 [N] on the host, in 0 … B-1.

    Only a slot whose predecessors all match goes through lm_head: one row an anchor for a drafter that knows
    nothing, not B-1.
    """
    device, dtype = head.embed_tokens.device, head.embed_tokens.dtype
    ids = input_ids.to(device)
    block_size = drafter.config.block_size
    found = torch.zeros(len(anchors), dtype=torch.int64)
    if not len(anchors):
        return found
    context = drafter.project(hidden_states[None, : int(anchors[-1])].to(device, dtype))
    for first in range(0, len(anchors), ANCHORS_AT_ONCE):
        chunk = anchors[first : first + ANCHORS_AT_ONCE].to(device)
        blocks = F.embedding(_blocks(ids[chunk], block_size, drafter.config.mask_token_id), head.embed_tokens)
        keep = torch.ones(1, len(chunk), dtype=torch.bool, device=device)
        hidden = drafter(blocks[None], context[:, : int(chunk[-1])], chunk[None], keep, attention="grouped")[0]
        alive = torch.arange(len(chunk), device=device)
        for slot in range(1, block_size):
            alive = alive[chunk[alive] + slot < len(ids)]
            if not len(alive):
                break
            drafts = F.linear(hidden[alive, slot], head.lm_head).argmax(dim=-1)
            alive = alive[drafts == ids[chunk[alive] + slot]]
            found[first + alive.cpu()] += 1
    return found


def rounds_of(matches: Sequence[int], tokens: int) -> list[int]:
    """Acceptance lengths of the rounds over a continuation of `tokens` tokens.

    matches[i]: leading matches with the i-th token of the continuation as the anchor (its last token needs
    none).
    """
    lengths: list[int] = []
    place = 0
    while place < tokens - 1:
        length = min(1 + matches[place], tokens - 1 - place)
        lengths.append(length)
        place += length
    return lengths


def acceptance_walk(
    drafter: Drafter, head: Head, input_ids: Tensor, hidden_states: Tensor, prompt_tokens: int
) -> list[int]:
    """Acceptance length of every round over the target's own text, without the target.

    input_ids [P+N] int64, prompt and greedy continuation; hidden_states [P+N, K, H]; prompt_tokens P ≥ 1. The
    list is the one that `speculative_generate` makes for this prompt, up to rounding. A continuation of fewer
    than two tokens has no round.
    """
    tokens = len(input_ids) - prompt_tokens
    anchors = prompt_tokens + torch.arange(max(0, tokens - 1))
    matches = leading_matches(drafter, head, input_ids, hidden_states, anchors)
    return rounds_of(matches.tolist(), tokens)


def slot_acceptance(lengths: Sequence[int], block_size: int) -> tuple[list[int], list[int]]:
    """From the rounds of one text: (rounds that accepted slot k, rounds that could have), k = 1 … B-1.

    A round that the end of the text cut says nothing of the slots for which the text had no room: slot k is
    counted where at least k + 1 tokens were left.
    """
    accepted, offered = [0] * (block_size - 1), [0] * (block_size - 1)
    left = list(accumulate(reversed(lengths)))[::-1]
    for length, room in zip(lengths, left, strict=True):
        for slot in range(1, min(block_size, room)):
            offered[slot - 1] += 1
            accepted[slot - 1] += length > slot
    return accepted, offered


# --- the live loop


@dataclass(frozen=True)
class Generation:
    """A continuation. tokens: without the prompt, end-of-text included; lengths: acceptance length of each
    round; target_forwards: passes of the target after the prompt's, those that replay accepted tokens
    included."""

    tokens: list[int]
    lengths: list[int]
    target_forwards: int


@torch.inference_mode()
def speculative_generate(
    target: Target, drafter: Drafter, head: Head, prompt_ids: Sequence[int], max_new_tokens: int
) -> Generation:
    """Decode greedily with drafts: the text is the target's own greedy text, whatever the drafter is worth.

    target: loaded whole, on the device of drafter and head; prompt_ids: at least one token; max_new_tokens ≥ 1.
    In float32 the text is equal token for token; in bfloat16 a near-tie of two logits can fall either way when
    tokens are verified together.
    """
    verifier, drafts = Verifier(target, drafter.config.target_layer_ids), _Drafts(drafter, head)
    successors, states = verifier.extend(torch.tensor(list(prompt_ids), device=target.device), last=True)
    tokens, lengths = successors.tolist(), list[int]()
    while len(tokens) < max_new_tokens and tokens[-1] not in target.eos:
        start = len(prompt_ids) + len(tokens) - 1
        block = torch.cat([successors.new_tensor(tokens[-1:]), drafts.draft(tokens[-1], states, start)])
        block = block[: max_new_tokens - len(tokens)]  # what the text has no room for is not verified
        successors, states = verifier.extend(block)
        accepted = int((block[1:] == successors[:-1]).long().cumprod(0).sum())
        added = cut_at_end(successors[: accepted + 1].tolist(), target.eos)
        tokens += added
        lengths.append(len(added))
        states = states[: len(added)]
        if len(tokens) < max_new_tokens and tokens[-1] not in target.eos:
            verifier.keep(len(added))
    return Generation(tokens, lengths, verifier.forwards - 1)


class _Drafts:
    """The drafter at work on one text: feeds it the states that are new, and keeps its cache."""

    def __init__(self, drafter: Drafter, head: Head) -> None:
        self._drafter, self._head, self._cache = drafter, head, DrafterCache()

    def draft(self, anchor: int, states: Tensor, start: int) -> Tensor:
        """The B-1 drafts [B-1] behind `anchor`, the token at position `start`; states [n, K, H] are those since
        the last draft, positions start-n … start-1."""
        head, config = self._head, self._drafter.config
        ids = _blocks(torch.tensor([anchor], device=states.device), config.block_size, config.mask_token_id)
        context = self._drafter.project(states[None].to(head.embed_tokens.dtype))
        hidden = self._drafter.draft(F.embedding(ids, head.embed_tokens), context, self._cache, start)
        return F.linear(hidden[0, 1:], head.lm_head).argmax(dim=-1)


def _blocks(anchor_ids: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """[N] → [N, B]: each anchor, then masks."""
    blocks = anchor_ids.new_full((len(anchor_ids), block_size), mask_token_id)
    blocks[:, 0] = anchor_ids
    return blocks
