"""The loop: choose a unit, claim it, run the target over it into a shard, and start the next while that one drains.

The store decides what is done: a unit is missing until its commit record is there. Claims only keep
processes apart.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_stream import layout
from dflash_stream.config import ExtractSettings
from dflash_stream.errors import UserError
from dflash_stream.extract.claims import Claims
from dflash_stream.extract.forward import continuations, states_in_order
from dflash_stream.run import REWRITE, PreparedSample, Run
from dflash_stream.shards.index import Committed, committed_units
from dflash_stream.shards.tensors import SampleError
from dflash_stream.shards.writer import ShardWriter
from dflash_stream.store import NotFound
from dflash_stream.store.upload import Uploader
from dflash_stream.target.load import Target
from dflash_stream.target.taps import States
from dflash_stream.tracking import Tracker

log = logging.getLogger(__name__)

MAX_DRAINING = 2  # shards whose last parts are still on their way while the next unit computes
CHOICES = 4  # a unit is drawn from the first few free ones, so that many processes do not race for one
SHORTEST_POLL_S, LONGEST_POLL_S = 0.1, 5.0  # looks at what others do, when only they have work
PROGRESS_S = 15.0


@dataclass
class ExtractSummary:
    """What one process did. seconds: of work, without loading; bytes: of committed shards."""

    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    refused: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    forward_s: float = 0.0  # waiting for the target
    blocked_s: float = 0.0  # waiting for the store to take what was made

    def __str__(self) -> str:
        return (
            f"{self.shards} shards, {self.samples:,} samples ({self.refused} refused), {self.tokens:,} tokens, "
            f"{self.bytes / 2**20:,.1f} MiB in {self.seconds:.1f} s: {self.tokens_per_s:,.0f} tokens/s; "
            f"{self.forward_s:.1f} s in the target, {self.blocked_s:.1f} s waiting for the store"
        )


@dataclass
class _Draining:
    unit: int
    shard: Future[Committed]
    samples: int
    tokens: int


class Worker:
    """One process's share of a run. `work` returns when every unit of the run is committed, by whomever."""

    def __init__(
        self,
        run: Run,
        settings: ExtractSettings,
        target: Target,
        uploader: Uploader,
        claims: Claims,
        tracker: Tracker,
        *,
        made_with: dict[str, Any],
    ) -> None:
        self._run, self._settings, self._target = run, settings, target
        self._uploader, self._claims, self._tracker, self._made_with = uploader, claims, tracker, made_with
        self._draining: deque[_Draining] = deque()
        self._done = ExtractSummary()
        self._started = self._told = time.monotonic()
        self._computed_tokens = 0  # put through the target by this process, committed or not
        self._random = random.Random()

    def work(self) -> None:
        """Extract until nothing is missing. Raises UserError when the run cannot go on."""
        while (unit := self._next_unit()) is not None:
            self._extract(unit)
        while self._draining:
            self._collect(wait_s=None)

    def finish_draining(self, timeout_s: float) -> None:
        """On the way out: give shards that are all but done time to be committed. Failures are logged."""
        deadline = time.monotonic() + timeout_s
        while self._draining and time.monotonic() < deadline:
            unit = self._draining[0].unit
            try:
                self._collect(wait_s=deadline - time.monotonic())
            except Exception as error:
                log.error("unit %d is not committed: %s", unit, error)

    def summary(self) -> ExtractSummary:
        """What was done so far; of the seconds, those up to now."""
        done = self._done
        done.seconds = time.monotonic() - self._started
        done.tokens_per_s = done.tokens / max(done.seconds, 1e-9)
        done.blocked_s = self._uploader.stats.blocked_s
        return done

    # --- which unit

    def _next_unit(self) -> int | None:
        """Claim a missing unit; while others hold all of them, wait. None: nothing is missing."""
        pause_s = SHORTEST_POLL_S
        while True:
            self._collect()
            missing = set(range(self._run.identity.units)) - committed_units(self._run.store)
            missing -= self._claims.held | {drain.unit for drain in self._draining}
            if not missing:
                return None
            free = self._claims.open_units(sorted(missing), CHOICES)
            held_out = [unit for unit in free if unit < self._run.identity.validation.units]
            for unit in self._random.sample(held_out or free, len(held_out or free)):
                if self._claims.take(unit):
                    if not self._is_committed(unit):
                        return unit
                    self._claims.release(unit)
            if not free:
                if pause_s == SHORTEST_POLL_S:
                    log.info(
                        "other processes work on all that is missing (units: %d): waiting; the claim of one that "
                        "died lapses within %.0f s", len(missing), self._settings.claim_ttl_s,
                    )  # fmt: skip
                if self._draining:
                    self._collect(wait_s=pause_s)
                else:
                    time.sleep(pause_s * self._random.uniform(0.5, 1))
                pause_s = min(2 * pause_s, LONGEST_POLL_S)

    def _is_committed(self, unit: int) -> bool:
        """Whether the unit was finished between the listing and the claim."""
        try:
            self._run.store.head(layout.record(unit))
        except NotFound:
            return False
        return True

    # --- one unit

    def _extract(self, unit: int) -> None:
        while len(self._draining) >= MAX_DRAINING:
            self._collect(wait_s=None)
        identity = self._run.identity
        samples = self._read(unit)
        tokens = sum(len(sample.input_ids) for sample in samples)
        refused: list[str] = []
        size_hint = tokens * (identity.bytes_per_token + 8) + len(samples) * 4096
        with ShardWriter(
            self._uploader, self._run.store, identity, unit, made_with=self._made_with, size_hint=size_hint
        ) as writer:
            for place, (sample, made) in enumerate(self._states(unit, samples)):
                reason = made if isinstance(made, str) else _add(writer, sample.key, made)
                if reason:
                    writer.refuse(sample.key, reason)
                    log.warning("unit %d: sample %s refused: %s", unit, sample.key, reason)
                    refused.append(f"{sample.key}: {reason}")
                    self._stop_if_too_many(unit, refused, len(samples))
                self._computed_tokens += len(sample.input_ids)
                self._collect()
                self._tell(f"unit {unit}: {place + 1} of {len(samples)} samples")
            shard = writer.finish()
        self._draining.append(_Draining(unit, shard, len(samples), tokens))

    def _read(self, unit: int) -> list[PreparedSample]:
        """The unit's samples; UserError when one has a token that the target has no embedding for."""
        try:
            samples = self._run.unit(unit)
        except ValueError as error:  # pyarrow's, for what is not the Parquet file it should be
            raise UserError(
                f"{self._run.store.url}/{layout.unit_tokens(unit)} is damaged ({error}). Delete it and {REWRITE}"
            ) from None
        vocabulary = self._run.identity.target.vocab_size
        for sample in samples:
            if len(sample.input_ids) == 0 or sample.input_ids.min() < 0 or sample.input_ids.max() >= vocabulary:
                raise UserError(
                    f"{self._run.store.url}/{layout.unit_tokens(unit)}: sample {sample.key} has no tokens, "
                    f"or one outside the target's vocabulary of {vocabulary}: "
                    "it was made with another tokenizer; prepare the run anew"
                )
        return samples

    def _states(
        self, unit: int, samples: list[PreparedSample]
    ) -> Iterator[tuple[PreparedSample, dict[str, Tensor] | str]]:
        """Each sample of a unit, in order, with its tensors or the reason why it has none."""
        rule, budget = self._run.identity.validation, self._settings.tokens_per_batch
        prompts: list[NDArray[np.int32]] = []
        sequences: list[NDArray[np.int32]] = [sample.input_ids for sample in samples]
        began = time.monotonic()
        if unit < rule.units and rule.new_tokens:
            prompts = [sample.input_ids[: prompt_tokens(sample.loss_mask)] for sample in samples]
            log.info("unit %d: generating %d continuations", unit, len(prompts))
            made = continuations(self._target, prompts, rule.new_tokens, budget)
            texts = [np.concatenate([p, np.asarray(m, np.int32)]) for p, m in zip(prompts, made, strict=True)]
            sequences = [sequence for pair in zip(sequences, texts, strict=True) for sequence in pair]
        states = states_in_order(self._target, sequences, budget)
        for place, sample in enumerate(samples):
            own = next(states)
            text = next(states) if prompts else None
            self._done.forward_s += time.monotonic() - began
            problem = own.problem or (text.problem if text else "")
            if problem:
                yield sample, problem
            else:
                tensors = sample_tensors(sample, own)
                if text:
                    tensors |= greedy_tensors(sequences[2 * place + 1], len(prompts[place]), text)
                yield sample, tensors
            began = time.monotonic()

    def _stop_if_too_many(self, unit: int, refused: list[str], samples: int) -> None:
        if len(refused) > self._settings.max_bad_fraction * samples:
            raise UserError(
                f"{len(refused)} of the {samples} samples of unit {unit} have unusable states, more than "
                f"extract.max_bad_fraction = {self._settings.max_bad_fraction:g} allows:\n  "
                + "\n  ".join(refused[:10])
                + "\nLook at target.dtype and target.attention, and at the samples; "
                "a higher extract.max_bad_fraction leaves such samples out."
            )

    # --- what drains

    def _collect(self, wait_s: float | None = 0.0) -> None:
        """Take note of shards that are done, after `wait_s` at most; raises what made one fail."""
        if self._draining and wait_s != 0.0:
            wait([self._draining[0].shard], timeout=wait_s)
        for drain in [drain for drain in self._draining if drain.shard.done()]:
            self._draining.remove(drain)
            committed = drain.shard.result()
            self._claims.release(drain.unit)
            if not committed.ours:
                log.info("unit %d: another process committed it first", drain.unit)
                continue
            self._done.shards += 1
            self._done.samples += len(committed.record.samples)
            self._done.refused += len(committed.record.refused)
            self._done.tokens += drain.tokens
            self._done.bytes += committed.record.size
            self._tell(
                f"unit {drain.unit} committed: {drain.samples} samples, {drain.tokens:,} tokens, "
                f"{committed.record.size / 2**20:,.1f} MiB",
                now=True,
            )

    def _tell(self, event: str, *, now: bool = False) -> None:
        """A log line and the figures behind it, now or when the last one was a while ago."""
        if not now and time.monotonic() - self._told < PROGRESS_S:
            return
        self._told = time.monotonic()
        summary, stats = self.summary(), self._uploader.stats
        rate = self._computed_tokens / max(summary.seconds, 1e-9)
        log.info(
            "%s; %s tokens/s, %d draining, %.0f MiB in flight, %.1f s blocked by the store",
            event, f"{rate:,.0f}",
            len(self._draining), stats.bytes_in_flight / 2**20, summary.blocked_s,
        )  # fmt: skip
        self._tracker.log(
            {
                "extract/tokens": self._computed_tokens,
                "extract/tokens_per_s": rate,
                "extract/shards": summary.shards,
                "extract/samples": summary.samples,
                "extract/refused": summary.refused,
                "extract/bytes_sent": stats.bytes_sent,
                "extract/bytes_in_flight": stats.bytes_in_flight,
                "extract/parts_queued": stats.parts_queued,
                "extract/upload_requests": stats.requests,
                "extract/upload_retries": stats.retries,
                "extract/draining": len(self._draining),
                "extract/blocked_s": summary.blocked_s,
                "extract/forward_s": summary.forward_s,
            },
            step=self._computed_tokens,
        )


def _add(writer: ShardWriter, key: str, tensors: dict[str, Tensor]) -> str:
    """Put a sample into the shard; the reason when its states are not what the run's codec can hold."""
    try:
        writer.add(key, tensors)
    except SampleError as error:
        return str(error)
    return ""


def prompt_tokens(loss_mask: NDArray[np.uint8]) -> int:
    """Tokens before the first supervised one; at least one, since nothing can be generated from no text."""
    return max(1, int(np.argmax(loss_mask))) if loss_mask.any() else len(loss_mask)


def sample_tensors(sample: PreparedSample, states: States) -> dict[str, Tensor]:
    """What a shard keeps of a sample."""
    tensors = {
        "hidden_states": states.hidden_states,
        "input_ids": torch.tensor(sample.input_ids, dtype=torch.int32),
        "loss_mask": torch.tensor(sample.loss_mask, dtype=torch.uint8),
    }
    return tensors if states.final_state is None else tensors | {"final_state": states.final_state}


def greedy_tensors(input_ids: NDArray[np.int32], prompt: int, states: States) -> dict[str, Tensor]:
    """What a shard keeps of a held-out sample's continuation: prompt and continuation are one text."""
    return {
        "greedy.hidden_states": states.hidden_states,
        "greedy.input_ids": torch.tensor(input_ids, dtype=torch.int32),
        "greedy.prompt_tokens": torch.tensor([prompt], dtype=torch.int32),
    }
