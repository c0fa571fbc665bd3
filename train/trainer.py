"""Training of a drafter, from a prepared and extracted run to checkpoints in the same store.

`train` is the whole of it: find out where this training stands, set up, go through the steps, end. The gradient
of a step is that of one global batch, however many ranks share it and in how many micro-batches (`optimizer`).
The samples come from `stream` in an order that the settings alone define; checkpoints go out through
`checkpoint` while the next steps run. Nothing but the store holds state: any machine, any number of ranks can
continue.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dflash_stream import layout
from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.head import load_head
from dflash_stream.run import Run
from dflash_stream.store import StoreError, Uploader, open_store
from dflash_stream.stream.loader import TrainStream, make_loader, validation_samples
from dflash_stream.tracking import Tracker, open_tracker
from train import checkpoint
from train.ahead import ahead
from train.blocks import Blocks
from train.checkpoint import (
    MODEL,
    OPTIMIZER,
    OwnerRecord,
    Ownership,
    Publisher,
    Snapshot,
    TrainState,
    host_copy,
)
from train.drafter import Drafter
from train.learner import Learner, compute_dtype
from train.optimizer import Accumulator, Optimizer, Sums, learning_rate
from train.plan import Plan, make_plan
from train.ranks import Ranks, join
from train.report import TrainSummary, Window
from train.signals import StopSignals
from train.validate import validate

GRACE_S = 20.0  # after a signal, time to end the step and publish a checkpoint: launchers kill after 30 s
ABORT_S = 3.0  # then, time to abort its upload
PATIENCE_S = 600.0  # how much longer than a store's deadline one rank waits for another

log = logging.getLogger(__name__)


def train(config: Config) -> TrainSummary:
    """Train to the last step, or until a signal. Every rank calls it; only rank 0 publishes and reports.

    Raises UserError for anything that the user can mend: units that are not extracted, settings that differ
    from those of the published checkpoints, a damaged checkpoint, another trainer that took the drafter over, a
    loss that is not finite.
    """
    with StopSignals(GRACE_S) as signals:
        ranks = join(patience_s=config.store.deadline_s + PATIENCE_S)
        plan = ranks.on_all(lambda: make_plan(config, Run.open(open_store(config.store))))
        run, store = plan.run, plan.run.store
        ownership = Ownership(store, config.train.name, run.identity.fingerprint, plan.fixed_settings)
        published = ranks.from_first(ownership.inspect)
        newest = published.newest if published else None
        if newest is not None and newest.step >= plan.total_steps:
            state = ranks.from_first(lambda: checkpoint.read_state(store, newest))
            summary = TrainSummary.of(state, newest)
            tell(ranks, f"already trained: {summary.to_text()}")
        else:
            tell(ranks, plan.to_text(ranks.world, ranks.device.type))
            ranks.from_first(store.check)
            training = ranks.on_all(lambda: Training(plan, ranks, signals, ownership))
            training.resume()
            summary = training.run()
            tell(ranks, summary.to_text())
        ranks.leave()  # in order only: after an error the launcher ends the others, who may be in a collective
        return summary


def tell(ranks: Ranks, text: str) -> None:
    """Say something to the user, once."""
    if ranks.first:
        log.info("%s", text)


@dataclass(frozen=True)
class Work:
    """A micro-batch that is ready to be computed. stream: the state of the stream behind it."""

    last: bool  # of its step
    samples: int
    tokens: int
    blocks: Blocks | None
    stream: dict[str, Any]


class Training:
    """One start of a training: the parts that the steps work on, and what they have come to so far."""

    def __init__(self, plan: Plan, ranks: Ranks, signals: StopSignals, ownership: Ownership) -> None:
        config, store = plan.config, plan.run.store
        self.plan, self.config, self.store = plan, config, store
        self.ranks, self.signals, self.ownership = ranks, signals, ownership
        loader = make_loader(
            store, plan.run, config, rank=ranks.rank, world=ranks.world, steps=plan.total_steps
        )
        assert isinstance(loader.dataset, TrainStream)
        self.loader, self.stream = loader, loader.dataset
        head = load_head(store, device=ranks.device, dtype=compute_dtype(config.train))
        model = Drafter(plan.drafter, gradient_checkpointing=config.train.gradient_checkpointing)
        model.initialize(config.train.seed).to(ranks.device)
        self.learner = Learner(model, head, config.train, ranks.device)
        self.optimizer = Optimizer(model, config.train)
        self.accumulator = Accumulator(list(self.optimizer.named.values()), plan.drafter.block_size)
        self.publisher = Publisher(Uploader(store, config.store), ownership, config.train.keep_checkpoints)
        # On a GPU the next micro-batch is made while this one computes; on the CPU that would take cores away.
        self._prepared = ahead(self._prepare()) if ranks.device.type == "cuda" else self._prepare()
        self._position: dict[str, Any] = {}  # state of the stream behind the last step
        self.step = 0  # steps taken, and so the number of the next one, from 0
        self.saved_step: int | None = None
        self.tokens = 0
        self.first_loss = self.last_loss = math.nan
        self.acceptance: float | None = None

    def resume(self) -> None:
        """Take the drafter over and continue at its newest checkpoint. Rank 0 reads, and sends on what it has read."""
        record = self.ranks.from_first(self.ownership.take)
        state = self.ranks.from_first(lambda: self._load(record))
        for tensor in (*self.optimizer.named.values(), *self.optimizer.tensors().values()):
            self.ranks.broadcast_(tensor.data)
        if state is None:
            return
        self.stream.load_state_dict(state.stream)
        self.optimizer.restore_steps(state.optimizer_steps)
        self.step = self.saved_step = state.step
        self.tokens, self.acceptance = state.tokens, state.acceptance
        self.first_loss, self.last_loss = state.first_loss, state.last_loss

    def _load(self, record: OwnerRecord) -> TrainState | None:
        """Rank 0: fill weights and moments from the newest checkpoint that is whole; None when there is none at all."""
        published = json.dumps(self.plan.drafter.to_json(), indent=1)
        self.store.put(layout.drafter_config(self.config.train.name), published.encode())
        for found in reversed(record.checkpoints):
            try:
                state = checkpoint.read_state(self.store, found)
                checkpoint.load_tensors(self.store, found, MODEL, self.optimizer.named)
                checkpoint.load_tensors(self.store, found, OPTIMIZER, self.optimizer.tensors())
            except StoreError:
                raise  # the store is at fault, not the checkpoint
            except UserError as error:
                if found is record.checkpoints[0]:
                    raise UserError(
                        f"{error}. There is no older checkpoint: begin anew under another --train.name"
                    ) from None
                log.warning("%s. Going back to the checkpoint before it", error)
                continue
            self.publisher.published = found
            log.info("continuing at step %d of %d, from %s", state.step, self.plan.total_steps, found.prefix)
            return state
        return None

    def run(self) -> TrainSummary:
        """All steps that are left. The tracker and the publisher end with it, however it ends."""
        tracker = open_tracker(
            self.config,
            self.store,
            "train",
            settings=self.config.model_dump(mode="json"),
            primary=self.ranks.first,
        )
        state = "failed"
        try:
            summary = self._steps(tracker)
            tracker.summary(asdict(summary))
            state = "stopped" if summary.stopped_by else "finished"
            return summary
        finally:
            # A checkpoint of before is good, whatever has happened since.
            self.publisher.settle(min(GRACE_S, self.signals.left_s))
            self._prepared.close()
            self.stream.close()
            self._close_publisher()
            tracker.close(state)

    def _steps(self, tracker: Tracker) -> TrainSummary:
        settings, tokens_before, busy_s = self.config.train, self.tokens, 0.0
        begun = step_begun = time.monotonic()
        window = Window()
        stopped_by: int | None = None
        for work in self._timed(self._prepared):
            if work.blocks is not None:
                measured = self.learner.measure(work.blocks)
                measured.loss_sum.backward()
                self.accumulator.sums.add_sums(measured)
            self.accumulator.sums.add(samples=work.samples, tokens=work.tokens)
            if not work.last:
                continue
            self._position = work.stream

            sums = self._reduce()
            rate = learning_rate(self.step, self.plan.total_steps, settings)
            norm = self.optimizer.step(self.accumulator.gradient, sums.weight, rate)
            self.accumulator.clear()
            self._count(sums, norm)
            step_s, step_begun = time.monotonic() - step_begun, time.monotonic()
            busy_s += step_s
            window.add(sums, step_s)
            stopped_by = int(signal.SIGTERM) if sums.sigterm else int(signal.SIGINT) if sums.sigint else None
            last = self.step == self.plan.total_steps or stopped_by is not None
            if self.step % settings.log_every_steps == 0 or self.step == 1 or last:
                self._log(tracker, window.figures(self.ranks.world) | {"lr": rate, "grad_norm": norm})
                window = Window()
            if stopped_by is not None:
                break
            if self.step % settings.validate_every_steps == 0 or last:
                self._validate(tracker, None if last else settings.validation_samples)
            if self.step % settings.checkpoint_every_steps == 0:
                self._save()
            step_begun = time.monotonic()

        if (number := stopped_by or self.signals.received) is not None:
            self.signals.heed(number)
        if self.step != self.saved_step:
            self._save()
        self.ranks.from_first(self._wait_for_checkpoint)
        newest = self.publisher.published
        return TrainSummary(
            steps=self.step,
            total_steps=self.plan.total_steps,
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            tokens=self.tokens,
            tokens_per_s=(self.tokens - tokens_before) / busy_s,
            seconds=time.monotonic() - begun,
            acceptance=self.acceptance,
            checkpoint=newest.prefix if newest else None,
            stopped_by=stopped_by,
        )

    def _prepare(self) -> Generator[Work, None, None]:
        """The micro-batches of the stream as blocks. An empty one has none: nothing in it is collective."""
        for micro in self.loader:
            blocks = self.learner.blocks(micro.samples)
            if blocks is not None and self.ranks.device.type == "cuda":
                blocks = self.learner.pinned(blocks)
            tokens = sum(len(sample.input_ids) for sample in micro.samples)
            yield Work(micro.last, len(micro.samples), tokens, blocks, self.stream.state_dict())

    def _timed(self, works: Iterable[Work]) -> Iterator[Work]:
        """The same, the time waited for each added to the sums of the step."""
        remaining = iter(works)
        while True:
            asked = time.monotonic()
            work = next(remaining, None)
            if work is None:
                return
            self.accumulator.sums.add(wait_s=time.monotonic() - asked)
            yield work

    def _reduce(self) -> Sums:
        """The one collective of a step: gradient and sums, and with them what one rank has to say to all others."""
        received = self.signals.received
        self.accumulator.sums.add(
            sigterm=received == signal.SIGTERM, sigint=received == signal.SIGINT, failed=self.publisher.failed
        )
        sums = self.accumulator.reduce(self.ranks)
        if sums.failed:
            self.publisher.wait()  # raises on the rank where it failed
            raise UserError("rank 0 could not publish a checkpoint: its message says why")
        return sums

    def _count(self, sums: Sums, norm: float) -> None:
        """Count a step. UserError when it was not finite: the same on every rank, and nothing of it is published."""
        self.step += 1
        if not math.isfinite(norm) or not math.isfinite(sums.mean_loss):
            raise UserError(
                f"step {self.step}: loss {sums.mean_loss}, gradient norm {norm}: the training has diverged. "
                "Lower train.lr or raise train.warmup_fraction; a new start begins at the newest checkpoint"
            )
        self.tokens += int(sums.tokens)
        self.last_loss = sums.mean_loss
        if self.step == 1:
            self.first_loss = self.last_loss

    def _log(self, tracker: Tracker, figures: dict[str, float]) -> None:
        tracker.log({f"train/{name}": value for name, value in figures.items()}, step=self.step)
        if self.ranks.first:
            log.info(
                "step %d/%d  loss %.4f  lr %.2e  gradient %.3f  %.0f tokens/s  waiting for data %.0f %%",
                self.step, self.plan.total_steps, figures["loss"], figures["lr"], figures["grad_norm"],
                figures["tokens_per_s"], 100 * figures["data_wait_share"],
            )  # fmt: skip

    def _validate(self, tracker: Tracker, limit: int | None) -> None:
        """Measure on held-out samples, all of them when `limit` is None. Given up when a signal asks to stop."""
        ranks = self.ranks
        samples = validation_samples(
            self.store, self.plan.run, self.config, rank=ranks.rank, world=ranks.world, limit=limit
        )
        figures = validate(self.learner, samples, ranks, give_up=lambda: self.signals.received is not None)
        if not figures:
            return
        self.acceptance = figures.get("acceptance_length", self.acceptance)
        tracker.log({f"validation/{name}": value for name, value in figures.items()}, step=self.step)
        if ranks.first:
            shown = "  ".join(f"{name} {value:,.6g}" for name, value in figures.items() if "/" not in name)
            log.info("step %d/%d  validation  %s", self.step, self.plan.total_steps, shown)

    def _save(self) -> None:
        """Rank 0: copy weights and moments to the host, and publish them in the background."""
        self.saved_step = self.step
        if not self.ranks.first:
            return
        if not self._settled() or self.publisher.failed:
            return  # every rank is told of a failure at the end of the next step
        state = TrainState(
            step=self.step,
            total_steps=self.plan.total_steps,
            optimizer_steps=self.optimizer.steps,
            tokens=self.tokens,
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            acceptance=self.acceptance,
            stream=self._position,
            drafter=self.plan.drafter.to_json(),
            fingerprint=self.plan.run.identity.fingerprint,
            settings=self.ownership.record.settings,
        )
        model, moments = host_copy(self.optimizer.named), host_copy(self.optimizer.tensors())
        self.publisher.start(Snapshot(state, model, moments))

    def _settled(self) -> bool:
        """Wait until no checkpoint is under way; False if it still is at the end of the grace time of a signal."""
        while not self.publisher.settle(0.2):
            if not self.signals.left_s:
                return False
        return True

    def _wait_for_checkpoint(self) -> None:
        """Rank 0: wait until the last checkpoint is published; after a signal no longer than GRACE_S since it came."""
        if self._settled():
            return self.publisher.wait()
        self._close_publisher()
        newest = self.publisher.published
        log.warning(
            "the checkpoint of step %d took over %g s to publish and is dropped: a new start continues at %s",
            self.step, GRACE_S, f"step {newest.step}" if newest else "step 0",
        )  # fmt: skip
        return None

    def _close_publisher(self) -> None:
        left = self.publisher.close(timeout_s=ABORT_S)
        if left:
            log.warning(
                "unfinished uploads of %s may be left in the store: the next start removes them",
                ", ".join(left),
            )
