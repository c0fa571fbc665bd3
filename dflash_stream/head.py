"""The target's head: what a trainer needs of the target, without the target.

head/head.safetensors holds the embedding, the final norm and lm_head (absent when tied) in the dtype of the
checkpoint; head/config.json and the tokenizer's files lie beside it. Written by `prepare`, which reads just
these tensors from the checkpoint; read by ranges, tensor by tensor, to where they are used.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_stream import layout
from dflash_stream.config import StoreSettings, TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.hub import StoredWeight, Weights, explained, open_files, read_tokenizer
from dflash_stream.store import NotFound, Store, Uploader
from dflash_stream.target.identity import read_config
from dflash_stream.tensorfile import header, objects

WEIGHTS = layout.HEAD + "head.safetensors"
CONFIG = layout.HEAD + "config.json"
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",  # Qwen3.5/3.6 and other wrappers
    "language_model.model.embed_tokens.weight",  # Gemma 3 as published
    "language_model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "embed_tokens.weight",
)
LM_HEADS = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
)
DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Head:
    """embed_tokens [V, H], lm_head [V, H] (the same tensor when tied) and norm [H], on one device, in one dtype.

    num_layers: decoder layers of the target
    """

    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    norm: torch.Tensor
    num_layers: int

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, unused ones included."""
        return self.embed_tokens.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.embed_tokens.shape[1]


def find_weights(weights: Weights, config: Any, where: str) -> dict[str, StoredWeight]:
    """The head's tensors in a checkpoint, under the names they have in head.safetensors.

    A stored lm_head is the lm_head; without one, the config must say that it is tied. UserError lists the
    candidates.
    """
    names = weights.names
    text = config.get_text_config()
    embedding = next((name for name in EMBEDDINGS if name in names), None)
    if embedding is None:
        raise UserError(
            f"{where} has no embedding under a known name: looked for {', '.join(EMBEDDINGS)}; "
            f"{_similar(names, 'embed', 'wte')}"
        )
    norm = embedding.removesuffix("embed_tokens.weight") + "norm.weight"
    if norm not in names:
        raise UserError(f"{where} has no final norm {norm}; {_similar(names, 'norm')}")
    found = {"embed_tokens.weight": weights.find(embedding), "norm.weight": weights.find(norm)}
    lm_head = next((name for name in LM_HEADS if name in names), None)
    if lm_head is not None:
        found["lm_head.weight"] = weights.find(lm_head)
    elif not (getattr(config, "tie_word_embeddings", False) or getattr(text, "tie_word_embeddings", False)):
        raise UserError(
            f"{where} has no lm_head under a known name, and its config does not tie it to the embedding: "
            f"looked for {', '.join(LM_HEADS)}; {_similar(names, 'head', 'output')}"
        )
    _check(found, text, where)
    return found


def _similar(names: list[str], *parts: str) -> str:
    """What the checkpoint has instead, shallow names first: a layer's own norms are no candidates."""
    candidates = sorted(
        (name for name in names if any(part in name for part in parts)), key=lambda n: (n.count("."), n)
    )
    return f"it has {', '.join(candidates[:12]) or 'nothing similar'}"


def _check(found: dict[str, StoredWeight], text: Any, where: str) -> None:
    hidden = text.hidden_size
    vocab = found["embed_tokens.weight"].shape[0]
    for name, weight in found.items():
        expected = (hidden,) if name == "norm.weight" else (vocab, hidden)
        if weight.shape != expected:
            raise UserError(f"{where}: {weight.name} has shape {list(weight.shape)}, expected {list(expected)}")
        if weight.dtype not in DTYPES:
            raise UserError(
                f"{where}: {weight.name} is stored as {weight.dtype}, expected {', '.join(DTYPES)}: "
                "take the version of the model whose embedding is not quantised"
            )
        if weight.end - weight.start != math.prod(weight.shape) * header.ITEM_BYTES[weight.dtype]:
            raise UserError(
                f"{where}/{weight.file} is damaged: the bytes of {weight.name} do not fit its shape"
            )
    if vocab < text.vocab_size:
        raise UserError(f"{where}: the embedding has {vocab} rows, the config says {text.vocab_size}")


def write_head(store: Store, settings: StoreSettings, target: TargetSettings) -> None:
    """Copy the target's head into the store, 16 MiB at a time: only these tensors are fetched. Raises UserError."""
    config = read_config(target)
    files = open_files(target, getattr(config, "_commit_hash", None))
    with explained(target, "weights"):
        weights = Weights(files, target.id)
        found = find_weights(weights, config, target.id)
        metadata = {"num_layers": str(config.get_text_config().num_hidden_layers), "target": target.id}
        _upload(store, settings, weights, found, metadata)
    with explained(target, "config"):
        store.put(CONFIG, files.read_whole("config.json"))
    _write_tokenizer(store, target)


def _upload(
    store: Store,
    settings: StoreSettings,
    weights: Weights,
    found: dict[str, StoredWeight],
    metadata: dict[str, str],
) -> None:
    start = header.build(((name, w.dtype, w.shape) for name, w in found.items()), metadata)
    size = len(start) + sum(weight.end - weight.start for weight in found.values())
    with Uploader(store, settings) as uploader, uploader.open(WEIGHTS, size_hint=size) as upload:
        upload.write(start)
        for weight in found.values():
            for piece in weights.read(weight):
                upload.write(piece)
        upload.finish().result()


def _write_tokenizer(store: Store, target: TargetSettings) -> None:
    """The tokenizer's files. A target without one is allowed: a dataset may come tokenised."""
    try:
        tokenizer = read_tokenizer(target)
    except UserError:
        return
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        for path in sorted(Path(scratch).rglob("*")):
            if path.is_file():
                store.put(layout.HEAD + path.relative_to(scratch).as_posix(), path.read_bytes())


def load_head(store: Store, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Head:
    """The head from the store; each tensor goes to the device when it is whole.

    dtype: None keeps that of the checkpoint. UserError when the run has no head or it is damaged.
    """
    try:
        found = objects.find(store, WEIGHTS)
    except NotFound:
        raise UserError(
            f"{store.url} has no {WEIGHTS}: prepare writes it; run dflash-stream prepare with the same settings"
        ) from None
    names = {entry.name for entry in found.tensors}
    if not names >= {"embed_tokens.weight", "norm.weight"} or "num_layers" not in found.metadata:
        raise UserError(f"{found.where} is not a head: prepare the run anew, in another store.url")
    tensors = {
        name: tensor.to(device=device, dtype=dtype or tensor.dtype) for name, tensor in objects.read(found)
    }
    embedding = tensors["embed_tokens.weight"]
    return Head(
        embedding,
        tensors.get("lm_head.weight", embedding),
        tensors["norm.weight"],
        int(found.metadata["num_layers"]),
    )


def load_tokenizer(store: Store) -> Any:
    """The target's tokenizer from the store. UserError when the run has none."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        keys = [info.key for info in store.list(layout.HEAD) if info.key != WEIGHTS]
        if not any(Path(key).name.startswith("tokenizer") for key in keys):
            raise UserError(f"{store.url} has no tokenizer: the target had none when the run was prepared")
        for key in keys:
            path = Path(scratch) / key.removeprefix(layout.HEAD)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.get(key)[0])
        return AutoTokenizer.from_pretrained(scratch)
