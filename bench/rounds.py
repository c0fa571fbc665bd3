"""Several ways to do the same thing, measured in interleaved rounds: other load on the machine meets all alike."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping

Figures = dict[str, list[tuple[float, float]]]  # way → (seconds, CPU seconds) of each round


def cpu_s() -> float:
    """CPU seconds of this process and of the children it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(ways: Mapping[str, Callable[[int], None]], rounds: int) -> Figures:
    """Call each way with the number of the round; round 0 does not count. Every round begins with another way."""
    figures: Figures = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            wall, cpu = time.perf_counter(), cpu_s()
            ways[name](number)
            if number:
                figures[name].append((time.perf_counter() - wall, cpu_s() - cpu))
    return figures


def medians(figures: Figures) -> dict[str, tuple[float, float]]:
    """Way → median of its seconds, median of its CPU seconds."""
    return {
        name: (statistics.median(wall for wall, _ in rounds), statistics.median(cpu for _, cpu in rounds))
        for name, rounds in figures.items()
    }
