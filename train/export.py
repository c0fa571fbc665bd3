"""A trained drafter as a published DFlash checkpoint: config.json, model.safetensors, and where it came from.

model.safetensors holds exactly the tensors of the published drafters (11 a layer, fc, hidden_norm, norm; no
prefix; no embedding, no lm_head) in bfloat16, as vLLM and SGLang read them. Servers do not report a tensor that
is missing or misnamed, they draft badly: so names, shapes and values are checked here, and everything written
is read back. provenance.json traces a served drafter to its run, its data and its settings. The weights go out
first and config.json, without which nothing loads them, last: an export that was interrupted is none.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_stream import __version__, layout
from dflash_stream.config import Config
from dflash_stream.errors import UserError
from dflash_stream.run import Run
from dflash_stream.store import Store, Uploader, crc32c, open_store
from dflash_stream.tensorfile import objects
from dflash_stream.tensorfile.pieces import pieces, total_bytes
from train.checkpoint import MODEL, CheckpointRecord, TrainState, load_tensors, newest_checkpoint, read_state
from train.drafter import Drafter, DrafterConfig

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "provenance.json"
METADATA = {"format": "pt"}  # transformers refuses a file without it


def export(config: Config, *, destination: Path | None = None) -> list[str]:
    """Export the newest checkpoint of `train.name` to the store and, if given, to a directory; returns where.

    UserError when there is no checkpoint, it belongs to another run, or it is damaged or not finite.
    """
    store = open_store(config.store)
    run = Run.open(store)
    name = config.train.name
    checkpoint, state, drafter = find_newest(store, run, name)
    weights = _read_weights(store, checkpoint, drafter)
    texts = {
        PROVENANCE: json.dumps(provenance(run, name, checkpoint, state, weights), indent=1).encode(),
        CONFIG: json.dumps(drafter.to_json(), indent=1).encode(),
    }
    places = []
    if destination is not None:
        write_directory(destination, weights, texts)
        places.append(str(destination))
    with Uploader(store, config.store) as uploader:
        _upload(store, uploader, name, weights, texts)
    return [*places, f"{store.url}/{layout.exported(name, '')}"]


def find_newest(store: Store, run: Run, name: str) -> tuple[CheckpointRecord, TrainState, DrafterConfig]:
    """The newest checkpoint of a drafter of this run. UserError when there is none, or it is another run's."""
    checkpoint = newest_checkpoint(store, name)
    state = read_state(store, checkpoint)
    where = f"{store.url}/{checkpoint.prefix}"
    if state.fingerprint != run.identity.fingerprint:
        raise UserError(
            f"{where} was trained on another run (fingerprint {state.fingerprint[:12]}, this run has "
            f"{run.identity.fingerprint[:12]}): name a drafter of this run with --train.name"
        )
    return checkpoint, state, DrafterConfig.from_json(state.drafter, where)


def shapes(config: DrafterConfig) -> dict[str, torch.Size]:
    """Name and shape of every tensor of a drafter; nothing is allocated."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Drafter(config).state_dict().items()}


def check(weights: Mapping[str, Tensor], config: DrafterConfig, where: str) -> None:
    """UserError unless `weights` are exactly the drafter's tensors, all finite."""
    expected = shapes(config)
    problems = [f"{name} is missing" for name in expected if name not in weights]
    for name, tensor in weights.items():
        if name not in expected:
            problems.append(f"{name} is no tensor of a drafter")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
        elif not tensor.isfinite().all():
            problems.append(f"{name} has values that are not finite")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{where} does not fit the config of its drafter: {'; '.join(problems[:5])}{more}")


def provenance(
    run: Run, name: str, checkpoint: CheckpointRecord, state: TrainState, weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """What a served drafter can be traced by: identity of the run, step and settings of the training, checksum."""
    checksum = 0
    for piece in pieces(weights, METADATA):
        checksum = crc32c(piece, checksum)
    return {
        "made_by": f"dflash-stream {__version__}",
        "store": run.store.url,
        "run": run.identity.fingerprint,
        "identity": run.identity.model_dump(mode="json"),
        "drafter": name,
        "checkpoint": checkpoint.prefix,
        "step": state.step,
        "total_steps": state.total_steps,
        "tokens": state.tokens,
        "last_loss": state.last_loss,
        "acceptance_length": state.acceptance,
        "settings": state.settings,
        "model_crc32c": f"{checksum:08x}",
    }


def write_directory(directory: Path, weights: Mapping[str, Tensor], texts: Mapping[str, bytes]) -> None:
    """Write an export, each file whole or not at all, and read it back. UserError when that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).unlink(missing_ok=True)
        files: dict[str, Iterable[bytes | memoryview]] = {WEIGHTS: pieces(weights, METADATA)}
        for name, contents in (files | {name: [text] for name, text in texts.items()}).items():
            partial = directory / f".{name}.partial"
            with partial.open("wb") as file:
                for piece in contents:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(directory / name)
    except OSError as error:
        raise UserError(f"cannot write the export to {directory}: {error}") from None
    config, found = read_directory(directory)
    if config.to_json() != json.loads(texts[CONFIG]) or not _equal(found, weights):
        raise UserError(f"{directory} does not hold what was written: the disk or the file system is at fault")


def _upload(
    store: Store, uploader: Uploader, name: str, weights: Mapping[str, Tensor], texts: Mapping[str, bytes]
) -> None:
    """Write an export into the store, and read the weights back with their checksum compared."""
    store.delete([layout.exported(name, CONFIG)])
    key = layout.exported(name, WEIGHTS)
    with uploader.open(key, size_hint=total_bytes(weights, METADATA)) as upload:
        checksum = objects.send(upload, pieces(weights, METADATA))
        upload.finish().result()
    written = objects.find(store, key, size_bytes=upload.position)
    deque(objects.read(written, checksum=checksum), maxlen=0)  # raises unless every byte is as sent
    for file, text in texts.items():
        store.put(layout.exported(name, file), text)


def _read_weights(store: Store, checkpoint: CheckpointRecord, config: DrafterConfig) -> dict[str, Tensor]:
    """The weights of a checkpoint in the dtype of the export."""
    dtype = getattr(torch, config.dtype)
    weights = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes(config).items()}
    load_tensors(store, checkpoint, MODEL, weights)
    check(weights, config, f"{store.url}/{checkpoint.prefix}{MODEL}")
    return weights


def read_directory(directory: Path) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Config and tensors of a published checkpoint. UserError for what is missing, unknown, misshapen or not finite."""
    try:
        published = json.loads((directory / CONFIG).read_text())
        with safe_open(directory / WEIGHTS, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{directory} is no drafter: {error}") from None
    config = DrafterConfig.from_json(published, str(directory / CONFIG))
    check(weights, config, str(directory / WEIGHTS))
    return config, weights


def load_export(
    directory: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[DrafterConfig, Drafter]:
    """A drafter from a published checkpoint, ready to draft. dtype: None keeps that of the file. Raises UserError."""
    config, weights = read_directory(directory)
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict({n: t.to(device, dtype or t.dtype) for n, t in weights.items()}, assign=True)
    return config, drafter.eval().requires_grad_(False)


def _equal(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
