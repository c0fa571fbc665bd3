"""Train a drafter on the states of a run, and keep its checkpoints in the run's store: one process a GPU.

    accelerate launch train_drafter.py --config configs/qwen3.6-27b.yaml
    accelerate launch --config_file launch/accelerate/cpu_2.yaml train_drafter.py --config configs/smollm2-135m.yaml

Run it again to continue at the newest checkpoint. `--help` shows every setting.
"""

from __future__ import annotations

from dflash_stream import config, entry


def main() -> int:
    """Read the settings, train; the exit status is 128 plus the number of a signal that ended it early."""
    parser = config.command_line(
        "train_drafter.py",
        "Train a DFlash drafter on the states of a run, and keep its checkpoints in the run's store.",
    )
    settings, _ = config.load(parser, sections=("store", "drafter", "train", "stream", "tracking"))
    from train.trainer import train  # torch only now: mistakes are answered at once

    summary = train(settings)
    return 128 + summary.stopped_by if summary.stopped_by else 0


if __name__ == "__main__":
    entry.run(main)
