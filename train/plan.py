"""What a training is before it begins: the drafter, the number of steps, the settings that may not change on the way.

All of it follows from run.json, the sample table and the settings, before a byte of data is read and on every
rank alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dflash_stream.config import Config, TrainSettings
from dflash_stream.errors import UserError
from dflash_stream.head import load_tokenizer
from dflash_stream.run import Run
from train.drafter_config import DrafterConfig

FIXED = ("batch_samples", "seed", "epochs", "anchors")  # of train; the order and the anchors depend on them


@dataclass(frozen=True)
class Plan:
    """A training of a run by these settings."""

    config: Config
    run: Run
    drafter: DrafterConfig
    samples: int  # to train on
    total_steps: int

    @property
    def fixed_settings(self) -> dict[str, Any]:
        """Dotted name → value of all that may not change while the drafter trains. The rest may: it only
        changes speed, or what the remaining steps do."""
        fixed = {f"train.{name}": getattr(self.config.train, name) for name in FIXED}
        fixed["stream.block_bytes"] = self.config.stream.block_bytes
        return fixed | {
            f"drafter.{name}": value for name, value in self.drafter.model_dump(mode="json").items()
        }

    def to_text(self, world: int, device: str) -> str:
        """A few words for a terminal: what `world` processes on such devices are about to do."""
        batch = self.config.train.batch_samples
        return (
            f"{self.run.store.url}: {world} {'process' if world == 1 else 'processes'} on {device}, "
            f"{self.total_steps:,} steps of {batch:,} samples: "
            f"{self.total_steps * batch / self.samples:.2f} epochs of {self.samples:,} samples"
        )


def make_plan(config: Config, run: Run) -> Plan:
    """UserError for settings that do not fit the run or each other."""
    unset = config.drafter.mask_token_id is None
    drafter = DrafterConfig.from_run(
        run.identity, config.drafter, tokenizer_size=len(load_tokenizer(run.store)) if unset else None
    )
    samples = int((~run.samples.validation).sum())
    return Plan(config, run, drafter, samples, count_steps(samples, config.train))


def count_steps(num_samples: int, settings: TrainSettings) -> int:
    """Steps of the whole training: whole global batches in `epochs` passes over the samples, or max_steps."""
    steps = math.floor(settings.epochs * num_samples / settings.batch_samples)
    if steps == 0:
        raise UserError(
            f"{settings.epochs:g} epochs of {num_samples:,} samples are less than one batch of "
            f"{settings.batch_samples}: lower train.batch_samples or raise train.epochs"
        )
    return min(steps, settings.max_steps or steps)
