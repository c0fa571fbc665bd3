"""Which decoder layers are tapped, and where a model keeps them.

Layer i means the output of decoder layer i, 0-based, before any final norm: `hidden_states[i + 1]` of
transformers, except for the last layer, whose entry there is already normed. Imports neither torch nor
transformers: `prepare` needs the rule alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_stream.errors import UserError

if TYPE_CHECKING:
    from torch import nn

# Where the families keep their decoder layers, wrappers first: a wrapper also has layers in its vision tower.
_PATHS = (
    "model.language_model.layers",  # Qwen3.5/3.6, Gemma 3 and other wrappers with a vision tower
    "language_model.model.layers",
    "language_model.layers",
    "model.text_model.layers",
    "model.layers",  # Llama, Qwen2, Qwen3, Gemma, Mistral, Glm4, GptOss …
    "layers",  # a bare text backbone
    "model.decoder.layers",
    "transformer.h",
    "gpt_neox.layers",
)


def dflash_layers(num_layers: int, num_taps: int) -> list[int]:
    """The layers that DFlash taps by default: evenly from layer 1 to layer num_layers - 3.

    id_j = round(1 + j·(num_layers - 4)/(num_taps - 1)) with Python's rounding (half to even), as in the
    z-lab code; one tap is num_layers // 2. UserError when the target has too few layers for that many
    distinct taps.
    """
    if num_taps == 1:
        return [num_layers // 2]
    layers = [round(1 + j * (num_layers - 4) / (num_taps - 1)) for j in range(num_taps)]
    if num_layers < 4 or len(set(layers)) < num_taps:
        raise UserError(
            f"a target of {num_layers} layers is too shallow for {num_taps} taps by the DFlash rule: "
            "lower prepare.num_taps, or name the layers with prepare.layers"
        )
    return layers


def check_layers(layers: list[int], num_layers: int) -> list[int]:
    """The given layers, when they are ascending, distinct and exist; UserError otherwise."""
    if not layers:
        raise UserError(
            "prepare.layers is empty: name at least one decoder layer, or leave it unset for the DFlash rule"
        )
    wrong = [layer for layer in layers if not 0 <= layer < num_layers]
    if wrong:
        raise UserError(
            f"prepare.layers names {wrong}, the target has decoder layers 0 to {num_layers - 1} "
            "(0-based: layer i is hidden_states[i + 1] of transformers)"
        )
    if sorted(set(layers)) != layers:
        raise UserError(f"prepare.layers must be ascending and without repeats, not {layers}")
    return layers


def find_backbone(model: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """The text model (embedding, decoder layers, norm; no lm_head) inside `model`, and its decoder layers.

    A candidate counts only when it has as many layers as the model's text config says.
    """
    config = getattr(model, "config", None)
    expected = config.get_text_config().num_hidden_layers if config is not None else None
    for path in _PATHS:
        owner: object = model
        *parents, last = path.split(".")
        for name in parents:
            owner = getattr(owner, name, None)
        layers = getattr(owner, last, None)
        if layers is not None and hasattr(layers, "__len__") and expected in (None, len(layers)):
            return owner, layers  # type: ignore[return-value]
    raise UserError(
        f"found no decoder layers in {type(model).__name__} (expected {expected}; looked at {', '.join(_PATHS)}): "
        "this model family is not supported"
    )
