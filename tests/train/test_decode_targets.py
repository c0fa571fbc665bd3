"""The live loop against targets of every kind of cache, with drafts that are right and wrong by design."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_stream.config import TargetSettings
from dflash_stream.target.layers import dflash_layers
from dflash_stream.target.load import load_target
from tests.tiny_targets import FAMILIES, VOCAB
from tests.train.tiny_pair import BLOCK, LAYERS, NEW_TOKENS, TAPS, states_of, tiny_target
from train.decode import rounds_of, speculative_generate
from train.verifier import Verifier

PROMPT = [5, 17, 3, 44, 8, 23, 61, 9, 90, 31, 12]  # longer than the window of the sliding ones
RECURRENT = ("qwen3_5", "qwen3_5_wrapper")
HEAD: Any = SimpleNamespace(embed_tokens=torch.eye(VOCAB), lm_head=torch.eye(VOCAB), norm=None)


class Prophet:
    """A drafter that knows the text, and is wrong in slots chosen by a formula: every acceptance length occurs."""

    def __init__(self, text: list[int], *, wrong: bool = True) -> None:
        self.config = SimpleNamespace(block_size=BLOCK, mask_token_id=0, target_layer_ids=TAPS)
        self.text, self.wrong = text, wrong
        self.states: list[Tensor] = []

    def drafts(self, start: int) -> list[int]:
        """The drafts for the positions behind `start`."""
        places = range(start - len(PROMPT) + 1, start - len(PROMPT) + BLOCK)
        known = [self.text[p] if p < len(self.text) else 0 for p in places]
        broken = start * 7919 % (BLOCK + 1) if self.wrong else 0
        return [(t + 1) % VOCAB if slot + 1 == broken else t for slot, t in enumerate(known)]

    def project(self, states: Tensor) -> Tensor:
        self.states.append(states[0])
        return states

    def draft(self, embeddings: Tensor, context: Tensor, cache: Any, start: int) -> Tensor:
        assert sum(map(len, self.states)) == start, "the context of a draft ends right before its anchor"
        return F.one_hot(torch.tensor([[0, *self.drafts(start)]]), VOCAB).float()


def generate(target: Any, prophet: Prophet, new_tokens: int = NEW_TOKENS) -> Any:
    drafter: Any = prophet
    return speculative_generate(target, drafter, HEAD, PROMPT, new_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_rejected_drafts_leave_no_trace_in_the_text(family: str) -> None:
    target = tiny_target(family)
    (text,) = target.greedy([PROMPT], NEW_TOKENS)
    made = generate(target, Prophet(text))
    assert made.tokens == text
    assert sum(made.lengths) == NEW_TOKENS - 1
    assert set(made.lengths) >= {1, 2, 3, 4, BLOCK}


@pytest.mark.parametrize("family", FAMILIES)
def test_states_handed_to_the_drafter_are_those_of_one_clean_forward(family: str) -> None:
    target = tiny_target(family)
    (text,) = target.greedy([PROMPT], NEW_TOKENS)
    prophet = Prophet(text)
    generate(target, prophet)
    got = torch.cat(prophet.states)
    assert len(got) > len(PROMPT) + 20
    torch.testing.assert_close(got, states_of(target, PROMPT + text)[: len(got)], atol=1e-3, rtol=1e-3)


def test_smollm2_writes_its_own_text_whatever_is_drafted(smollm2: Path) -> None:
    """A real checkpoint, with its own vocabulary, template tokens and end token."""
    settings = TargetSettings(id=str(smollm2), dtype="float32")
    taps = dflash_layers(30, 5)
    target = load_target(settings, layers=taps, whole=True, device="cpu")
    prompt = [1, 4093, 198, 19556, 506, 253, 1789, 30, 2, 198, 1, 520, 9531, 198]
    (text,) = target.greedy([prompt], 20)
    assert len(set(text)) > 8
    embedding = target.model.get_input_embeddings().weight
    head: Any = SimpleNamespace(embed_tokens=embedding, lm_head=F.normalize(embedding, dim=-1))

    class Known(Prophet):
        def draft(self, embeddings: Tensor, context: Tensor, cache: Any, start: int) -> Tensor:
            ids = torch.tensor([[0, *self.drafts(start - len(prompt) + len(PROMPT))]])
            return head.lm_head[ids]  # of all rows of a normalised table, a row is nearest to itself

    known: Any = Known(text)
    known.config.target_layer_ids = taps
    made = speculative_generate(target, known, head, prompt, 20)
    assert made.tokens == text
    assert 1 in made.lengths
    assert max(made.lengths) > 2
    states = torch.cat(known.states)
    clean = target.states([prompt + text])[0][: len(states)]
    torch.testing.assert_close(states.bfloat16(), clean, atol=0.1, rtol=0.02)


def test_perfect_drafts_need_one_forward_a_block() -> None:
    target = tiny_target("qwen3")
    (text,) = target.greedy([PROMPT], 31)
    made = generate(target, Prophet(text, wrong=False), 31)
    assert made.lengths == [BLOCK] * 5
    assert made.target_forwards == 5


@pytest.mark.parametrize("family", RECURRENT)
def test_replays_of_a_recurrent_target_are_counted(family: str) -> None:
    target = tiny_target(family)
    (text,) = target.greedy([PROMPT], NEW_TOKENS)
    made = generate(target, Prophet(text))
    replayed = sum(length < BLOCK for length in made.lengths[:-1])
    assert made.target_forwards == len(made.lengths) + replayed > len(made.lengths)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("place", [0, 1, 5, 6, 13])
def test_text_ends_with_the_first_end_token(place: int, wrong: bool) -> None:
    target = tiny_target("qwen3")
    (text,) = target.greedy([PROMPT], NEW_TOKENS)
    end = text[place]
    target.eos = frozenset({end})
    made = generate(target, Prophet(text, wrong=wrong))
    assert made.tokens == text[: text.index(end) + 1]
    assert sum(made.lengths) == len(made.tokens) - 1


@pytest.mark.parametrize("limit", range(1, 14))
def test_cut_round_counts_what_the_text_still_took(limit: int) -> None:
    target = tiny_target("qwen3")
    (text,) = target.greedy([PROMPT], 20)
    made = generate(target, Prophet(text, wrong=False), limit)
    assert made.tokens == text[:limit]
    assert made.lengths == rounds_of([BLOCK - 1] * limit, limit)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [1, 2, 4])
def test_tokens_are_taken_back_as_if_they_had_never_been(family: str, kept: int) -> None:
    target = tiny_target(family)
    tokens = [9, 8, 7, 6]
    verifier = Verifier(target, [LAYERS - 1])
    verifier.extend(torch.tensor(PROMPT), last=True)
    verifier.extend(torch.tensor(tokens))
    verifier.keep(kept)
    after, states = verifier.extend(torch.tensor([50, 51]))
    clean, clean_states = Verifier(target, [LAYERS - 1]).extend(torch.tensor([*PROMPT, *tokens[:kept], 50, 51]))
    assert after.tolist() == clean[-2:].tolist()
    torch.testing.assert_close(states, clean_states[-2:], atol=1e-3, rtol=1e-3)
