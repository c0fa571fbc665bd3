"""The gradient of a step does not depend on how its batch is cut, and the schedule is the one that was asked for."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from dflash_stream.config import TrainSettings
from dflash_stream.errors import UserError
from dflash_stream.head import load_head
from dflash_stream.stream.loader import validation_samples
from dflash_stream.stream.sample import Sample
from tests.train.tiny_run import make_run, settings
from train.drafter import Drafter
from train.learner import Learner
from train.optimizer import Accumulator, Optimizer, Sums, learning_rate
from train.plan import count_steps, make_plan
from train.ranks import Ranks
from train.validate import validate

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def learner_and_samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Learner, list[Sample]]:
    url = f"file://{tmp_path_factory.mktemp('math')}/run"
    run = make_run(url, train=8, validation=8)
    config = settings(url)
    drafter = Drafter(make_plan(config, run).drafter).initialize(0)
    learner = Learner(drafter, load_head(run.store, dtype=torch.float32), config.train, ALONE.device)
    return learner, list(validation_samples(run.store, run, config))


def accumulated(learner: Learner, parts: list[list[Sample]]) -> tuple[torch.Tensor, Sums]:
    accumulator = Accumulator(list(learner.drafter.parameters()), learner.drafter.config.block_size)
    for part in parts:
        blocks = learner.blocks(part)
        if blocks is not None:
            measured = learner.measure(blocks)
            measured.loss_sum.backward()
            accumulator.sums.add_sums(measured)
    sums = accumulator.reduce(ALONE)
    return accumulator.gradient / sums.weight, sums


@pytest.mark.parametrize("cuts", [[4, 4], [5, 3], [1] * 8, [7, 1], [8, 0], [3, 0, 5]])
def test_cut_of_a_batch_changes_its_gradient(
    learner_and_samples: tuple[Learner, list[Sample]], cuts: list[int]
) -> None:
    learner, samples = learner_and_samples
    whole, sums = accumulated(learner, [samples])
    rest = iter(samples)
    gradient, parts = accumulated(learner, [[next(rest) for _ in range(cut)] for cut in cuts])
    torch.testing.assert_close(gradient, whole, rtol=1e-4, atol=1e-6)
    assert parts.correct == sums.correct
    assert parts.blocks == sums.blocks
    assert parts.mean_loss == pytest.approx(sums.mean_loss, rel=1e-5)
    means = torch.stack([accumulated(learner, [[sample]])[0] for sample in samples])
    assert not torch.allclose(means.mean(0), whole, rtol=1e-2), "a mean of means would pass unnoticed"


def test_gradients_leave_the_flat_buffer(learner_and_samples: tuple[Learner, list[Sample]]) -> None:
    learner, samples = learner_and_samples
    gradient, sums = accumulated(learner, [samples])
    joined = torch.cat([p.grad.flatten() for p in learner.drafter.parameters() if p.grad is not None])
    assert torch.equal(joined / sums.weight, gradient)


def test_batch_without_a_supervised_token_moves_the_weights() -> None:
    model = nn.Linear(3, 2)
    optimizer = Optimizer(model, TrainSettings(weight_decay=0.1))
    accumulator = Accumulator(list(model.parameters()), 4)
    accumulator.gradient.fill_(1.0)
    optimizer.step(accumulator.gradient, 1.0, 0.1)  # from here on there is momentum to move by
    before = [p.clone() for p in model.parameters()]
    accumulator.clear()
    assert optimizer.step(accumulator.gradient, 0.0, 0.1) == 0.0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert optimizer.steps == 1


def test_gradient_is_clipped_before_it_is_divided() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = Optimizer(model, TrainSettings(max_grad_norm=0.5))
    accumulator = Accumulator(list(model.parameters()), 4)
    accumulator.gradient.fill_(6.0)
    norm = optimizer.step(accumulator.gradient, 3.0, 0.1)
    assert norm == pytest.approx(2.0 * math.sqrt(6))
    assert float(accumulator.gradient.norm()) == pytest.approx(0.5, rel=1e-4)


def test_own_step_differs_from_plain_adamw() -> None:
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    optimizer = Optimizer(ours, TrainSettings(weight_decay=0.1, max_grad_norm=1e9))
    groups: list[dict[str, Any]] = [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, weight_decay=0.1, betas=(0.9, 0.95))
    accumulator = Accumulator(list(ours.parameters()), 4)
    for step in range(5):
        rate = 0.1 / (step + 1)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.grad = torch.randn_like(q)
            assert p.grad is not None
            p.grad.copy_(q.grad * 4)
        optimizer.step(accumulator.gradient, 4.0, rate)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_schedule_is_another_one() -> None:
    settings_ = TrainSettings(lr=1.0, warmup_fraction=0.1, min_lr_ratio=0.1)
    rates = [learning_rate(step, 100, settings_) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[99] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert all(late <= early for early, late in pairwise(rates[10:]))
    assert learning_rate(0, 1, TrainSettings(lr=0.5)) == 0.5, (
        "a training too short to warm up starts at the peak"
    )


@pytest.mark.parametrize(
    ("samples", "epochs", "batch", "max_steps", "expected"),
    [
        (100, 1.0, 10, None, 10),
        (100, 1.5, 10, None, 15),
        (99, 2.0, 10, None, 19),
        (100, 6.0, 10, 7, 7),
        (9, 2.0, 18, None, 1),
    ],
)
def test_number_of_steps_is_off(
    samples: int, epochs: float, batch: int, max_steps: int | None, expected: int
) -> None:
    chosen = TrainSettings(epochs=epochs, batch_samples=batch, max_steps=max_steps)
    assert count_steps(samples, chosen) == expected


def test_training_of_no_step_ends_as_if_it_had_trained() -> None:
    with pytest.raises(UserError, match=r"lower train\.batch_samples"):
        count_steps(10, TrainSettings(epochs=1.0, batch_samples=11))


def test_validation_counts_other_samples_than_it_was_given(
    learner_and_samples: tuple[Learner, list[Sample]],
) -> None:
    learner, samples = learner_and_samples
    figures = validate(learner, samples, ALONE)
    assert figures["samples"] == len(samples)
    assert 1.0 <= figures["acceptance_length"] <= learner.drafter.config.block_size
    assert figures["loss"] > 0
    assert validate(learner, samples, ALONE, give_up=lambda: True) == {}
    assert validate(learner, [], ALONE) == {}
