"""The target's head: found in checkpoints of every shape, copied, and read back as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_stream import config, head, hub
from dflash_stream.errors import UserError
from dflash_stream.head import load_head, load_tokenizer, write_head
from dflash_stream.store import Store, open_store
from dflash_stream.tensorfile import objects
from tests.tiny_targets import save_tiny


def copy_head(target: Path, directory: Path) -> Store:
    settings = config.build({"store": {"url": f"file://{directory}"}, "target": {"id": str(target)}})
    store = open_store(settings.store)
    write_head(store, settings.store, settings.target)
    return store


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gemma3_wrapper", "qwen3_5", "qwen3_5_wrapper"])
def test_the_head_is_the_models_own(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(objects, "RANGE_BYTES", 1000)  # several ranges a tensor, none of them whole rows
    monkeypatch.setattr(hub, "CHUNK_BYTES", 700)
    target = save_tiny(family, tmp_path / "target", layers=4)
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    found = load_head(copy_head(target, tmp_path / "run"))
    assert torch.equal(found.embed_tokens, model.get_input_embeddings().weight)
    assert torch.equal(found.lm_head, model.get_output_embeddings().weight)
    text: Any = model.get_decoder()
    norm = getattr(text, "language_model", text).norm
    assert torch.equal(found.norm, norm.state_dict()["weight"])
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (4, 32, 128)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (found.lm_head is found.embed_tokens) == tied


def test_a_sharded_checkpoint_is_read_across_its_files(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=4
        )
    )
    model.save_pretrained(tmp_path / "target", max_shard_size="8KB")
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2
    found = load_head(copy_head(tmp_path / "target", tmp_path / "run"), dtype=torch.bfloat16)
    assert found.embed_tokens.dtype == torch.bfloat16
    assert torch.equal(found.lm_head, model.lm_head.weight.bfloat16())
    assert not torch.equal(found.lm_head, found.embed_tokens)


def test_a_head_in_s3_with_its_tokenizer(s3_url: str, smollm2: Path) -> None:
    settings = config.build({"store": {"url": s3_url}, "target": {"id": str(smollm2)}})
    store = open_store(settings.store)
    write_head(store, settings.store, settings.target)
    weights = load_file(smollm2 / "model.safetensors")
    found = load_head(store)
    assert torch.equal(found.embed_tokens, weights["model.embed_tokens.weight"])
    assert torch.equal(found.norm, weights["model.norm.weight"])
    tokenizer = load_tokenizer(store)
    assert tokenizer.decode(tokenizer("Grüße, 世界").input_ids) == "Grüße, 世界"
    assert tokenizer.chat_template


def rewrite(target: Path, change: Any) -> None:
    """Save the checkpoint again with its dict of tensors changed."""
    path = target / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda w: w.update(wte=w.pop("model.embed_tokens.weight")),
            r"no embedding under a known name.*it has wte",
        ),
        (
            lambda w: w.update({"model.ln_norm": w.pop("model.norm.weight")}),
            r"no final norm.*it has model\.ln_norm",
        ),
        (
            lambda w: w.update({"out_head": w.pop("lm_head.weight")}),
            r"no lm_head under a known name.*it has out_head",
        ),
        (
            lambda w: w.update({"lm_head.weight": torch.zeros(128, 16)}),
            r"shape \[128, 16\], expected \[128, 32\]",
        ),
        (lambda w: w.update({"lm_head.weight": w["lm_head.weight"].to(torch.float8_e4m3fn)}), "not quantised"),
    ],
)
def test_a_checkpoint_without_the_head_lists_what_it_has(tmp_path: Path, change: Any, told: str) -> None:
    target = save_tiny("llama", tmp_path / "target", layers=2)
    rewrite(target, change)
    with pytest.raises(UserError, match=told):
        copy_head(target, tmp_path / "run")


def test_a_stored_lm_head_is_used_even_when_the_config_ties_it(tmp_path: Path) -> None:
    """As transformers does: the checkpoint's tensors decide."""
    from transformers import AutoModelForCausalLM

    target = save_tiny("llama", tmp_path / "target", layers=2)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    found = load_head(copy_head(target, tmp_path / "run"))
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(found.lm_head, model.get_output_embeddings().weight)
    assert not torch.equal(found.lm_head, found.embed_tokens)


def test_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    target = save_tiny("llama", tmp_path / "target", layers=2)
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:4000])
    with pytest.raises(UserError, match=r"not a safetensors file|cut off"):
        copy_head(target, tmp_path / "run")
    for damaged in (b"<html>" + whole, (2).to_bytes(8, "little") + b"[]"):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match="not a safetensors file"):
            copy_head(target, tmp_path / "run")
    weights.unlink()
    with pytest.raises(UserError, match="convert the checkpoint to safetensors"):
        copy_head(target, tmp_path / "run")


def test_a_run_without_head_or_tokenizer_says_so(tmp_path: Path) -> None:
    store = open_store(config.build({"store": {"url": f"file://{tmp_path}/none"}}).store)
    with pytest.raises(UserError, match="prepare writes it"):
        load_head(store)
    with pytest.raises(UserError, match="no tokenizer"):
        load_tokenizer(copy_head(save_tiny("llama", tmp_path / "target", layers=2), tmp_path / "run"))


def test_a_head_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    store = copy_head(save_tiny("llama", tmp_path / "target", layers=2), tmp_path / "run")
    body, _ = store.get(head.WEIGHTS)
    store.put(head.WEIGHTS, body[:-4])
    with pytest.raises(UserError, match="damaged"):
        load_head(store)
