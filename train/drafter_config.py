"""The drafter's config.json: from a run and its settings, to the published layout, and back.

The layout is that of the published DFlash checkpoints (z-lab), which vLLM and SGLang read. What such a file can say but
this drafter cannot do is refused by name, never ignored: a drafter that is read wrongly still serves, only badly.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError, model_validator

from dflash_stream.config import DrafterSettings
from dflash_stream.errors import UserError
from dflash_stream.run import Identity

FULL, SLIDING = "full_attention", "sliding_attention"


class DrafterConfig(DrafterSettings):
    """Everything that defines a drafter: every drafter setting, resolved, and what it takes from its target.

    num_target_layers: decoder layers of the target; target_layer_ids: those whose output is tapped, 0-based;
    dtype: of the exported weights; target_id: where it came from, empty when a published file does not say.
    """

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: list[int]
    dtype: str = "bfloat16"
    target_id: str = ""
    mask_token_id: int
    layer_types: list[str]  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        problems = []
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads = {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            problems.append(f"head_dim = {self.head_dim} is odd: rotary embedding needs pairs")
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(
                f"mask_token_id = {self.mask_token_id} is no row of the target's embedding (0 … {self.vocab_size - 1})"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            problems.append(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        if unknown := set(self.layer_types) - {FULL, SLIDING}:
            problems.append(f"layer_types has {', '.join(sorted(unknown))}: {FULL} and {SLIDING} are known")
        if SLIDING in self.layer_types and (self.sliding_window or 0) < 1:
            problems.append(f"layer_types has {SLIDING}: sliding_window must be the window in tokens")
        if not self.target_layer_ids or not all(0 <= i < self.num_target_layers for i in self.target_layer_ids):
            problems.append(
                f"target_layer_ids = {self.target_layer_ids}: each must be in 0 … {self.num_target_layers - 1}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer; None where it attends fully."""
        return [self.sliding_window if kind == SLIDING else None for kind in self.layer_types]

    @classmethod
    def from_run(
        cls, identity: Identity, settings: DrafterSettings, *, tokenizer_size: int | None = None
    ) -> DrafterConfig:
        """The drafter of a run. Without a mask_token_id it is the first embedding row beyond the tokenizer, whose size
        is `len(tokenizer)`. UserError when there is no such row, or for settings that do not fit together."""
        target = identity.target
        values = settings.model_dump()
        if values["mask_token_id"] is None:
            values["mask_token_id"] = _unused_row(tokenizer_size, target.vocab_size, target.id)
        if values["layer_types"] is None:
            values["layer_types"] = [FULL] * settings.num_hidden_layers
        values |= dict(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            target_layer_ids=identity.layers,
            target_id=target.id,
        )
        return _checked(values, "these drafter settings do not fit")

    @classmethod
    def from_json(cls, published: dict[str, Any], where: str = "config.json") -> DrafterConfig:
        """Read a published config.json. block_size and the like may stand at the top or in dflash_config.

        UserError for what is missing, or for what this drafter cannot do (scaled RoPE, other activations, biases,
        sliding layers that are not causal in their block, convolutions or heads of later variants).
        """
        inner = published.get("dflash_config") or {}
        _refuse_foreign(published, inner, where)

        def find(name: str, default: Any = None) -> Any:
            value = inner.get(name)
            return published.get(name, default) if value is None else value

        theta = published.get("rope_theta") or (published.get("rope_parameters") or {}).get("rope_theta")
        layers = published.get("num_hidden_layers")
        names = (
            "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "intermediate_size", "rms_norm_eps", "max_position_embeddings", "sliding_window",
        )  # fmt: skip
        values = {name: published[name] for name in names if published.get(name) is not None}
        values |= dict(
            rope_theta=theta,
            layer_types=published.get("layer_types") or [FULL] * (layers or 0),
            dtype=published.get("dtype") or published.get("torch_dtype") or "bfloat16",
            target_id=(published.get("dflash_stream") or {}).get("target_id", ""),
            **{
                name: find(name)
                for name in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
            },
        )
        required = (
            *names[:-1],
            "rope_theta",
            "block_size",
            "mask_token_id",
            "target_layer_ids",
            "num_target_layers",
        )
        if missing := [name for name in required if values.get(name) is None]:
            raise UserError(f"{where} is no DFlash drafter's config: it lacks {', '.join(missing)}")
        return _checked(values, f"{where} is no valid DFlash drafter's config")

    def to_json(self) -> dict[str, Any]:
        """The published config.json, readable by transformers before and after 5 (rope_theta, rope_parameters), by vLLM and
        by SGLang (block_size at the top and in dflash_config)."""
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
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "layer_types": self.layer_types,
            "use_sliding_window": sliding,
            "sliding_window": self.sliding_window if sliding else None,
            "max_window_layers": self.num_hidden_layers,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": self.vocab_size,
            "dtype": self.dtype,
            "dflash_stream": {"target_id": self.target_id},
        }
        if set(self.layer_types) == {SLIDING}:
            # One flag for all layers: where they are mixed, readers take the direction from layer_types.
            published["is_causal"] = True
        return published


def _unused_row(tokenizer_size: int | None, vocab_size: int, target: str) -> int:
    """The first row of the embedding that no token of the tokenizer uses."""
    if tokenizer_size is None or tokenizer_size >= vocab_size:
        reason = (
            "and the tokenizer is not known"
            if tokenizer_size is None
            else f"and the tokenizer's {tokenizer_size} tokens fill all {vocab_size} rows of its embedding"
        )
        raise UserError(
            f"drafter.mask_token_id is not set {reason}: set it to a token of {target} that never occurs in text, "
            "such as a reserved or unused special token"
        )
    return tokenizer_size


def _checked(values: dict[str, Any], problem: str) -> DrafterConfig:
    try:
        return DrafterConfig.model_validate(values)
    except ValidationError as error:
        lines = [
            ".".join(str(part) for part in e["loc"])
            + (": " if e["loc"] else "")
            + e["msg"].removeprefix("Value error, ")
            for e in error.errors()
        ]
        raise UserError(f"{problem}: " + "; ".join(lines)) from None


def _refuse_foreign(published: dict[str, Any], inner: dict[str, Any], where: str) -> None:
    rope = published.get("rope_scaling") or published.get("rope_parameters") or {}
    causal = published.get("is_causal", inner.get("causal"))
    types = set(published.get("layer_types") or [FULL])
    foreign = {
        "hidden_act": published.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(published.get("attention_bias")),
        "rope_scaling": (rope.get("rope_type") or rope.get("type") or "default") != "default",
        "partial_rotary_factor": (
            rope.get("partial_rotary_factor") or published.get("partial_rotary_factor") or 1
        )
        != 1,
        "dflash_config.use_swa": bool(inner.get("use_swa")),
        "is_causal": causal is not None and types != {SLIDING if causal else FULL},
        **{
            f"dflash_config.{name}": bool(inner.get(name))
            for name in ("projector_type", "conv_kernel_size", "selector_rank", "final_logit_softcapping")
        },
    }
    if named := [name for name, is_foreign in foreign.items() if is_foreign]:
        raise UserError(
            f"{where} asks for {', '.join(named)}, which this drafter does not have: only DFlash drafters of the first version "
            "are read (full attention, or sliding layers that are causal in their block)"
        )
