"""The target's head: what a trainer needs of the target, without the target.

head/head.safetensors holds the embedding, the final norm and lm_head (absent when tied) in the dtype of the
checkpoint; head/config.json and the tokenizer's files lie beside it. Written by `prepare`, which reads just
these tensors from the checkpoint; read by ranges, straight to where they are used.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_stream import layout
from dflash_stream.config import StoreSettings, TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.hub import StoredWeight, Weights, explained, open_files, read_tokenizer
from dflash_stream.store import NotFound, Store
from dflash_stream.target.identity import read_config

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
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
READ_BYTES = 32 << 20  # of a ranged read while loading
READ_THREADS = 8


@dataclass(frozen=True)
class Head:
    """embed_tokens [V, H], lm_head [V, H] (the same tensor when tied), norm [H]; on the device and in the dtype
    asked for.

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
            f"looked for "
            f"{', '.join(LM_HEADS)}; {_similar(names, 'head', 'output')}"
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
    if vocab < text.vocab_size:
        raise UserError(f"{where}: the embedding has {vocab} rows, the config says {text.vocab_size}")


def write_head(store: Store, settings: StoreSettings, target: TargetSettings) -> None:
    """Copy the target's head into the store, 16 MiB at a time: only these tensors are fetched. Raises
    UserError.
    """
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
    from dflash_stream.store.upload import Uploader

    header = safetensors_header(found, metadata)
    size = len(header) + sum(weight.end - weight.start for weight in found.values())
    with Uploader(store, settings) as uploader:
        upload = uploader.open(WEIGHTS, size_hint=size)
        try:
            upload.write(header)
            for weight in found.values():
                for piece in weights.read(weight):
                    upload.write(piece)
        except BaseException:
            upload.abort()
            raise
        upload.finish().result()


def safetensors_header(weights: dict[str, StoredWeight], metadata: dict[str, str]) -> bytes:
    """The length and header of a safetensors file that holds these tensors one after the other, padded to 8
    bytes.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, weight in weights.items():
        size = weight.end - weight.start
        entries[name] = {
            "dtype": weight.dtype,
            "shape": list(weight.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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
    """The head from the store, read in ranges of 32 MiB that go to the device one by one.

    dtype: None keeps that of the checkpoint. UserError when the run has no head or it is damaged.
    """
    info = _find(store)
    begin, header = _read_header(store, info.etag)
    metadata = header.pop("__metadata__", {})
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if {"embed_tokens.weight", "norm.weight"} - header.keys() or begin + end != info.size_bytes:
        raise UserError(f"{store.url}/{WEIGHTS} is damaged: prepare the run anew, in another store.url")
    tensors = {}
    with ThreadPoolExecutor(READ_THREADS) as pool:
        for name, entry in header.items():
            stored = DTYPES[entry["dtype"]]
            tensor = torch.empty(entry["shape"], dtype=dtype or stored, device=device)
            flat = tensor.view(-1)
            offset = begin + entry["data_offsets"][0]
            pieces = [
                pool.submit(_read_piece, store, info.etag, offset, flat, first, count, stored)
                for first, count in _pieces(flat.numel(), READ_BYTES // stored.itemsize)
            ]
            for piece in pieces:
                piece.result()
            tensors[name] = tensor
    embedding = tensors["embed_tokens.weight"]
    return Head(
        embedding, tensors.get("lm_head.weight", embedding), tensors["norm.weight"], int(metadata["num_layers"])
    )


def _find(store: Store) -> Any:
    try:
        return store.head(WEIGHTS)
    except NotFound:
        raise UserError(
            f"{store.url} has no {WEIGHTS}: prepare writes it; run dflash-stream prepare with the same settings"
        ) from None


def _read_header(store: Store, etag: str) -> tuple[int, dict[str, Any]]:
    size = int.from_bytes(store.get_range(WEIGHTS, 0, 8, etag=etag), "little")
    header: dict[str, Any] = json.loads(store.get_range(WEIGHTS, 8, size, etag=etag))
    return 8 + size, header


def _pieces(total: int, at_most: int) -> Iterator[tuple[int, int]]:
    """(first, count) pairs that cover 0..total."""
    for first in range(0, total, at_most):
        yield first, min(at_most, total - first)


def _read_piece(
    store: Store, etag: str, offset: int, flat: torch.Tensor, first: int, count: int, stored: torch.dtype
) -> None:
    """Values first .. first+count of a tensor whose bytes begin at `offset`, into its flat view."""
    buffer = bytearray(count * stored.itemsize)
    store.read_into(WEIGHTS, offset + first * stored.itemsize, memoryview(buffer), etag=etag)
    flat[first : first + count].copy_(torch.frombuffer(buffer, dtype=stored))


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
