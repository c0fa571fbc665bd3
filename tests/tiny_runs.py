"""Prepared runs of random tokens to extract: a run.json, a sample table and units, in any store."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_stream import layout
from dflash_stream.config import StoreSettings, TargetSettings
from dflash_stream.hashing import token_hash
from dflash_stream.run import (
    FORMAT_VERSION,
    LAYER_CONVENTION,
    SAMPLES_SCHEMA,
    UNIT_SCHEMA,
    Identity,
    Run,
    TextIdentity,
    ValidationRule,
)
from dflash_stream.store import Store, open_store
from dflash_stream.target.identity import describe_target
from tests.tiny_targets import VOCAB

LAYERS = [1, 3, 5]


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> bytes:
    body = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), body)
    return body.getvalue()


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
        rows = []
        for _ in range(samples_per_unit):
            tokens = rng.integers(3, VOCAB, rng.integers(*lengths)).astype(np.int32)
            mask = (np.arange(len(tokens)) >= max(1, len(tokens) // 3)).astype(np.uint8)
            key = f"{len(table):08d}-{token_hash(tokens) & 0xFFFFFFFF:08x}"
            rows.append({"key": key, "input_ids": tokens.tolist(), "loss_mask": mask.tolist()})
            table.append(
                {
                    "key": key, "source": "random", "row": len(table), "unit": unit, "tokens": len(tokens),
                    "supervised": int(mask.sum()), "token_hash": token_hash(tokens),
                    "split": "validation" if unit < validation_units else "train",
                }
            )  # fmt: skip
        store.put(layout.unit_tokens(unit), _table(rows, UNIT_SCHEMA))
    samples = _table(table, SAMPLES_SCHEMA)
    store.put(layout.SAMPLES, samples)
    described = describe_target(TargetSettings(id=str(target)))
    width = described.hidden_size
    identity = Identity(
        format=FORMAT_VERSION,
        target=described,
        text=TextIdentity(
            tokenizer_sha256=None, chat_template_sha256=None, thinking=None, template_kwargs={}, turns="all",
            truncation="right", max_tokens=lengths[1],
        ),
        layers=LAYERS,
        layer_convention=LAYER_CONVENTION,
        dtype="float32",
        codec="bf16",
        final_state="pre_norm" if final_state else "none",
        tensors={"hidden_states": {"shape": f"[T, {len(LAYERS)}, {width}]", "dtype": "bf16"}},
        samples_sha256=hashlib.sha256(samples).hexdigest(),
        samples=len(table),
        tokens=sum(row["tokens"] for row in table),
        units=units,
        unit_bytes=1 << 20,
        seed=seed,
        validation=ValidationRule(
            rule="random", units=validation_units, samples=validation_units * samples_per_unit,
            new_tokens=new_tokens,
        ),
    )  # fmt: skip
    run = Run(store, identity)
    run.publish()
    return run


def publish_at(url: str, target: Path, **options: Any) -> Run:
    """`publish_run` at an address."""
    return publish_run(open_store(StoreSettings(url=url)), target, **options)
