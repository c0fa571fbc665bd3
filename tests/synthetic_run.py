"""A small extracted run made without a model: sample table, units and shards through the real writer.

Every value of a sample follows from its row, so a test can tell what it was given.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dflash_stream.config import StoreSettings
from dflash_stream.hashing import mix64
from dflash_stream.run import SAMPLES_SCHEMA, Run, TargetIdentity
from dflash_stream.shards.writer import ShardWriter
from dflash_stream.store import Store, Uploader
from tests.published_run import publish


def sample_tensors(
    row: int, tokens: int, layers: int, hidden: int, *, greedy: bool = False
) -> dict[str, torch.Tensor]:
    """What the shard of the run holds for a row of its sample table."""
    noise = mix64(row, np.arange(tokens * layers * hidden)).astype(np.int64) % 2001 - 1000
    states = torch.from_numpy(noise.astype(np.float32) / 250).to(torch.bfloat16).reshape(tokens, layers, hidden)
    tensors = {
        "hidden_states": states,
        "input_ids": torch.arange(tokens, dtype=torch.int32) + row,
        "loss_mask": (torch.arange(tokens) % 3 > 0).to(torch.uint8),
    }
    if greedy:
        tensors |= {
            "greedy.hidden_states": states[:2] + 1,
            "greedy.input_ids": torch.tensor([row, row + 1], dtype=torch.int32),
            "greedy.prompt_tokens": torch.tensor([1], dtype=torch.int32),
        }
    return tensors


def prepare_run(
    store: Store,
    *,
    units: int = 4,
    each: int = 6,
    validation_units: int = 1,
    tokens: tuple[int, int] = (5, 20),
    layers: int = 2,
    hidden: int = 16,
    codec: Any = "bf16",
) -> Run:
    """Publish run.json and the sample table; token counts are between the two of `tokens`, by hash."""
    rows = units * each
    counts = (tokens[0] + mix64(1, np.arange(rows)).astype(np.int64) % (tokens[1] - tokens[0] + 1)).astype(
        np.int32
    )
    unit = np.repeat(np.arange(units, dtype=np.int32), each)
    table = pa.table(
        {
            "key": [f"{row:08d}-{int(mix64(row)) >> 32:08x}" for row in range(rows)],
            "source": ["synthetic"] * rows,
            "row": np.arange(rows),
            "unit": unit,
            "tokens": counts,
            "supervised": counts // 2,
            "split": np.where(unit < validation_units, "validation", "train").tolist(),
            "token_hash": mix64(2, np.arange(rows)),
        },
        schema=SAMPLES_SCHEMA,
    )
    target = TargetIdentity(
        id="synthetic",
        revision=None,
        architecture="none",
        config_sha256="",
        num_layers=layers + 1,
        hidden_size=hidden,
        vocab_size=64,
    )
    return publish(store, table, target, list(range(layers)), new_tokens=1, codec=codec)


def extract_run(
    run: Run, settings: StoreSettings, *, units: Collection[int] | None = None, refuse: Collection[int] = ()
) -> None:
    """Write and commit the shards of `units` (all by default); rows in `refuse` are refused."""
    table, identity = run.samples, run.identity
    with Uploader(run.store, settings) as uploader:
        for unit in range(identity.units) if units is None else units:
            writer = ShardWriter(uploader, run.store, identity, unit, made_with={"software": "synthetic"})
            for row in np.flatnonzero(table.unit == unit).tolist():
                if row in refuse:
                    writer.refuse(table.key[row], "refused by the test")
                    continue
                tensors = sample_tensors(
                    row,
                    int(table.tokens[row]),
                    len(identity.layers),
                    identity.target.hidden_size,
                    greedy=bool(table.validation[row]),
                )
                writer.add(table.key[row], tensors)
            assert writer.finish().result(60).ours
