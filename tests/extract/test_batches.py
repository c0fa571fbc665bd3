"""Batches hold every sample once, within the budget, and results come back in the order of the unit."""

from __future__ import annotations

import random

import pytest

from dflash_stream.extract.batches import in_order, plan


@pytest.mark.parametrize("budget", [1, 50, 300, 5000])
@pytest.mark.parametrize("window", [1, 4])
def test_a_sample_is_lost_or_a_batch_exceeds_the_budget(budget: int, window: int) -> None:
    lengths = [random.Random(3).choice([1, 7, 40, 90, 300]) for _ in range(200)]
    batches = plan(lengths, budget, window)
    assert sorted(place for batch in batches for place in batch) == list(range(200))
    for batch in batches:
        padded = len(batch) * max(lengths[place] for place in batch)
        assert padded <= budget or len(batch) == 1


def test_padding_wastes_the_forward_pass() -> None:
    rng = random.Random(1)
    lengths = [rng.randint(20, 2048) for _ in range(500)]
    padded = sum(len(batch) * max(lengths[place] for place in batch) for batch in plan(lengths, 16384))
    assert padded < 1.25 * sum(lengths)  # in the order of the unit it would be 1.8


def test_finished_samples_pile_up_while_an_earlier_one_is_due() -> None:
    lengths = [random.Random(place).randint(1, 100) for place in range(400)]
    waiting: set[int] = set()
    most = turn = 0
    for batch in plan(lengths, 200, window_batches=4):
        waiting |= set(batch)
        most = max(most, sum(lengths[place] for place in waiting))
        while turn in waiting:
            waiting.remove(turn)
            turn += 1
    assert most <= 4 * 200


def test_nothing_to_do_makes_a_batch() -> None:
    assert plan([], 100) == []
    assert list(in_order([])) == []


def test_results_are_out_of_order() -> None:
    found = [(2, "c"), (0, "a"), (1, "b"), (4, "e"), (3, "d")]
    assert list(in_order(found)) == ["a", "b", "c", "d", "e"]


def test_a_lost_result_is_passed_over() -> None:
    with pytest.raises(AssertionError, match="place 1"):
        list(in_order([(0, "a"), (2, "c")]))
