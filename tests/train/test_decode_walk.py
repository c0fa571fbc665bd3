"""The teacher-forced walk: the same rounds as the live loop, found without the target."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.train.tiny_pair import NEW_TOKENS, Pair, drafter_config, states_of, trained_pair
from train import decode
from train.decode import (
    Generation,
    acceptance_walk,
    leading_matches,
    rounds_of,
    slot_acceptance,
    speculative_generate,
)
from train.drafter import Drafter

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]  # and those that the drafter was trained on


@cache
def live_rounds() -> tuple[Pair, list[tuple[list[int], Generation, Tensor]]]:
    """The pair, and for each prompt: prompt, what the live loop made of it, tapped states of the whole text."""
    pair = trained_pair()
    made = []
    for prompt in [*pair.prompts[:8], *PROMPTS]:
        live = speculative_generate(pair.target, pair.drafter, pair.head, prompt, NEW_TOKENS)
        made.append((prompt, live, states_of(pair.target, prompt + live.tokens)))
    return pair, made


def walks(drafter: Drafter, shift: int = 0) -> list[list[int]]:
    pair, made = live_rounds()
    found = []
    for prompt, live, states in made:
        ids = torch.tensor(prompt + live.tokens)
        found.append(acceptance_walk(drafter, pair.head, ids, states.roll(shift, 0), len(prompt)))
    return found


def mean(lengths: list[list[int]]) -> float:
    return sum(map(sum, lengths)) / sum(map(len, lengths))


def test_live_text_is_the_targets_own() -> None:
    pair, made = live_rounds()
    for prompt, live, _ in made:
        assert live.tokens == pair.target.greedy([prompt], NEW_TOKENS)[0]
        assert live.target_forwards == len(live.lengths)


def test_walk_and_live_loop_disagree_on_no_round() -> None:
    pair, made = live_rounds()
    lengths = walks(pair.drafter)
    assert lengths == [live.lengths for _, live, _ in made]
    assert {1, 2, 3, 4, 5, 6} == {length for rounds in lengths for length in rounds}, (
        "too easy or too hard to tell"
    )


def test_walk_and_live_loop_agree_for_sliding_layers() -> None:
    pair, made = live_rounds()
    config = drafter_config(layer_types=["sliding_attention", "full_attention"], sliding_window=7)
    drafter = Drafter(config)
    drafter.load_state_dict(pair.drafter.state_dict())
    lengths = walks(drafter)
    assert max(length for rounds in lengths for length in rounds) > 2
    assert lengths == [
        speculative_generate(pair.target, drafter, pair.head, prompt, NEW_TOKENS).lengths
        for prompt, _, _ in made
    ]


def test_untrained_drafter_gains_nothing() -> None:
    assert mean(walks(Drafter(drafter_config()).initialize(0))) < 1.1
    assert mean(walks(trained_pair().drafter)) > 2


@pytest.mark.parametrize("shift", [1, -1])
def test_states_one_token_off_cost_acceptance(shift: int) -> None:
    drafter = trained_pair().drafter
    assert mean(walks(drafter, shift)) < mean(walks(drafter)) - 0.5


def test_chunks_of_anchors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = trained_pair().drafter
    whole = walks(drafter)
    monkeypatch.setattr(decode, "ANCHORS_AT_ONCE", 7)
    assert walks(drafter) == whole


def test_matches_are_those_of_every_slot_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a drafter run once for each anchor and all B-1 slots put through lm_head."""
    pair, made = live_rounds()
    prompt, live, states = made[0]
    ids = torch.tensor(prompt + live.tokens)
    anchors = torch.arange(1, len(ids))
    expected = []
    for anchor in anchors.tolist():
        block = torch.full((1, 1, 6), pair.drafter.config.mask_token_id)
        block[..., 0] = ids[anchor]
        with torch.no_grad():
            hidden = pair.drafter(
                F.embedding(block, pair.head.embed_tokens), pair.drafter.project(states[None, :anchor]),
                torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool),
            )  # fmt: skip
        drafts = (hidden[0, 0, 1:] @ pair.head.lm_head.T).argmax(-1)
        text = ids[anchor + 1 : anchor + 6]
        expected.append(int((drafts[: len(text)] == text).long().cumprod(0).sum()))
    assert leading_matches(pair.drafter, pair.head, ids, states, anchors).tolist() == expected
    assert max(expected) == 5


def test_text_without_a_second_token_has_no_round() -> None:
    pair, made = live_rounds()
    prompt, _, states = made[0]
    for new_tokens in (0, 1):
        ids = torch.arange(len(prompt) + new_tokens)
        assert acceptance_walk(pair.drafter, pair.head, ids, states[: len(ids)], len(prompt)) == []


@pytest.mark.parametrize(
    ("matches", "tokens", "rounds"),
    [
        ([0, 0, 0, 0], 5, [1, 1, 1, 1]),
        ([2, 9, 9, 1, 9], 6, [3, 2]),  # from token 0 to 3 to 5, the last
        ([7, 9, 9, 9, 9], 6, [5]),  # the text had room for five, the bonus token included
        ([1, 9, 0, 5], 5, [2, 1, 1]),  # the last token cannot be an anchor
        ([], 1, []),
        ([], 0, []),
    ],
)
def test_rounds_follow_each_other_without_gap_or_overlap(
    matches: list[int], tokens: int, rounds: list[int]
) -> None:
    assert rounds_of(matches, tokens) == rounds
    assert sum(rounds) == max(0, tokens - 1)


@pytest.mark.parametrize(
    ("lengths", "accepted", "offered"),
    [
        ([1, 3, 4, 2], [3, 2, 1], [4, 3, 3]),  # the last round has room for 2 tokens: only its slot 1 is judged
        ([4, 4], [2, 2, 2], [2, 2, 2]),
        ([1], [0, 0, 0], [0, 0, 0]),  # one token left: whether it was drafted or added is not known
        ([], [0, 0, 0], [0, 0, 0]),
    ],
)
def test_slots_are_counted_where_the_text_had_room(
    lengths: list[int], accepted: list[int], offered: list[int]
) -> None:
    assert slot_acceptance(lengths, 4) == (accepted, offered)


def test_bfloat16_states_are_taken_in_the_heads_dtype() -> None:
    pair, made = live_rounds()
    prompt, live, states = made[0]
    ids: Any = torch.tensor(prompt + live.tokens)
    lengths = acceptance_walk(pair.drafter, pair.head, ids, states.bfloat16(), len(prompt))
    assert sum(lengths) == len(live.tokens) - 1
