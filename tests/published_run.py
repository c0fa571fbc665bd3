"""What every made-up run has in common: the sample table and run.json that state it."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash_stream import layout
from dflash_stream.run import (
    FORMAT_VERSION,
    LAYER_CONVENTION,
    UNIT_SCHEMA,
    Identity,
    Run,
    TargetIdentity,
    TextIdentity,
    ValidationRule,
)
from dflash_stream.store import Store


def put_unit(store: Store, unit: int, samples: list[dict[str, Any]]) -> None:
    """Store the tokens of a unit: key, input_ids and loss_mask of each of its samples."""
    store.put(layout.unit_tokens(unit), _parquet(pa.Table.from_pylist(samples, schema=UNIT_SCHEMA)))


def publish(
    store: Store,
    table: pa.Table,
    target: TargetIdentity,
    layers: list[int],
    *,
    new_tokens: int,
    dtype: Any = "bfloat16",
    codec: Any = "bf16",
    final_state: Any = "none",
) -> Run:
    """Store the sample table (SAMPLES_SCHEMA), and a run.json that fits it."""
    body = _parquet(table)
    store.put(layout.SAMPLES, body)
    held_out = table.filter(pc.equal(table["split"], "validation"))
    identity = Identity(
        format=FORMAT_VERSION,
        target=target,
        text=TextIdentity(
            tokenizer_sha256=None, chat_template_sha256=None, thinking=None, template_kwargs={}, turns="all",
            truncation="right", max_tokens=pc.max(table["tokens"]).as_py(),
        ),
        layers=layers,
        layer_convention=LAYER_CONVENTION,
        dtype=dtype,
        codec=codec,
        final_state=final_state,
        tensors={"hidden_states": {"shape": f"[T, {len(layers)}, {target.hidden_size}]", "dtype": "bf16"}},
        samples_sha256=hashlib.sha256(body).hexdigest(),
        samples=len(table),
        tokens=pc.sum(table["tokens"]).as_py(),
        units=len(pc.unique(table["unit"])),
        unit_bytes=1 << 20,
        seed=0,
        validation=ValidationRule(
            rule="first", units=len(pc.unique(held_out["unit"])), samples=len(held_out), new_tokens=new_tokens
        ),
    )  # fmt: skip
    run = Run(store, identity)
    run.publish()
    return run


def _parquet(table: pa.Table) -> bytes:
    body = io.BytesIO()
    pq.write_table(table, body)
    return body.getvalue()
