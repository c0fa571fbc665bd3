"""The identity of a run: what is extracted and how. Written once as run.json; later processes compare with it.

`prepare` builds it, everyone else opens it. Nothing here knows of models or shards.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_stream import layout
from dflash_stream.errors import UserError
from dflash_stream.hashing import fingerprint
from dflash_stream.store import NotFound, PreconditionFailed, Store

FORMAT_VERSION = 1
LAYER_CONVENTION = "output of decoder layer i, 0-based, before any final norm"
REWRITE = "run dflash-stream prepare again, with the inputs and settings of the run: it writes what is missing"

SAMPLES_SCHEMA = pa.schema(
    [
        ("key", pa.string()),  # name of the sample in its shard, [A-Za-z0-9_-]{1,80}
        ("source", pa.string()),  # base name of the file it came from
        ("row", pa.int64()),  # row in that file, from 0
        ("unit", pa.int32()),
        ("tokens", pa.int32()),
        ("supervised", pa.int32()),  # supervised tokens
        ("split", pa.string()),  # "train" or "validation"
        ("token_hash", pa.uint64()),  # hashing.token_hash of the input_ids
    ]
)
UNIT_SCHEMA = pa.schema(
    [("key", pa.string()), ("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))]
)


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetIdentity(_Frozen):
    """Which model the target is. The id says where one copy came from; the hash is equal for all copies."""

    id: str
    revision: str | None
    architecture: str
    config_sha256: str  # of its config.json, without what does not alter the model
    num_layers: int  # decoder layers
    hidden_size: int
    vocab_size: int


class TextIdentity(_Frozen):
    """How text became tokens. All None for a dataset that came tokenised."""

    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    thinking: bool | None
    template_kwargs: dict[str, Any]
    turns: Literal["all", "last", "each"]
    truncation: Literal["right", "drop"]
    max_tokens: int


class ValidationRule(_Frozen):
    """Held-out samples: how they were chosen, the units they fill (0 … units-1), what is generated for them."""

    rule: str
    units: int
    samples: int
    new_tokens: int


class Identity(_Frozen):
    """The content of run.json."""

    format: int
    target: TargetIdentity
    text: TextIdentity
    layers: list[int]
    layer_convention: str
    dtype: str  # of the target's forward pass
    codec: Literal["bf16", "bf16z", "fp8"]
    final_state: Literal["none", "pre_norm"]
    tensors: dict[str, dict[str, Any]]  # name → {"shape": "[T, 5, 576]", "dtype": "bfloat16"}, as read
    samples_sha256: str  # of tokens/samples.parquet
    samples: int
    tokens: int
    units: int  # validation units first
    unit_bytes: int
    seed: int
    validation: ValidationRule

    @cached_property
    def fingerprint(self) -> str:
        """A hash over every field: equal for two processes that work on the same run."""
        return fingerprint(self.model_dump())

    @property
    def bytes_per_token(self) -> int:
        """Bytes of hidden states a token, as stored by the raw codec."""
        return len(self.layers) * self.target.hidden_size * 2


@dataclass(frozen=True)
class SampleTable:
    """tokens/samples.parquet as columns, sorted by (unit, place in the unit)."""

    key: list[str]
    source: list[str]
    row: NDArray[np.int64]
    unit: NDArray[np.int32]
    tokens: NDArray[np.int32]
    supervised: NDArray[np.int32]
    validation: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.key)


@dataclass(frozen=True)
class PreparedSample:
    """One sample as `prepare` left it: key, input_ids [T] int32, loss_mask [T] uint8 (1 = supervised)."""

    key: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


class Run:
    """A prepared run in a store."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self.store = store
        self.identity = identity

    @classmethod
    def open(cls, store: Store) -> Run:
        """Read run.json. UserError when there is none or it is of a newer format."""
        try:
            body, _ = store.get(layout.RUN)
        except NotFound:
            raise UserError(
                f"no run at {store.url}: {layout.RUN} is missing. Make one with: "
                f"dflash-stream prepare --store.url {store.url}"
            ) from None
        return cls(store, parse_identity(body, store.url))

    def publish(self) -> None:
        """Write run.json, once. When another one is there already, UserError unless it is the same."""
        body = self.identity.model_dump_json(indent=1).encode()
        try:
            self.store.put(layout.RUN, body, if_none_match=True)
        except PreconditionFailed:
            compare(Run.open(self.store).identity, self.identity, self.store.url)

    @cached_property
    def samples(self) -> SampleTable:
        """The sample table, checked against the hash in run.json."""
        body = self._prepared(layout.SAMPLES)
        if hashlib.sha256(body).hexdigest() != self.identity.samples_sha256:
            raise UserError(
                f"{self.store.url}/{layout.SAMPLES} is not the table that run.json names. Delete it and {REWRITE}"
            )
        table = pq.read_table(io.BytesIO(body), schema=SAMPLES_SCHEMA)
        column = {name: table.column(name) for name in table.column_names}
        return SampleTable(
            key=column["key"].to_pylist(),
            source=column["source"].to_pylist(),
            row=column["row"].to_numpy(),
            unit=column["unit"].to_numpy(),
            tokens=column["tokens"].to_numpy(),
            supervised=column["supervised"].to_numpy(),
            validation=np.asarray(
                [split == "validation" for split in column["split"].to_pylist()], dtype=np.bool_
            ),
        )

    def _prepared(self, key: str) -> bytes:
        try:
            return self.store.get(key)[0]
        except NotFound:
            raise UserError(f"{self.store.url}/{key} is missing: {REWRITE}") from None

    def unit(self, unit: int) -> list[PreparedSample]:
        """The prepared samples of a unit, in the order of its shard."""
        body = self._prepared(layout.unit_tokens(unit))
        table = pq.read_table(io.BytesIO(body), schema=UNIT_SCHEMA)
        return [
            PreparedSample(key, np.asarray(ids, np.int32), np.asarray(mask, np.uint8))
            for key, ids, mask in zip(
                table.column("key").to_pylist(),
                (value.values.to_numpy() for value in table.column("input_ids")),
                (value.values.to_numpy() for value in table.column("loss_mask")),
                strict=True,
            )
        ]


def parse_identity(body: bytes, where: str) -> Identity:
    """run.json → Identity; UserError that names the field for anything unexpected."""
    try:
        raw = json.loads(body)
        if not isinstance(raw, dict):
            raise ValueError("it is no JSON object")
        if raw.get("format") != FORMAT_VERSION:
            raise UserError(
                f"{where}/{layout.RUN} has format {raw.get('format')}, this dflash-stream reads {FORMAT_VERSION}: "
                "use the version that made the run"
            )
        return Identity.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        what = (
            f"{error.error_count()} of its fields are wrong, {'.'.join(map(str, first['loc']))}: {first['msg']}"
        )
    except (ValueError, RecursionError) as error:
        what = str(error)
    raise UserError(f"{where}/{layout.RUN} is not valid: {what}. Restore it, or prepare into another store.url")


def flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted names."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, dict) and item:
            flat |= flatten(item, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = item
    return flat


_PREPARE_FIELDS = ("layers", "codec", "final_state", "unit_bytes", "seed")


def setting_of(field: str) -> str:
    """A field of run.json as its setting, in parentheses; empty when no single setting decides it."""
    name = field.removeprefix("text.").split(".")[0]
    if (field.startswith("text.") and not name.endswith("_sha256")) or name in _PREPARE_FIELDS:
        return f" (prepare.{name})"
    return {"dtype": " (target.dtype)", "validation.new_tokens": " (prepare.validation_new_tokens)"}.get(
        field, ""
    )


def compare(recorded: Identity, mine: Identity, where: str) -> None:
    """UserError naming each field that differs, both values, and what to do."""
    theirs, ours = flatten(recorded.model_dump()), flatten(mine.model_dump())
    differing = [name for name in sorted(theirs.keys() | ours.keys()) if theirs.get(name) != ours.get(name)]
    if differing:
        lines = [
            f"  {name}{setting_of(name)}: the run has {theirs.get(name)!r}, these settings give {ours.get(name)!r}"
            for name in differing
        ]
        raise UserError(
            f"{where} holds another run:\n"
            + "\n".join(lines)
            + "\nUse the settings of the run, or another store.url."
        )
