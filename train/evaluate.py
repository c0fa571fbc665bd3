"""What a drafter is worth on samples it never saw: acceptance length, against the same drafter untrained.

Over the target's own continuations of the held-out prompts, which lie in the store with their states, the
teacher-forced walk gives the rounds that decoding would take; only the target's head is needed. The headline is
the micro mean, tokens over rounds, with a 95 % interval from resampling samples: rounds of one text are not
independent, texts are. The difference of the two drafters is resampled over the same samples. Over the text of
the data set, which the target did not write, the same figure is called agreement. Live prompts are decoded with
the target itself (`live`).
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dflash_stream import layout
from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.head import load_head
from dflash_stream.run import Run
from dflash_stream.store import Store, open_store
from dflash_stream.stream.loader import validation_samples
from dflash_stream.stream.sample import Sample
from train.blocks import choose_anchors
from train.bootstrap import bootstrap, interval_of
from train.checkpoint import MODEL, TrainState, load_tensors
from train.decode import acceptance_walk, leading_matches, slot_acceptance
from train.drafter import Drafter
from train.export import find_newest
from train.learner import Learner, compute_dtype
from train.live import LiveReport, decode_live, read_prompts

AGREEMENT_ANCHORS = 64  # of a sample, at most

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """One drafter on the held-out samples.

    acceptance_length        tokens over rounds, all samples together
    interval                 its 95 % bootstrap interval over samples
    macro_acceptance_length  mean over samples of each one's tokens over rounds
    slot_acceptance          of the rounds that had room for it, the share that accepted slot k, k = 1 … B-1;
                             None where no round had
    agreement_length         over the text of the data set, mean of 1 + leading drafts that equal it; None
                             without an anchor
    """

    acceptance_length: float
    interval: tuple[float, float]
    macro_acceptance_length: float
    rounds: int
    slot_acceptance: list[float | None]
    agreement_length: float | None


@dataclass(frozen=True)
class EvalReport:
    """The worth of a drafter.

    run         fingerprint of run.json
    step        of the checkpoint
    samples     held-out ones with at least one round
    tokens      of their continuations
    untrained   the drafter with the weights that its training began with; None when the run holds no
                continuations
    trained     with those of the checkpoint
    difference  acceptance length trained less untrained, with its paired interval
    live        None when it was not asked for
    """

    drafter: str
    run: str
    step: int
    samples: int
    tokens: int
    untrained: Score | None
    trained: Score | None
    difference: float | None
    difference_interval: tuple[float, float] | None
    live: LiveReport | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def to_text(self) -> str:
        """A table for a terminal."""
        title = (
            f"{self.drafter}, step {self.step:,}: {self.samples:,} held-out samples, "
            f"{self.tokens:,} tokens of the target's own text"
        )
        table = Table("", "untrained", "trained")
        if self.untrained and self.trained and self.difference_interval:
            pair = (self.untrained, self.trained)
            table.add_row(
                "acceptance length", *(f"{s.acceptance_length:.3f} {_span(s.interval)}" for s in pair)
            )
            table.add_row("difference", "", f"{self.difference:+.3f} {_span(self.difference_interval)}")
            table.add_row("mean over samples", *(f"{s.macro_acceptance_length:.3f}" for s in pair))
            table.add_row("rounds", *(f"{s.rounds:,}" for s in pair))
            for slot, shares in enumerate(zip(*(s.slot_acceptance for s in pair), strict=True), start=1):
                cells = (f"{100 * share:.1f} %" if share is not None else "-" for share in shares)
                table.add_row(f"slot {slot} accepted", *cells)
            lengths = (s.agreement_length for s in pair)
            table.add_row("agreement with data", *(f"{n:.3f}" if n is not None else "-" for n in lengths))
        if self.live:
            live = self.live
            length = f"{live.acceptance_length:.3f} {_span(live.interval)}"
            table.add_row(f"live, {live.prompts:,} prompts", "", length)
            table.add_row("tokens a target forward", "", f"{live.tokens_per_forward:.3f}")
            table.add_row("texts equal to greedy", "", f"{live.equal_texts:,} of {live.prompts:,}")
        console = Console(file=io.StringIO(), width=112)
        console.print(title)  # not the table's own, which is wrapped to its width
        console.print(table)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


def _span(interval: tuple[float, float]) -> str:
    return f"({interval[0]:.3f} … {interval[1]:.3f})"


def evaluate(
    config: Config, *, live_prompts: Path | None = None, live_samples: int = 8, new_tokens: int = 128
) -> EvalReport:
    """Measure the newest checkpoint of `train.name`, and write the report to the store beside it.

    live_prompts: JSONL of chats; the first `live_samples` of them are also decoded with the target,
    `new_tokens` tokens each at most. UserError when there is no checkpoint, or nothing to measure it on.
    """
    if live_samples < 1 or new_tokens < 2:
        raise UserError(
            "live decoding needs at least one prompt and two new tokens: the first is never drafted"
        )
    store = open_store(config.store)
    run = Run.open(store)
    name = config.train.name
    checkpoint, state, drafter_config = find_newest(store, run, name)
    trained = Drafter(drafter_config)
    load_tensors(store, checkpoint, MODEL, dict(trained.named_parameters()))
    prompts = read_prompts(store, run.identity, live_prompts, live_samples) if live_prompts else []
    report = _evaluate(store, run, config, name, state, trained)
    if prompts:
        report = replace(
            report, live=decode_live(store, run.identity, config.target, trained, prompts, new_tokens)
        )
    elif report.trained is None:
        raise UserError(
            f"{store.url} holds no continuations by the target to measure the drafter on: prepare a run with "
            "held-out chats and prepare.validation_new_tokens > 1, or decode with the target: --live JSONL"
        )
    store.put(layout.evaluation(name), report.to_json().encode())
    return report


def _evaluate(
    store: Store, run: Run, config: Config, name: str, state: TrainState, trained: Drafter
) -> EvalReport:
    """The report without its live part. Each sample is read once, for both drafters; precision as in training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = load_head(store, device=device, dtype=compute_dtype(config.train))
    untrained = Drafter(trained.config).initialize(int(state.settings["train.seed"]))
    learners = [
        Learner(drafter.to(device).eval(), head, config.train, device) for drafter in (untrained, trained)
    ]
    tallies = [Tally(), Tally()]
    for number, sample in enumerate(validation_samples(store, run, config), start=1):
        for learner, tally in zip(learners, tallies, strict=True):
            tally.add(learner, sample)
        if number % 100 == 0:
            log.info("evaluated %d held-out samples", number)
    scores, difference, interval = compare(*tallies, block_size=trained.config.block_size)
    counted = [sum(lengths) + 1 for lengths in tallies[1].walks if lengths]
    return EvalReport(
        drafter=name, run=run.identity.fingerprint, step=state.step, samples=len(counted), tokens=sum(counted),
        untrained=scores[0] if scores else None, trained=scores[1] if scores else None, difference=difference,
        difference_interval=interval, live=None,
    )  # fmt: skip


class Tally:
    """What one drafter made of the samples: rounds over each one's own text, agreement with the data set's."""

    def __init__(self) -> None:
        self.walks: list[list[int]] = []  # acceptance lengths of each sample; empty without a round
        self.agreed, self.anchors = 0, 0

    def add(self, learner: Learner, sample: Sample) -> None:
        """Put one held-out sample through the drafter of `learner`."""
        with learner.autocast():
            if sample.greedy_input_ids is not None and sample.greedy_hidden_states is not None:
                self.walks.append(
                    acceptance_walk(
                        learner.drafter, learner.head, sample.greedy_input_ids, sample.greedy_hidden_states,
                        sample.greedy_prompt_tokens,
                    )
                )  # fmt: skip
            lengths = agreement_lengths(learner, sample)
        self.agreed += sum(lengths)
        self.anchors += len(lengths)


def agreement_lengths(learner: Learner, sample: Sample) -> list[int]:
    """1 + leading drafts that equal the supervised text, at anchors chosen as training chooses them."""
    mask = sample.loss_mask
    anchors = choose_anchors(mask.numpy(), AGREEMENT_ANCHORS, seed=0, row=sample.row, epoch=sample.epoch)
    anchors = anchors[anchors > 0]  # the first token has no context
    ids = torch.where(mask, sample.input_ids, -1)  # no draft equals -1
    matches = leading_matches(
        learner.drafter, learner.head, ids, sample.hidden_states, torch.from_numpy(anchors)
    )
    return (matches + 1).tolist()


def compare(
    untrained: Tally, trained: Tally, *, block_size: int
) -> tuple[tuple[Score, Score] | None, float | None, tuple[float, float] | None]:
    """Scores of both drafters, difference of their acceptance lengths and its interval; None without a round."""
    pairs = [pair for pair in zip(untrained.walks, trained.walks, strict=True) if pair[1]]
    if not pairs:
        return None, None, None
    sides = list(zip(*pairs, strict=True))
    scores, draws = [], []
    for tally, walks in zip((untrained, trained), sides, strict=True):
        tokens, rounds = np.array([sum(walk) for walk in walks]), np.array([len(walk) for walk in walks])
        draws.append(bootstrap(tokens, rounds))
        scores.append(
            Score(
                acceptance_length=float(tokens.sum() / rounds.sum()),
                interval=interval_of(draws[-1]),
                macro_acceptance_length=float((tokens / rounds).mean()),
                rounds=int(rounds.sum()),
                slot_acceptance=_slot_shares(walks, block_size),
                agreement_length=tally.agreed / tally.anchors if tally.anchors else None,
            )
        )
    difference = scores[1].acceptance_length - scores[0].acceptance_length
    return (scores[0], scores[1]), difference, interval_of(draws[1] - draws[0])


def _slot_shares(walks: Iterable[Sequence[int]], block_size: int) -> list[float | None]:
    counts = np.array([slot_acceptance(walk, block_size) for walk in walks])  # [texts, 2, B-1]
    return [float(accepted / offered) if offered else None for accepted, offered in counts.sum(0).T]
