"""A stock webdataset pipeline over the shards of a run, for those whose training is built on webdataset.

It is shuffled as webdataset shuffles: shards in random order, samples through a buffer. It knows no position to
resume at, its order changes with the number of processes and workers, and ranks may get unequal numbers of
samples. The project's own training reads through `loader`, which has none of these limits.
"""

from __future__ import annotations

from typing import Literal

import webdataset as wds

from dflash_stream.config import StoreSettings
from dflash_stream.shards.webdataset import decode_sample, register_s3, shard_urls


def webdataset_pipeline(
    store_url: str,
    split: Literal["train", "validation"] = "train",
    *,
    settings: StoreSettings | None = None,
    buffer_samples: int = 16,
    seed: int | None = None,
) -> wds.WebDataset:
    """Dicts of `__key__` and a sample's tensors, once over the shards of this rank and worker.

    `buffer_samples` encoded samples are held for shuffling, in each worker: mind their size. Without `seed`
    every pass has another order; with one, every pass has the same. UserError when there is no run or no
    committed shard.
    """
    register_s3(settings)
    urls = shard_urls(store_url, split, settings=settings)
    shards = wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node, seed=seed)
    return shards.shuffle(buffer_samples, initial=buffer_samples, seed=seed).map(decode_sample)
