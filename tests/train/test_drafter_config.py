"""config.json: the public ones are read, ours are read back, what this drafter cannot do is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_stream.config import DrafterSettings
from dflash_stream.errors import UserError
from dflash_stream.run import FORMAT_VERSION, Identity
from tests.train.drafter_cases import FULL, SLIDING, tiny_config
from train.drafter import DrafterConfig

# What the public checkpoints say, as far as a reader needs it.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "hidden_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "layer_types": [FULL] * 5,
    "use_sliding_window": False,
    "sliding_window": None,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
QWEN3_6_27B: dict[str, Any] = QWEN3_8B | {
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "num_target_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [SLIDING] * 4 + [FULL],
    "use_sliding_window": True,
    "sliding_window": 2048,
    "rope_theta": 10000000,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
}


def test_the_config_of_qwen3_8b_is_read() -> None:
    config = DrafterConfig.from_json(QWEN3_8B)
    assert config.windows == [None] * 5
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (16, 151669, 36)
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert (config.hidden_size, config.head_dim, config.rope_theta) == (4096, 128, 1e6)


def test_the_config_of_qwen3_6_27b_is_read() -> None:
    config = DrafterConfig.from_json(QWEN3_6_27B)
    assert config.windows == [2048] * 4 + [None]
    assert (config.mask_token_id, config.target_layer_ids) == (248070, [1, 16, 31, 46, 61])
    assert (config.rope_theta, config.max_position_embeddings) == (1e7, 262144)


@pytest.mark.parametrize("published", [QWEN3_8B, QWEN3_6_27B], ids=["qwen3-8b", "qwen3.6-27b"])
def test_what_we_write_says_what_was_published(published: dict[str, Any]) -> None:
    config = DrafterConfig.from_json(published)
    written = json.loads(json.dumps(config.to_json()))
    for name, value in published.items():
        if name not in ("auto_map", "dflash_config"):
            assert written[name] == value, name
    assert written["dflash_config"] == published["dflash_config"] | {"block_size": 16}
    assert DrafterConfig.from_json(written) == config


def test_block_size_is_found_in_dflash_config_too() -> None:
    newer = {name: value for name, value in QWEN3_8B.items() if name != "block_size"}
    newer["dflash_config"] = QWEN3_8B["dflash_config"] | {"block_size": 8}
    assert DrafterConfig.from_json(newer).block_size == 8


def test_rope_theta_is_found_where_transformers_5_puts_it() -> None:
    newer = {name: value for name, value in QWEN3_6_27B.items() if name not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000000}
    assert DrafterConfig.from_json(newer).rope_theta == 1e7
    written = DrafterConfig.from_json(newer).to_json()
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1e7


@pytest.mark.parametrize(
    ("types", "flag"), [([SLIDING] * 3, True), ([SLIDING, FULL, FULL], None), ([FULL] * 3, None)]
)
def test_the_direction_is_spelt_out_where_one_flag_fits_every_layer(
    types: list[str], flag: bool | None
) -> None:
    """is_causal holds for all layers: on a mixed drafter it would make the full layers causal as well."""
    written = tiny_config(layer_types=types, sliding_window=8).to_json()
    assert written.get("is_causal") is flag
    assert "causal" not in written["dflash_config"]


def test_transformers_reads_the_same_numbers() -> None:
    from transformers import Qwen3Config

    config = tiny_config(layer_types=[SLIDING, SLIDING, FULL], sliding_window=8, rope_theta=12345.0)
    read: Any = Qwen3Config(**config.to_json())
    assert read.rope_parameters["rope_theta"] == 12345.0
    assert (read.layer_types, read.sliding_window) == ([SLIDING, SLIDING, FULL], 8)
    assert (read.head_dim, read.num_key_value_heads, read.block_size) == (8, 2, 4)
    assert read.dflash_config["target_layer_ids"] == [1, 3, 5]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 64.0}}, "scaled RoPE"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial RoPE"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"is_causal": True}, "is_causal = True with full_attention"),
        (
            {"is_causal": False, "layer_types": [SLIDING] * 5, "sliding_window": 9},
            "is_causal = False with sliding",
        ),
        (
            {"dflash_config": QWEN3_8B["dflash_config"] | {"conv_kernel_size": 2}},
            "conv_kernel_size",
        ),
        ({"dflash_config": QWEN3_8B["dflash_config"] | {"use_swa": True}}, "use_swa"),
        ({"output_multiplier": 0.5}, "output_multiplier"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "lacks mask_token_id"),
        ({"dflash_config": None}, "lacks mask_token_id, target_layer_ids"),
        ({"layer_types": [FULL] * 4}, "layer_types must name 5 layers, it names 4"),
        ({"layer_types": ["linear_attention"] * 5}, "must be of full_attention and sliding_attention"),
        ({"layer_types": [SLIDING] * 5}, "sliding_window = None must be at least 1"),
        ({"num_key_value_heads": 5}, "32 must be a multiple of num_key_value_heads = 5"),
        (
            {"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1]}},
            "mask_token_id = 151936 must be a row",
        ),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [36]}},
            "must be layers of the target, 0 … 35",
        ),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_a_config_that_would_be_read_wrongly_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as refusal:
        DrafterConfig.from_json(QWEN3_8B | change, "s3://bucket/config.json")
    assert named in str(refusal.value)
    assert "s3://bucket/config.json" in str(refusal.value)


def identity(vocab_size: int = 1000) -> Identity:
    return Identity.model_validate(
        {
            "format": FORMAT_VERSION,
            "target": {
                "id": "org/target", "revision": None, "architecture": "LlamaForCausalLM", "config_sha256": "0",
                "num_layers": 30, "hidden_size": 64, "vocab_size": vocab_size,
            },
            "text": {
                "tokenizer_sha256": None, "chat_template_sha256": None, "thinking": None, "template_kwargs": {},
                "turns": "all", "truncation": "right", "max_tokens": 128,
            },
            "layers": [1, 8, 14, 20, 27], "layer_convention": "", "dtype": "bfloat16", "codec": "bf16",
            "final_state": "none", "tensors": {}, "samples_sha256": "0", "samples": 1, "tokens": 1, "units": 1,
            "unit_bytes": 1, "seed": 0,
            "validation": {"rule": "none", "units": 0, "samples": 0, "new_tokens": 0},
        }
    )  # fmt: skip


def test_a_run_gives_the_drafter_its_taps_and_width() -> None:
    config = DrafterConfig.from_run(identity(), DrafterSettings(mask_token_id=3))
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (64, 1000, 30)
    assert (config.target_layer_ids, config.target_id) == ([1, 8, 14, 20, 27], "org/target")
    assert config.layer_types == [FULL] * 5
    assert DrafterConfig.from_json(config.to_json()) == config


def test_the_mask_token_is_the_first_row_that_the_tokenizer_leaves_unused() -> None:
    assert DrafterConfig.from_run(identity(), DrafterSettings(), tokenizer_size=990).mask_token_id == 990


@pytest.mark.parametrize(
    ("settings", "tokenizer_size", "message"),
    [
        ({}, None, "drafter.mask_token_id is not set, and the tokenizer is not known"),
        ({}, 1000, "the tokenizer's 1000 tokens leave no row of the embedding unused"),
        (
            {"mask_token_id": 1000},
            None,
            "mask_token_id = 1000 must be a row of the target's embedding, 0 … 999",
        ),
        ({"mask_token_id": -1}, None, "mask_token_id = -1 must be a row"),
        ({"mask_token_id": 3, "layer_types": [FULL]}, None, "layer_types must name 5 layers, it names 1"),
        ({"mask_token_id": 3, "layer_types": [SLIDING] * 5}, None, "sliding_window = None"),
        ({"mask_token_id": 3, "head_dim": 9}, None, "head_dim = 9 must be even"),
    ],
)
def test_settings_that_do_not_fit_say_what_to_set(
    settings: dict[str, Any], tokenizer_size: int | None, message: str
) -> None:
    with pytest.raises(UserError) as refusal:
        DrafterConfig.from_run(identity(), DrafterSettings(**settings), tokenizer_size=tokenizer_size)
    assert message in str(refusal.value)
