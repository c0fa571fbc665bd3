"""Train a drafter on the states of a run. On every GPU of this machine, or on two CPU processes:

accelerate launch train_drafter.py --config configs/qwen3.6-27b.yaml
accelerate launch --multi_gpu --num_processes 2 train_drafter.py --config configs/smollm2-135m.yaml
"""

from __future__ import annotations

from dflash_stream import config, entry


def main() -> int:
    settings, _ = config.load(
        program="train_drafter.py",
        about="Train a DFlash drafter on the states of a run, and keep its checkpoints in the run's store.",
        sections=("store", "drafter", "train", "stream", "tracking"),
    )
    from train.trainer import train  # torch only now: --help and a mistyped setting answer at once

    summary = train(settings)
    return 128 + summary.stopped_by if summary.stopped_by else 0


if __name__ == "__main__":
    entry.run(main)
