"""Tiny random targets of every supported family, saved as ordinary model directories; wrappers included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "full_attention_interval": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 16, "norm_topk_prob": True,
}  # fmt: skip
_SIGHT: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
_QWEN_SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def _text(family: str, layers: int) -> dict[str, Any]:
    extra = dict(_HYBRID) if family.startswith("qwen3_5") else {}
    if family == "gemma3":
        extra = {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}
    return {**_COMMON, **extra, "num_hidden_layers": layers}


def _build(family: str, layers: int) -> Any:
    import transformers as t

    text = _text(family.removesuffix("_wrapper"), layers)
    if family == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**text))
    if family == "qwen2":
        text.pop("head_dim")
        return t.Qwen2ForCausalLM(t.Qwen2Config(**text))
    if family == "qwen3":
        return t.Qwen3ForCausalLM(t.Qwen3Config(**text))
    if family == "gemma3":
        return t.Gemma3ForCausalLM(t.Gemma3TextConfig(**text))
    if family == "gemma3_wrapper":
        vision = {**_SIGHT, "num_hidden_layers": layers, "image_size": 28, "patch_size": 14}
        config = t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        return t.Gemma3ForConditionalGeneration(config)
    if family == "qwen3_5":
        return t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**text))
    if family == "qwen3_5_wrapper":
        vision = {**_QWEN_SIGHT, "depth": layers}
        return t.Qwen3_5ForConditionalGeneration(t.Qwen3_5Config(text_config=text, vision_config=vision))
    if family == "mistral":
        return t.MistralForCausalLM(t.MistralConfig(**text, sliding_window=None))
    if family == "gemma2":
        return t.Gemma2ForCausalLM(t.Gemma2Config(**text, sliding_window=8, query_pre_attn_scalar=8))
    if family == "glm4":
        return t.Glm4ForCausalLM(t.Glm4Config(**text))
    if family == "qwen3_moe":
        return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**text, **_EXPERTS))
    if family == "qwen3_next":
        return t.Qwen3NextForCausalLM(t.Qwen3NextConfig(**text, **_EXPERTS, **_HYBRID))
    if family == "qwen3_5_moe_wrapper":
        vision = {**_QWEN_SIGHT, "depth": layers}
        moe = t.Qwen3_5MoeConfig(text_config={**text, **_EXPERTS}, vision_config=vision)
        return t.Qwen3_5MoeForConditionalGeneration(moe)
    if family == "gpt_oss":  # not cut short on loading: stands for the families that are not known to allow it
        return t.GptOssForCausalLM(
            t.GptOssConfig(**text, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
        )
    raise ValueError(family)


FAMILIES = (
    "llama", "qwen2", "qwen3", "gemma3", "gemma3_wrapper", "qwen3_5", "qwen3_5_wrapper", "mistral", "gemma2", "glm4",
    "qwen3_moe", "qwen3_next", "qwen3_5_moe_wrapper", "gpt_oss",
)  # fmt: skip


def save_tiny(family: str, directory: Path, *, layers: int = 8, seed: int = 0) -> Path:
    """A random model of the family in fp32; its weights are large enough that wrong states show."""
    torch.manual_seed(seed)
    model = _build(family, layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in name:
                parameter.normal_(0, 0.12)
    model.save_pretrained(directory)
    return directory
