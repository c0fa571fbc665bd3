"""How a command ends: what all entry points share.

A UserError is printed as one message on stderr and exits 1; every other exception is a fault of ours and keeps
its traceback. A launched process does not outlive its launcher. The loggers of libraries are turned down to
warnings.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

from dflash_stream.errors import ToldElsewhere, UserError
from dflash_stream.launched import end_with_launcher


def run(command: Callable[[], int | None]) -> None:
    """Run `command` and exit with what it returns."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    for noisy in ("botocore", "boto3", "urllib3", "httpx", "httpcore", "accelerate", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    end_with_launcher()
    try:
        status = command()
    except ToldElsewhere:
        status = 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 1
    except BrokenPipeError:  # the reader of our output went away (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status or 0)
