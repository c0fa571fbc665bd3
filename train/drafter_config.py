"""The drafter's config.json: from a run and its settings, to the published layout, and back.

The layout is that of the published DFlash checkpoints (z-lab), which vLLM and SGLang read. What such a file can
say but this drafter cannot do is refused by name, never ignored: read wrongly it still serves, only badly.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, model_validator

from dflash_stream.config import DrafterSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Identity

FULL, SLIDING = "full_attention", "sliding_attention"
INITIAL_STD = 0.02  # of fresh matrices

# Settings of a published file that stand at its top under the name they have here, and those that stand at the
# top in older files and in dflash_config in newer ones.
_TOP = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
_INNER = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
# What later kinds of DFlash drafters have, at the top or in dflash_config; factors are 1 where they do nothing.
_LATER = ("use_swa", "projector_type", "conv_kernel_size", "selector_rank", "final_logit_softcapping")
_FACTORS = ("input_embedding_scale", "output_multiplier")


class DrafterConfig(DrafterSettings):
    """Everything that defines a drafter: every drafter setting, resolved, and what it takes from its target.

    num_target_layers: decoder layers of the target; target_layer_ids: those whose output is tapped, 0-based;
    dtype: of the exported weights; target_id: empty when a published file does not say.
    """

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: list[int]
    dtype: str = "bfloat16"
    target_id: str = ""
    mask_token_id: int
    layer_types: list[str]  # type: ignore[assignment]  # resolved: one for each layer

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        taps, types = self.target_layer_ids, self.layer_types
        checks = {
            f"num_attention_heads = {self.num_attention_heads} must be a multiple of "
            f"num_key_value_heads = {self.num_key_value_heads}": self.num_attention_heads
            % self.num_key_value_heads
            == 0,
            f"head_dim = {self.head_dim} must be even": self.head_dim % 2 == 0,
            f"mask_token_id = {self.mask_token_id} must be a row of the target's embedding, "
            f"0 … {self.vocab_size - 1}": 0 <= self.mask_token_id < self.vocab_size,
            f"layer_types must name {self.num_hidden_layers} layers, it names {len(types)}": (
                len(types) == self.num_hidden_layers
            ),
            f"layer_types = {types} must be of {FULL} and {SLIDING}": set(types) <= {FULL, SLIDING},
            f"sliding_window = {self.sliding_window} must be at least 1 where layer_types has {SLIDING}": (
                SLIDING not in types or (self.sliding_window or 0) >= 1
            ),
            f"target_layer_ids = {taps} must be layers of the target, 0 … {self.num_target_layers - 1}": (
                bool(taps) and all(0 <= i < self.num_target_layers for i in taps)
            ),
        }
        if problems := [problem for problem, holds in checks.items() if not holds]:
            raise ValueError("; ".join(problems))
        return self

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer in tokens; None where it attends fully."""
        return [self.sliding_window if kind == SLIDING else None for kind in self.layer_types]

    @classmethod
    def from_run(
        cls, identity: Identity, settings: DrafterSettings, *, tokenizer_size: int | None = None
    ) -> DrafterConfig:
        """The drafter of a run. Unless set, mask_token_id is the first row that the tokenizer leaves free.

        UserError when there is no such row, and for settings that do not fit together.
        """
        target = identity.target
        values = settings.model_dump()
        if values["mask_token_id"] is None:
            values["mask_token_id"] = _unused_row(tokenizer_size, target.vocab_size, target.id)
        values["layer_types"] = values["layer_types"] or [FULL] * settings.num_hidden_layers
        values |= {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_target_layers": target.num_layers,
            "target_layer_ids": identity.layers,
            "target_id": target.id,
        }
        return _checked(values, "these drafter settings do not fit")

    @classmethod
    def from_json(cls, published: dict[str, Any], where: str = "config.json") -> DrafterConfig:
        """Read a published config.json. block_size and its like may stand at the top or in dflash_config.

        UserError for what is missing and for what this drafter cannot do: scaled or partial RoPE, other
        activations, biases, sliding layers that are not causal in their block, the parts of later variants.
        """
        inner = published.get("dflash_config") or {}
        if foreign := _foreign(published, inner):
            raise UserError(
                f"{where} asks for {', '.join(foreign)}, which this drafter does not have: it reads "
                "DFlash drafters of the first kind, with full attention or sliding layers causal in their block"
            )
        values = {name: published.get(name) for name in _TOP}
        values |= {name: inner.get(name, published.get(name)) for name in _INNER}
        rope = published.get("rope_parameters") or {}
        values["rope_theta"] = published.get("rope_theta") or rope.get("rope_theta")
        if missing := [name for name, value in values.items() if value is None]:
            raise UserError(f"{where} is no config of a DFlash drafter: it lacks {', '.join(missing)}")
        values |= {
            "layer_types": published.get("layer_types") or [FULL] * int(published["num_hidden_layers"]),
            "sliding_window": published.get("sliding_window"),
            "dtype": published.get("dtype") or published.get("torch_dtype") or "bfloat16",
            "target_id": (published.get("dflash_stream") or {}).get("target_id", ""),
        }
        return _checked(values, f"{where} is no valid config of a DFlash drafter")

    def to_json(self) -> dict[str, Any]:
        """The published config.json.

        The same fact stands twice where readers differ: the RoPE base as rope_theta and, for transformers 5, in
        rope_parameters; block_size at the top and, for newer readers, in dflash_config.
        """
        sliding = SLIDING in self.layer_types
        published: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": self.target_layer_ids,
                "block_size": self.block_size,
            },
            **{name: getattr(self, name) for name in _TOP},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "layer_types": self.layer_types,
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "max_window_layers": self.num_hidden_layers,
            "initializer_range": INITIAL_STD,
            "tie_word_embeddings": False,
            "use_cache": True,
            "dtype": self.dtype,
            "dflash_stream": {"target_id": self.target_id},
        }
        if set(self.layer_types) == {SLIDING}:
            # One flag for every layer: where kinds are mixed, readers take the direction from layer_types.
            published["is_causal"] = True
        return published


def _unused_row(tokenizer_size: int | None, vocab_size: int, target: str) -> int:
    """The first row of the embedding that no token of the tokenizer uses."""
    if tokenizer_size is not None and tokenizer_size < vocab_size:
        return tokenizer_size
    reason = (
        "the tokenizer is not known"
        if tokenizer_size is None
        else f"the tokenizer's {tokenizer_size} tokens leave no row of the embedding unused ({vocab_size} rows)"
    )
    raise UserError(
        f"drafter.mask_token_id is not set, and {reason}: set it to a token of {target} that never occurs in "
        "text, such as a reserved special token"
    )


def _checked(values: dict[str, Any], problem: str) -> DrafterConfig:
    try:
        return DrafterConfig.model_validate(values)
    except ValidationError as error:
        lines = [
            ": ".join([*map(str, e["loc"]), e["msg"].removeprefix("Value error, ")]) for e in error.errors()
        ]
        raise UserError(f"{problem}: {'; '.join(lines)}") from None


def _foreign(published: dict[str, Any], inner: dict[str, Any]) -> list[str]:
    """What a published config asks for beyond this drafter, by name."""
    rope = {**(published.get("rope_scaling") or {}), **(published.get("rope_parameters") or {})}
    causal = published.get("is_causal", inner.get("causal"))
    types = set(published.get("layer_types") or [FULL])
    asked = {
        "another hidden_act": published.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(published.get("attention_bias")),
        "scaled RoPE": (rope.get("rope_type") or rope.get("type") or "default") != "default",
        "partial RoPE": (rope.get("partial_rotary_factor") or published.get("partial_rotary_factor") or 1) != 1,
        f"is_causal = {causal} with {' and '.join(sorted(types))}": (
            causal is not None and types != {SLIDING if causal else FULL}
        ),
        **{name: bool(inner.get(name, published.get(name))) for name in _LATER},
        **{name: inner.get(name, published.get(name)) not in (None, 1) for name in _FACTORS},
    }
    return [name for name, is_asked in asked.items() if is_asked]
