"""Hidden states of the prepared samples into shards: claim a unit, run the target over it, stream it to the store.

Any number of processes work on one run and know of each other only through the store. Restarting continues.
"""

from dflash_stream.extract.session import ExtractSummary, extract

__all__ = ["ExtractSummary", "extract"]
