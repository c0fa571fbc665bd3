"""Chats → samples: rendered with the target's own template, masked, shuffled, cut into units, published.

Worker processes import this package, so it imports no torch by itself: the two entries load what they need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_stream.config import Config
    from dflash_stream.run import Run


def prepare(config: Config, *, log: Callable[[str], None] = print) -> Run:
    """Prepare the run of `config`; one that is there already and equal is returned. Raises UserError."""
    from dflash_stream.prepare import pipeline

    return pipeline.prepare(config, log=log)


def show(config: Config, count: int) -> None:
    """Print the first `count` samples of the inputs, supervised tokens coloured. Raises UserError."""
    from dflash_stream.prepare import viewer

    viewer.show(config, count)
