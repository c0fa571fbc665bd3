"""Where this process stands among those that were launched together: for the choice of a device, and for its logs.

Extraction makes no process group: the processes share work through the store alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_stream.errors import UserError
from dflash_stream.launched import cpu_threads, number


@dataclass(frozen=True)
class Place:
    """rank: among all processes of the launch; world: their number; device: this process's own."""

    rank: int
    world: int
    device: torch.device


def take_place() -> Place:
    """Read what the launcher says, choose the device, and on CPU share the cores of this machine."""
    local_rank = number("LOCAL_RANK", 0)
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {local_rank} of this machine has no GPU of its own: "
                f"there are {torch.cuda.device_count()}. "
                "Start at most one process a GPU (accelerate launch --num_processes)."
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(cpu_threads())
    return Place(number("RANK", 0), number("WORLD_SIZE", 1), device)
