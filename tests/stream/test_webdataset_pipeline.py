"""The stock webdataset pipeline over a run: the same samples, shuffled."""

from __future__ import annotations

import torch

from dflash_stream.config import MiB, StoreSettings
from dflash_stream.store import open_store
from dflash_stream.stream.webdataset import webdataset_pipeline
from tests.synthetic_run import extract_run, prepare_run, sample_tensors


def test_webdataset_yields_every_training_sample_once_and_shuffled(s3_url: str) -> None:
    settings = StoreSettings(url=s3_url, part_bytes=5 * MiB, pool_bytes=10 * MiB, max_concurrent_uploads=2)
    run = prepare_run(open_store(settings))
    extract_run(run, settings, refuse={9})
    row_of = {key: row for row, key in enumerate(run.samples.key)}
    passes = []
    for seed in (1, 2, 2):
        rows = []
        for sample in webdataset_pipeline(s3_url, seed=seed):
            rows.append(row := row_of[sample["__key__"]])
            expected = sample_tensors(row, int(run.samples.tokens[row]), 2, 16)
            assert all(torch.equal(sample[name], tensor) for name, tensor in expected.items())
        passes.append(rows)
    assert sorted(passes[0]) == sorted(passes[1]) == [row for row in range(6, 24) if row != 9]
    assert passes[0] != passes[1] == passes[2]
    assert passes[1] != sorted(passes[1])
