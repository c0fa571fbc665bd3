"""What a training says of itself: the figures of its log, and the summary at its end."""

from __future__ import annotations

from dataclasses import dataclass

from train.checkpoint import CheckpointRecord, TrainState
from train.optimizer import Sums


@dataclass(frozen=True)
class TrainSummary:
    """What a training came to. Speeds are those of this process's start, over all ranks; losses those of the drafter.

    acceptance: mean acceptance length over the target's own text of held-out samples, as last measured
    checkpoint: key prefix of the newest published checkpoint
    stopped_by: number of the signal that ended it before its last step
    """

    steps: int
    total_steps: int
    first_loss: float
    last_loss: float
    tokens: int
    tokens_per_s: float
    seconds: float
    acceptance: float | None
    checkpoint: str | None
    stopped_by: int | None = None

    def to_text(self) -> str:
        """A few words for a terminal."""
        loss = f"loss {self.first_loss:.3f} → {self.last_loss:.3f}"
        gain = f", acceptance length {self.acceptance:.3f}" if self.acceptance is not None else ""
        where = f", checkpoint {self.checkpoint}" if self.checkpoint else ""
        return f"step {self.steps:,} of {self.total_steps:,}: {loss}{gain}{where}"

    @classmethod
    def of(cls, state: TrainState, newest: CheckpointRecord) -> TrainSummary:
        """The summary of a training that was complete before this start."""
        return cls(
            steps=state.step,
            total_steps=state.total_steps,
            first_loss=state.first_loss,
            last_loss=state.last_loss,
            tokens=state.tokens,
            tokens_per_s=0.0,
            seconds=0.0,
            acceptance=state.acceptance,
            checkpoint=newest.prefix,
        )


class Window:
    """What the log says of the steps since it last said something."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._sums: list[Sums] = []

    def add(self, sums: Sums, seconds: float) -> None:
        """Take a step in, with the time that it took: validation and checkpoints do not count as training."""
        self._sums.append(sums)
        self.seconds += seconds

    def figures(self, world: int) -> dict[str, float]:
        """Loss and accuracies over the window, speeds over all ranks, share of time that ranks waited for data."""
        total = Sums.total(self._sums)
        return total.figures() | {
            "tokens_per_s": total.tokens / self.seconds,
            "samples_per_s": total.samples / self.seconds,
            "data_wait_share": total.wait_s / self.seconds / world,
        }
