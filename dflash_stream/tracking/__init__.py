"""What a run tells the outside while it works: wandb and the heartbeat object under status/."""

from dflash_stream.tracking.tracker import Tracker, open_tracker

__all__ = ["Tracker", "open_tracker"]
