"""Which bytes to ask for: neighbours in one read, large samples in several. Pure; `reader` does the asking."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dflash_stream.shards.index import Location

_GAP_BYTES = 1023  # between the payloads of neighbours in a tar at most: padding of one, header of the next


@dataclass(frozen=True)
class Read:
    """Bytes [start, stop) of an object: the payloads of `places`, indices into the list that was planned."""

    start: int
    stop: int
    places: list[int]


def plan_reads(locations: list[Location | None], range_bytes: int) -> list[Read]:
    """Merge payloads that lie side by side into reads of at most `range_bytes`; a larger one is read alone.

    Reads come in the order of their first place. A location of None has nothing to be read.
    """
    stored = [(where.object, where.offset, place) for place, where in enumerate(locations) if where is not None]
    reads: list[Read] = []
    current = ""
    for name, offset, place in sorted(stored):
        where = locations[place]
        assert where is not None
        stop = offset + where.size
        last = reads[-1] if reads and name == current else None
        if last and 0 <= offset - last.stop <= _GAP_BYTES and stop - last.start <= range_bytes:
            reads[-1] = Read(last.start, stop, [*last.places, place])
        else:
            reads.append(Read(offset, stop, [place]))
        current = name
    return sorted(reads, key=lambda read: min(read.places))


def cut(start: int, stop: int, range_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) as the fewest ranges of at most `range_bytes`, as equal as can be."""
    length = stop - start
    count = max(1, -(-length // range_bytes))
    edges = [start + length * part // count for part in range(count + 1)]
    return list(pairwise(edges))
