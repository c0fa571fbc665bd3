"""Prepared runs of random tokens to extract, in any store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash_stream.config import StoreSettings, TargetSettings
from dflash_stream.hashing import token_hash
from dflash_stream.run import SAMPLES_SCHEMA, Run
from dflash_stream.store import Store, open_store
from dflash_stream.target.identity import describe_target
from tests.published_run import publish, put_unit
from tests.tiny_targets import VOCAB

LAYERS = [1, 3, 5]


def publish_run(
    store: Store,
    target: Path,
    *,
    units: int = 4,
    validation_units: int = 1,
    samples_per_unit: int = 6,
    new_tokens: int = 8,
    lengths: tuple[int, int] = (5, 40),
    final_state: bool = False,
    seed: int = 0,
) -> Run:
    """Put a run into `store` and open it. Tokens are 3 … VOCAB-1; the first third of a sample is its prompt."""
    rng = np.random.default_rng(seed)
    table: list[dict[str, Any]] = []
    for unit in range(units):
        samples = []
        for _ in range(samples_per_unit):
            tokens = rng.integers(3, VOCAB, rng.integers(*lengths)).astype(np.int32)
            mask = (np.arange(len(tokens)) >= max(1, len(tokens) // 3)).astype(np.uint8)
            key = f"{len(table):08d}-{token_hash(tokens) & 0xFFFFFFFF:08x}"
            samples.append({"key": key, "input_ids": tokens.tolist(), "loss_mask": mask.tolist()})
            table.append(
                {
                    "key": key, "source": "random", "row": len(table), "unit": unit, "tokens": len(tokens),
                    "supervised": int(mask.sum()), "token_hash": token_hash(tokens),
                    "split": "validation" if unit < validation_units else "train",
                }
            )  # fmt: skip
        put_unit(store, unit, samples)
    return publish(
        store,
        pa.Table.from_pylist(table, schema=SAMPLES_SCHEMA),
        describe_target(TargetSettings(id=str(target))),
        LAYERS,
        new_tokens=new_tokens,
        dtype="float32",
        final_state="pre_norm" if final_state else "none",
    )


def publish_at(url: str, target: Path, **options: Any) -> Run:
    """`publish_run` at an address."""
    return publish_run(open_store(StoreSettings(url=url)), target, **options)
