"""The report on a drafter: its figures are right, its intervals honest, and it is written where it is looked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_stream import layout
from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.head import load_head
from dflash_stream.run import Run
from dflash_stream.store import open_store
from dflash_stream.stream.loader import validation_samples
from tests.train.tiny_pair import trained_pair
from tests.train.tiny_run import make_run, settings
from train.bootstrap import bootstrap, interval_of
from train.decode import acceptance_walk
from train.drafter import Drafter
from train.evaluate import EvalReport, Tally, agreement_lengths, compare, evaluate
from train.export import export, find_newest, load_export
from train.learner import Learner
from train.trainer import train


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, EvalReport]:
    """A run whose text is easy to learn, a drafter trained on it, and the report."""
    url = f"file://{tmp_path_factory.mktemp('evaluate')}/run"
    make_run(url, validation=12)
    config = settings(url, train={"epochs": 12.0, "lr": 2e-2})
    train(config)
    return config, evaluate(config)


def test_trained_drafter_is_told_from_the_untrained_one(evaluated: tuple[Config, EvalReport]) -> None:
    _, report = evaluated
    assert report.untrained is not None
    assert report.trained is not None
    assert report.difference is not None
    assert report.difference_interval is not None
    assert report.trained.acceptance_length > report.untrained.acceptance_length + 0.5
    assert report.difference == pytest.approx(
        report.trained.acceptance_length - report.untrained.acceptance_length
    )
    low, high = report.difference_interval
    assert 0 < low <= report.difference <= high
    for score in (report.untrained, report.trained):
        assert score.interval[0] <= score.acceptance_length <= score.interval[1]
    assert (report.samples, report.tokens) == (12, 12 * 16)


def test_report_is_the_walk_over_every_held_out_sample(
    evaluated: tuple[Config, EvalReport], tmp_path: Path
) -> None:
    """Against the exported drafter, walked here by hand."""
    config, report = evaluated
    export(config, destination=tmp_path / "out")
    _, drafter = load_export(tmp_path / "out", dtype=torch.float32)
    store = open_store(config.store)
    head = load_head(store, dtype=torch.float32)
    walks = [
        acceptance_walk(drafter, head, s.greedy_input_ids, s.greedy_hidden_states, s.greedy_prompt_tokens)  # type: ignore[arg-type]
        for s in validation_samples(store, Run.open(store), config)
    ]
    assert report.trained is not None
    tokens, rounds = sum(map(sum, walks)), sum(map(len, walks))
    assert report.trained.acceptance_length == pytest.approx(tokens / rounds, abs=0.05)  # the export is rounded
    assert report.trained.macro_acceptance_length == pytest.approx(
        sum(sum(walk) / len(walk) for walk in walks) / len(walks), abs=0.05
    )


def test_report_lies_in_the_store_beside_the_drafter(evaluated: tuple[Config, EvalReport]) -> None:
    config, report = evaluated
    body, _ = open_store(config.store).get(layout.evaluation(config.train.name))
    found = json.loads(body)
    assert found == json.loads(report.to_json())
    assert found["trained"]["interval"] == list(report.trained.interval)  # type: ignore[union-attr]
    assert found["step"] == 60


def test_table_shows_both_drafters_and_their_difference(evaluated: tuple[Config, EvalReport]) -> None:
    _, report = evaluated
    text = report.to_text()
    assert report.trained is not None
    assert report.untrained is not None
    for figure in (report.trained.acceptance_length, report.untrained.acceptance_length, report.difference):
        assert f"{figure:.3f}" in text
    assert "slot 3 accepted" in text
    assert max(map(len, text.splitlines())) <= 112


def test_run_without_continuations_says_what_is_missing(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    make_run(url, train=16, validation=0)
    config = settings(url, train={"max_steps": 1})
    train(config)
    with pytest.raises(UserError, match=r"prepare\.validation_new_tokens"):
        evaluate(config)


def test_drafter_of_another_run_is_refused(evaluated: tuple[Config, EvalReport], tmp_path: Path) -> None:
    config, _ = evaluated
    store = open_store(config.store)
    other = settings(f"file://{tmp_path}/run")
    make_run(other.store.url, train=16)
    copy = open_store(other.store)
    for info in store.list(layout.drafter("drafter")):
        copy.put(info.key, store.get(info.key)[0])
    with pytest.raises(UserError, match="trained on another run"):
        evaluate(other)


# --- figures


def tally(walks: list[list[int]], agreed: int = 0, anchors: int = 0) -> Tally:
    made = Tally()
    made.walks, made.agreed, made.anchors = walks, agreed, anchors
    return made


def test_micro_and_macro_mean_and_slots_of_a_case_by_hand() -> None:
    untrained = tally([[1] * 8, [1, 1], []], agreed=12, anchors=10)
    trained = tally([[4, 3, 1], [2], []], agreed=30, anchors=10)
    scores, difference, _ = compare(untrained, trained, block_size=4)
    assert scores is not None
    assert scores[1].acceptance_length == 10 / 4
    assert scores[1].macro_acceptance_length == (8 / 3 + 2) / 2
    assert (scores[0].rounds, scores[1].rounds) == (10, 4)
    # rounds with room: slot 1 in [4, 3] and [2], slot 2 and 3 in [4, 3]
    assert scores[1].slot_acceptance == [1.0, 1.0, 0.5]
    assert scores[0].slot_acceptance == [0.0, 0.0, 0.0]
    assert (scores[0].agreement_length, scores[1].agreement_length) == (1.2, 3.0)
    assert difference == 1.5


def test_no_round_at_all_gives_no_score() -> None:
    assert compare(tally([[], []]), tally([[], []]), block_size=4) == (None, None, None)


def test_interval_of_two_texts_by_hand() -> None:
    """Draws are 4/4, (4+12)/(4+4) and 12/4, with chances 1/4, 1/2, 1/4: the middle 95 % reaches both ends."""
    draws = bootstrap(np.array([4, 12]), np.array([4, 4]))
    assert set(draws) == {1.0, 2.0, 3.0}
    assert interval_of(draws) == (1.0, 3.0)
    assert 0.4 < (draws == 2.0).mean() < 0.6


def test_interval_leaves_out_as_much_on_either_side() -> None:
    assert interval_of(np.arange(1001.0)) == pytest.approx((25, 975))


def test_long_texts_weigh_more_in_every_draw() -> None:
    draws = bootstrap(np.array([3, 100]), np.array([1, 100]))
    assert set(draws) == {3.0, 103 / 101, 1.0}


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Texts of which each has its own mean: rounds taken as independent would give an interval far too narrow."""
    rng = np.random.default_rng(1)
    covered = 0
    for trial in range(200):
        rounds = np.full(60, 20)
        tokens = (20 * (2 + rng.choice([-0.5, 0.5], 60))).astype(np.int64)
        low, high = interval_of(bootstrap(tokens, rounds, seed=trial))
        covered += low <= 2 <= high
    assert 0.90 <= covered / 200 <= 0.99


def test_difference_is_resampled_over_the_same_texts() -> None:
    """Texts differ far more than drafters do: unpaired, the difference would drown."""
    rng = np.random.default_rng(0)
    worse = [[int(length)] * 10 for length in rng.integers(1, 12, 40)]
    better = [[*walk[:-1], walk[-1] + 1] for walk in worse]
    scores, difference, interval = compare(tally(worse), tally(better), block_size=16)
    assert scores is not None
    assert interval is not None
    assert difference == pytest.approx(0.1)
    assert 0.09 < interval[0] <= interval[1] < 0.11
    assert scores[0].interval[1] > scores[1].interval[0], "the two intervals overlap"


def test_agreement_ends_where_supervision_ends() -> None:
    """A drafter that is right beyond the supervised run must not be credited for it, in a text with several turns."""
    pair = trained_pair()
    learner = Learner(pair.drafter, pair.head, settings("file:///nowhere").train, torch.device("cpu"))
    lengths: dict[int, list[int]] = {0: [], 2: []}
    for cut in lengths:
        for sample in pair.samples:
            mask = sample.loss_mask.clone()
            if cut:
                mask[9 + cut :] = False
            lengths[cut] += agreement_lengths(learner, replace(sample, loss_mask=mask))
    assert max(lengths[0]) == 6
    assert max(lengths[2]) == 2
    assert len(lengths[2]) == len(pair.samples), "one anchor each: a supervised token with another behind it"


def test_untrained_weights_are_those_the_training_began_with(evaluated: tuple[Config, EvalReport]) -> None:
    config, report = evaluated
    store = open_store(config.store)
    head = load_head(store, dtype=torch.float32)
    _, _, drafter_config = find_newest(store, Run.open(store), config.train.name)
    drafter = Drafter(drafter_config).initialize(config.train.seed)
    walks = [
        acceptance_walk(drafter, head, s.greedy_input_ids, s.greedy_hidden_states, s.greedy_prompt_tokens)  # type: ignore[arg-type]
        for s in validation_samples(store, Run.open(store), config)
    ]
    assert report.untrained is not None
    assert report.untrained.rounds == sum(map(len, walks))
