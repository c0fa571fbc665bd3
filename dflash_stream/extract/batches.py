"""Which samples of a unit go through the target together, and in what order they come back: pure, no I/O.

Samples are taken in windows of a few batches. Within a window they are sorted by length, so that little is
padded; the window bounds how many finished samples wait for an earlier one, and so the host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

WINDOW_BATCHES = 4

T = TypeVar("T")


def plan(lengths: Sequence[int], budget_tokens: int, window_batches: int = WINDOW_BATCHES) -> list[list[int]]:
    """Batches of places in `lengths`: each place once, at most `budget_tokens` padded tokens a batch.

    A sample longer than the budget is a batch of its own. Places further apart than a window are never swapped.
    """
    batches: list[list[int]] = []
    for window in _windows(lengths, budget_tokens * window_batches):
        batch: list[int] = []
        for place in sorted(window, key=lambda place: -lengths[place]):  # equal lengths keep their order
            if batch and (len(batch) + 1) * lengths[batch[0]] > budget_tokens:
                batches.append(batch)
                batch = []
            batch.append(place)
        batches.append(batch)
    return batches


def _windows(lengths: Sequence[int], window_tokens: int) -> Iterator[list[int]]:
    """Runs of consecutive places of at most `window_tokens` (but one place at least)."""
    window: list[int] = []
    tokens = 0
    for place, length in enumerate(lengths):
        if window and tokens + length > window_tokens:
            yield window
            window, tokens = [], 0
        window.append(place)
        tokens += length
    if window:
        yield window


def in_order(found: Iterable[tuple[int, T]]) -> Iterator[T]:
    """Values that come with their places 0, 1, 2 … in any order, as soon as it is their turn."""
    waiting: dict[int, T] = {}
    turn = 0
    for place, value in found:
        waiting[place] = value
        while turn in waiting:
            yield waiting.pop(turn)
            turn += 1
    assert not waiting, f"place {turn} never came"
