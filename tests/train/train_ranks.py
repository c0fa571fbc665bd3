"""Run by the tests, alone or under a launcher: several trainings one after another in one group of processes.

    accelerate launch … train_ranks.py PLAN OUT

PLAN: JSON list of settings by section, with `take_over_at` and `stop_at` (steps) beside them. Each rank writes
OUT/rank-R.json: for each training the world size that the rank saw, what it logged at each step, how many
samples it read, and the error it ended with.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dflash_stream.config import build
from dflash_stream.errors import UserError
from train import checkpoint, trainer
from train.ranks import Ranks
from train.trainer import Training


class Recorder:
    where = "here"

    def __init__(self, result: dict[str, Any]) -> None:
        self.result = result

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.result["logged"].setdefault(step, {}).update(values)

    def summary(self, values: dict[str, Any]) -> None:
        self.result["summary"] = values

    def close(self, state: str = "finished") -> None:
        pass


def run(plan: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"world": 0, "logged": {}, "error": "", "samples_read": 0}
    take_over_at, stop_at = plan.pop("take_over_at", None), plan.pop("stop_at", None)

    class Watched(Training):
        def _count(self, *arguments: Any) -> None:
            super()._count(*arguments)
            result["samples_read"] = self.stream.counters.samples
            if self.step == take_over_at and self.ranks.first:
                self.publisher.settle()  # or its record of the checkpoint before may come in between
                mine = self.ownership
                checkpoint.Ownership(
                    self.store, mine.name, self.plan.run.identity.fingerprint, mine.record.settings
                ).take()
            if self.step == stop_at and self.ranks.rank == self.ranks.world - 1:
                signal.raise_signal(signal.SIGTERM)  # on one rank only

    trainer.Training = Watched  # type: ignore[misc]
    trainer.open_tracker = lambda *_, **__: Recorder(result)  # type: ignore[assignment]
    try:
        trainer.train(build(plan))
    except UserError as error:
        result["error"] = str(error)
    grouped = dist.is_initialized()
    result["world"] = dist.get_world_size() if grouped else 1
    result["backend"] = dist.get_backend() if grouped else ""
    return result


def main() -> None:
    Ranks.leave = lambda self: None  # type: ignore[method-assign]  # the group serves all trainings
    results = [run(plan) for plan in json.loads(Path(sys.argv[1]).read_text())]
    rank = dist.get_rank() if dist.is_initialized() else 0
    Path(sys.argv[2], f"rank-{rank}.json").write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
