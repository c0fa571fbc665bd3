"""Where this process stands among those that were launched together: for the choice of a device, and for
its logs.

Extraction makes no process group: the processes share work through the store alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dflash_stream.errors import UserError
from dflash_stream.extract.lifetime import was_launched


@dataclass(frozen=True)
class Place:
    """rank: among all processes of the launch; world: their number; device: this process's own."""

    rank: int
    world: int
    device: torch.device


def take_place() -> Place:
    """Read what the launcher says, choose the device, and on CPU share the cores of this machine."""
    rank, local_rank = _number("RANK", 0), _number("LOCAL_RANK", 0)
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
        torch.set_num_threads(cpu_threads(len(os.sched_getaffinity(0)), _number("LOCAL_WORLD_SIZE", 1)))
    return Place(rank, _number("WORLD_SIZE", 1), device)


def cpu_threads(cores: int, processes: int) -> int:
    """Compute threads of one process. OMP_NUM_THREADS decides where a person has set it.

    accelerate and torchrun set it to 1 by themselves, so a 1 under a launcher says nothing.
    """
    given = _number("OMP_NUM_THREADS", 0)
    if given > 0 and not (given == 1 and was_launched()):
        return given
    return max(1, cores // processes)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
