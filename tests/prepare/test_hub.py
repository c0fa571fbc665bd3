"""Models on the hub: only the head's bytes are fetched, and every refusal says what to do.

The hub's address is read when huggingface_hub is imported, so each of these runs in a process of its own, against a
stand-in on loopback.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash_stream import config
from dflash_stream.errors import UserError
from dflash_stream.head import load_head
from dflash_stream.hub import is_local
from dflash_stream.store import open_store
from dflash_stream.target.identity import describe_target
from tests.prepare.hub_server import HubServer
from tests.tiny_targets import save_tiny

ROOT = Path(__file__).resolve().parents[2]
WRITE = """
import sys
from dflash_stream import config
from dflash_stream.errors import UserError
from dflash_stream.head import write_head
from dflash_stream.hub import Weights, explained, open_files
from dflash_stream.store import open_store
for model, revision in zip(sys.argv[2::2], sys.argv[3::2]):
    settings = config.build({"store": {"url": sys.argv[1]}, "target": {"id": model, "revision": revision or None}})
    try:
        with explained(settings.target, "weights"):
            Weights(open_files(settings.target), model)
        write_head(open_store(settings.store), settings.store, settings.target)
        print("written")
    except UserError as error:
        print(str(error).replace(chr(10), " "))
"""


def write_from_hub(endpoint: str, directory: Path, *models: tuple[str, str], **env: str) -> list[str]:
    """What write_head says of each (model, revision)."""
    arguments = [part for model in models for part in model]
    done = subprocess.run(
        [sys.executable, "-c", WRITE, f"file://{directory}/run", *arguments],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(directory / "hf"), **env},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_only_the_heads_bytes_of_a_hub_model_are_fetched(tmp_path: Path) -> None:
    target = save_tiny("qwen3_5_wrapper", tmp_path / "target", layers=8)
    with HubServer({"them/tiny": target}, broken_gets=1) as hub:
        assert write_from_hub(hub.url, tmp_path, ("them/tiny", "")) == ["written"]
    weights = load_file(target / "model.safetensors")
    store = open_store(config.build({"store": {"url": f"file://{tmp_path}/run"}}).store)
    assert torch.equal(load_head(store).embed_tokens, weights["model.language_model.embed_tokens.weight"])
    whole = (target / "model.safetensors").stat().st_size
    assert 0 < hub.bytes_sent["model.safetensors"] < whole / 3


def test_every_refusal_of_the_hub_says_what_to_do(tmp_path: Path) -> None:
    target = save_tiny("llama", tmp_path / "target", layers=2)
    with HubServer({"them/tiny": target}, gated=frozenset({"them/gated"})) as hub:
        gated, missing, revision = write_from_hub(
            hub.url, tmp_path, ("them/gated", ""), ("them/typo", ""), ("them/tiny", "v9")
        )
    assert "Accept its licence" in gated
    assert "HF_TOKEN" in gated
    assert "no such public model" in missing
    assert "correct target.revision" in revision
    (unreachable,) = write_from_hub(hub.url, tmp_path, ("them/tiny", ""), HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in unreachable


def test_a_directory_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    for name in ("/no/such/model", "./model", "~/nothing-here", "a/b/c"):
        with pytest.raises(UserError, match=rf"target\.id {name}: no such directory"):
            describe_target(config.build({"target": {"id": name}}).target)
    assert not is_local(config.build({"target": {"id": "them/tiny"}}).target)
