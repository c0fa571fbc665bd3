"""A complete run that a small drafter can learn in seconds, made without a target model.

Text counts upwards through CYCLE tokens from a random start; the states of a token are a fixed random row for
it. So the tokens after an anchor follow from the anchor, and a drafter that learns at all learns this.
Everything else is as `prepare` and `extract` leave it: run.json, sample table, units, shards with their
records, the target's head.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save

from dflash_stream import layout
from dflash_stream.config import Config, build
from dflash_stream.hashing import token_hash
from dflash_stream.run import SAMPLES_SCHEMA, Run, TargetIdentity
from dflash_stream.shards.writer import ShardWriter
from dflash_stream.store import Store, Uploader, open_store
from tests.published_run import publish, put_unit

HIDDEN, VOCABULARY, CYCLE, TAPS, LAYERS = 32, 96, 24, [1, 3], 6
MASK = VOCABULARY - 1
FIRST = 10  # token of the cycle
PROMPT_TOKENS = 4  # of a held-out sample's greedy text
UNIT_SAMPLES = 8


def settings(url: str, **changes: dict[str, Any]) -> Config:
    """Settings that train a drafter of one small layer on such a run; `changes` by section."""
    values: dict[str, dict[str, Any]] = {
        "store": {"url": url, "pool_bytes": 10 << 20, "part_bytes": 5 << 20, "deadline_s": 20.0},
        "drafter": {
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
            "intermediate_size": 64, "block_size": 4, "mask_token_id": MASK,
        },
        "train": {
            "epochs": 4.0, "batch_samples": 8, "tokens_per_batch": 128, "anchors": 8, "loss_gamma": 4.0,
            "lr": 5e-3, "precision": "fp32", "checkpoint_every_steps": 1000, "validate_every_steps": 1000,
            "log_every_steps": 1,
        },
        "stream": {"block_bytes": 8192, "prefetch_bytes": 4 << 20, "threads": 2},
        "tracking": {"wandb": False},
    }  # fmt: skip
    for section, entries in changes.items():
        values[section] |= entries
    return build(values)


def make_run(
    url: str, *, train: int = 40, validation: int = 4, codec: str = "bf16", refused: Collection[int] = ()
) -> Run:
    """Write a run of `train` and `validation` samples of 8 to 40 tokens to an empty store, and open it.

    Rows of the sample table in `refused` have no states, as if the target had failed on them.
    """
    config = settings(url)
    store = open_store(config.store)
    rng = np.random.default_rng(0)
    samples = []
    for row in range(validation + train):
        held_out = row < validation
        unit = (
            row // UNIT_SAMPLES
            if held_out
            else -(-validation // UNIT_SAMPLES) + (row - validation) // UNIT_SAMPLES
        )
        ids = (rng.integers(CYCLE) + np.arange(rng.integers(8, 41))) % CYCLE + FIRST
        samples.append((f"{row:08d}-tiny", unit, "validation" if held_out else "train", ids.astype(np.int32)))
    _write_units(store, samples)
    _write_head(store)
    run = _publish(store, samples, codec)
    with Uploader(store, config.store) as uploader:
        for unit in range(run.identity.units):
            with ShardWriter(uploader, store, run.identity, unit, made_with={}) as writer:
                for row, (key, of, split, ids) in enumerate(samples):
                    if of == unit and row in refused:
                        writer.refuse(key, "not finite")
                    elif of == unit:
                        writer.add(key, _tensors(ids, split == "validation"))
                writer.finish().result()
    return run


def _tensors(ids: np.ndarray, held_out: bool) -> dict[str, torch.Tensor]:
    mask = np.ones(len(ids), np.uint8)
    mask[:2] = 0
    tensors = {
        "hidden_states": _states(ids),
        "input_ids": torch.from_numpy(ids),
        "loss_mask": torch.from_numpy(mask),
    }
    if held_out:
        greedy = ((ids[0] - FIRST + np.arange(PROMPT_TOKENS + 16)) % CYCLE + FIRST).astype(np.int32)
        tensors |= {
            "greedy.hidden_states": _states(greedy),
            "greedy.input_ids": torch.from_numpy(greedy),
            "greedy.prompt_tokens": torch.tensor([PROMPT_TOKENS], dtype=torch.int32),
        }
    return tensors


def _states(ids: np.ndarray) -> torch.Tensor:
    """[T, K, H] bf16: the rows of the tokens in a fixed random table for each tap."""
    table = torch.randn(VOCABULARY, len(TAPS), HIDDEN, generator=torch.Generator().manual_seed(1))
    return table[torch.from_numpy(ids).long()].to(torch.bfloat16)


def _publish(store: Store, samples: list[Any], codec: str) -> Run:
    columns = {
        "key": [key for key, *_ in samples],
        "source": ["tiny.jsonl"] * len(samples),
        "row": list(range(len(samples))),
        "unit": [unit for _, unit, *_ in samples],
        "tokens": [len(ids) for *_, ids in samples],
        "supervised": [len(ids) - 2 for *_, ids in samples],
        "split": [split for _, _, split, _ in samples],
        "token_hash": [token_hash(ids) for *_, ids in samples],
    }
    target = TargetIdentity(
        id="tiny", revision=None, architecture="Tiny", config_sha256="0" * 64, num_layers=LAYERS,
        hidden_size=HIDDEN, vocab_size=VOCABULARY,
    )  # fmt: skip
    return publish(store, pa.table(columns, schema=SAMPLES_SCHEMA), target, TAPS, new_tokens=16, codec=codec)


def _write_units(store: Store, samples: list[Any]) -> None:
    for unit in sorted({unit for _, unit, *_ in samples}):
        mine = [
            {"key": key, "input_ids": ids.tolist(), "loss_mask": [0, 0] + [1] * (len(ids) - 2)}
            for key, of, _, ids in samples
            if of == unit
        ]
        put_unit(store, unit, mine)


def _write_head(store: Store) -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "lm_head.weight": 0.2 * torch.randn(VOCABULARY, HIDDEN, generator=generator),
        "norm.weight": torch.ones(HIDDEN),
    }
    store.put(f"{layout.HEAD}head.safetensors", save(tensors, metadata={"num_layers": str(LAYERS)}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "tie_word_embeddings": False,
    }  # fmt: skip
    store.put(f"{layout.HEAD}config.json", json.dumps(config).encode())
