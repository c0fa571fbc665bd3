"""What is cut from a sample, what is dropped, and how rows that came tokenised are checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflash_stream.config import PrepareSettings
from dflash_stream.prepare.chats import BadRow
from dflash_stream.prepare.samples import Limits, Maker, cut_sample, parse_tokens, records
from dflash_stream.prepare.spill import bucket_of
from dflash_stream.prepare.template import Renderer
from dflash_stream.prepare.units import Cutter


def cut(mask: str, max_tokens: int, truncation: str = "right") -> int | str:
    """The length that is left of a sample with this mask, or why it is dropped."""
    bits = np.array([int(bit) for bit in mask], np.uint8)
    left = cut_sample(np.arange(len(bits), dtype=np.int32), bits, max_tokens, truncation)
    return left if isinstance(left, str) else len(left[0])


def test_a_sample_ends_after_its_last_supervised_token() -> None:
    assert cut("00110100", 100) == 6


def test_a_long_sample_is_cut_on_the_right_and_ended_anew() -> None:
    assert cut("0110001110", 6) == 3
    assert cut("0110001110", 7) == 7
    assert cut("0110001110", 9) == 9


def test_a_long_sample_is_dropped_by_setting() -> None:
    assert cut("0110001110", 8, "drop") == "longer than 8 tokens"
    assert cut("0110001110", 9, "drop") == 9  # the tail behind the last supervised token does not count


def test_samples_without_an_anchor_are_dropped() -> None:
    assert cut("0101010", 100) == "no two consecutive supervised tokens"
    assert cut("0000000011", 5) == "no supervised token among the first 5"
    assert cut("0000100011", 5) == "no two consecutive supervised tokens"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2]}, "without loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids but a loss_mask of 1"),
        ({"input_ids": [1, 99], "loss_mask": [1, 1]}, "token id 99 is outside"),
        ({"input_ids": [-1, 1], "loss_mask": [1, 1]}, "token id -1 is outside"),
        ({"input_ids": [1.5, 1], "loss_mask": [1, 1]}, "flat lists of integers"),
        ({"input_ids": ["a"], "loss_mask": [1]}, "flat lists of integers"),
        ({"input_ids": [[1]], "loss_mask": [1]}, "flat lists of integers"),
        ({"input_ids": [1, [2]], "loss_mask": [1, 1]}, "not a flat list"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "other than 0 and 1"),
        ({"input_ids": [], "loss_mask": []}, "flat lists|no tokens"),
    ],
)
def test_a_bad_tokenised_row_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        parse_tokens(row, 50)


def maker(limit: int = 1000, **settings: Any) -> Maker:
    def no_renderer() -> Renderer:
        raise AssertionError("a tokenised row needs no tokenizer")

    return Maker(PrepareSettings(**settings), Limits(50, limit), no_renderer)


def test_rows_are_refused_one_by_one_with_number_and_reason() -> None:
    good = {"input_ids": [5, 6, 7, 8], "loss_mask": [False, True, True, False]}
    rows: list[tuple[int, Any]] = [
        (3, good), (4, [1]), (5, BadRow("not JSON")), (6, {**good, "loss_mask": [0] * 4}), (7, good),
    ]  # fmt: skip
    made = maker().make(0, "a.jsonl", rows)
    assert [(r.row, r.rejected) for r in made.refused] == [(4, True), (5, True), (6, False)]
    assert [r.reason for r in made.refused][1:] == ["not JSON", "no supervised token"]
    found = list(records(made.meta, made.payload))
    assert [int(record.meta["row"]) for record in found] == [3, 7]
    assert found[0].input_ids.tolist() == [5, 6, 7]
    assert found[0].loss_mask.tolist() == [0, 1, 1]
    assert made.meta["order"][0] != made.meta["order"][1]  # equal content, apart in the shuffle
    assert made.meta["group"][0] == made.meta["group"][1]  # but held out together


def test_samples_without_a_prompt_are_held_out_all_together() -> None:
    rows = [(i, {"input_ids": [5, 6, i], "loss_mask": [1, 1, 1]}) for i in range(4)]
    assert len(set(maker().make(0, "a.jsonl", rows).meta["group"].tolist())) == 4


def test_a_reason_quotes_a_whole_row() -> None:
    row = {"messages": [{"role": "x" * 10_000, "content": "a"}]}
    renderer: Any = SimpleNamespace(tokens=None)
    refused = Maker(PrepareSettings(), Limits(50, 10), lambda: renderer).make(0, "a.jsonl", [(0, row)]).refused
    assert refused[0].reason.startswith("message 0: unknown role 'xxx")
    assert len(refused[0].reason) == 400


def test_too_few_supervised_tokens_drop_and_a_sample_over_the_member_limit_is_refused() -> None:
    row = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]}
    assert maker(min_supervised_tokens=3).make(0, "a", [(0, row)]).refused[0].reason.startswith("fewer than 3")
    refused = maker(limit=2).make(0, "a", [(0, row)]).refused[0]
    assert refused.rejected
    assert "8 GiB" in refused.reason


def units(sizes: list[int], unit_bytes: int) -> list[int]:
    cutter = Cutter(unit_bytes)
    return [cutter.place(size) for size in sizes]


def test_units_are_filled_in_order_and_never_beyond_their_size() -> None:
    assert units([3, 3, 4, 1, 9, 12, 1], 10) == [0, 0, 0, 1, 1, 2, 3]


def test_training_samples_never_share_a_unit_with_held_out_ones() -> None:
    cutter = Cutter(100)
    cutter.close()  # nothing was held out: no empty unit
    assert cutter.place(1) == 0
    cutter.close()
    assert cutter.place(1) == 1


def test_buckets_keep_the_order_of_the_hash() -> None:
    places = np.sort(np.random.default_rng(0).integers(0, 2**64, 5000, dtype=np.uint64))
    for buckets in (1, 3, 64):
        found = bucket_of(places, buckets)
        assert (np.diff(found) >= 0).all()
        assert set(found.tolist()) == set(range(buckets))
