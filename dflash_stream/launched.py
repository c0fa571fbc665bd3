"""What accelerate or torchrun, if one of them started this process, says about it; and what when it dies.

Needs no torch: entry points ask before they import anything heavy.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

log = logging.getLogger(__name__)

LAUNCHER_SIGNS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set by torchrun and accelerate
PARENT_POLL_S = 0.5


def was_launched() -> bool:
    """Whether accelerate or torchrun started this process."""
    return any(name in os.environ for name in LAUNCHER_SIGNS)


def number(name: str, default: int) -> int:
    """A number from the environment, such as RANK or WORLD_SIZE; `default` where none is set."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default


def cpu_threads() -> int:
    """Threads for what this process computes on the CPU: its share of the cores, unless OMP_NUM_THREADS says otherwise.

    accelerate and torchrun set that to 1 by themselves, so a 1 under a launcher says nothing.
    """
    given = number("OMP_NUM_THREADS", 0)
    if given > (1 if was_launched() else 0):
        return given
    return max(1, usable_cores() // number("LOCAL_WORLD_SIZE", 1))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def end_with_launcher() -> None:
    """From now on, the launcher's death sends this process a SIGTERM: a launcher that is killed cannot pass it on.

    Does nothing without a launcher: the shell that started a command may well end before it.
    """
    if was_launched():
        threading.Thread(target=_watch, args=(os.getppid(),), name="launcher", daemon=True).start()


def _watch(parent: int) -> None:
    # Polled, since that works on every system; and Linux's death signal is sent when the thread that forked ends.
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    log.error("the process that started this one has died: stopping")
    os.kill(os.getpid(), signal.SIGTERM)
