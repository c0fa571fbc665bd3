"""Chats → samples: rendered with the target's own template, masked, shuffled, cut into units, published as a
run.
"""

from dflash_stream.prepare.pipeline import prepare
from dflash_stream.prepare.show import show

__all__ = ["prepare", "show"]
