"""How a command ends: what all entry points share.

A UserError is printed as one message on stderr and exits 1; every other exception is a fault of ours and keeps
its traceback. SIGINT and SIGTERM unwind it, so that nothing temporary is left, and it exits with 128 plus their
number; a phase that has more to close takes the signals itself. A launched process does not outlive its launcher.
The loggers of libraries are turned down to warnings.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from dflash_stream.errors import Interrupted, ToldElsewhere, UserError
from dflash_stream.launched import end_with_launcher

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # that ask a command to stop


def run(command: Callable[[], int | None]) -> None:
    """Run `command` and exit with what it returns."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for noisy in ("botocore", "boto3", "urllib3", "httpx", "httpcore", "accelerate", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it prints its lines itself
    end_with_launcher()
    try:
        status = _stoppable(command)
    except Interrupted as stop:
        print(stop, file=sys.stderr, flush=True)
        status = stop.exit_code
    except ToldElsewhere:
        status = 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 1
    except BrokenPipeError:  # the reader of our output went away (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status or 0)


def _stoppable(command: Callable[[], int | None]) -> int | None:
    """Run `command`. The first signal unwinds it; another one, or one after it, ends the process at once."""
    for number in SIGNALS:
        signal.signal(number, _stop)
    try:
        return command()
    finally:
        _end_at_once()


def _stop(number: int, frame: FrameType | None) -> None:
    _end_at_once()
    raise Interrupted(number)


def _end_at_once() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
