"""Loads a target model and puts it to its two uses: tapping its layers, and greedy generation.

One process, one device. Families that run exactly the layers they have are loaded without what lies after
the last tap; every other one is loaded whole, and its forward pass ended after the last tap. The lm_head is
never computed for states.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dflash_stream.config import TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.target.identity import read_config
from dflash_stream.target.layers import check_layers, find_backbone
from dflash_stream.target.taps import PendingStates, Tapper, Tokens, pad

# Families whose first layers compute the same when the later ones are absent (Gemma 4, for one, shares keys
# and values from the end backwards), by the model_type of their text config.
_SLICEABLE = frozenset(
    {
        "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
        "gemma2", "gemma3_text", "glm4",
    }
)  # fmt: skip


class Target:
    """A loaded target model on one device.

    model: the transformers model, only its backbone unless `whole`; backbone: embedding, decoder layers
    and norm; layers: the decoder layers; taps: the tapped ids; eos: the token ids that end a text.
    """

    def __init__(
        self, model: Any, taps: list[int], *, whole: bool, final_state: bool, device: torch.device
    ) -> None:
        self.backbone: Any
        self.backbone, self.layers = find_backbone(model)
        self.model = model if whole else self.backbone  # lm_head and vision tower are let go
        self.taps = taps
        self.whole = whole
        self.device = device
        self.eos = _end_tokens(model)
        self._tapper = Tapper(self.backbone, self.layers, taps, final_state, device)

    def submit(self, batch: Sequence[Tokens]) -> PendingStates:
        """Start the forward pass of a batch of token sequences; `.wait()` gives their States in order."""
        return self._tapper.submit(batch)

    def states(self, batch: Sequence[Tokens]) -> list[Tensor]:
        """The tapped states of each token sequence: [T, K, H] bfloat16 on the host."""
        return [states.hidden_states for states in self.submit(batch).wait()]

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Tokens], max_new_tokens: int) -> list[list[int]]:
        """The greedy continuation of each prompt, up to and with its end token; at most `max_new_tokens` tokens.

        Prompts are padded on the left: a recurrent state would take padding on the right for text.
        """
        assert self.whole, "generation needs the whole target"
        ids, mask = pad(prompts, self.device, left=True)
        made = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens)
        return [cut_at_end(row, self.eos) for row in made[:, ids.shape[1] :].tolist()]


def cut_at_end(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """`tokens` up to and with the first end token."""
    for place, token in enumerate(tokens):
        if token in eos:
            return tokens[: place + 1]
    return tokens


def load_target(
    settings: TargetSettings,
    *,
    layers: list[int],
    whole: bool,
    device: torch.device | str,
    final_state: bool = False,
) -> Target:
    """Load the target for tapping `layers`.

    whole: all layers and lm_head, as generation needs them. final_state: also tap the last layer's output
    before the final norm, which takes all layers. UserError when the checkpoint cannot be read, lacks
    weights, or does not fit.
    """
    device = torch.device(device)
    config = read_config(settings)
    text = config.get_text_config()
    check_layers(layers, text.num_hidden_layers)
    if not (whole or final_state) and text.model_type in _SLICEABLE:
        cut_layers(text, layers[-1] + 1)
    model = _from_pretrained(settings, config, device).eval().requires_grad_(False)
    if whole:
        _set_greedy(model)
    return Target(model, layers, whole=whole, final_state=final_state, device=device)


def cut_layers(text: Any, count: int) -> None:
    """Shorten a text config to its first `count` layers, with every list that has an entry a layer."""
    total = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == total and name.endswith(("_types", "_layers")):
            setattr(text, name, value[:count])
    text.num_hidden_layers = count


def _from_pretrained(settings: TargetSettings, config: Any, device: torch.device) -> Any:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"device_map": {"": device}} if device.type == "cuda" else {}
    try:
        with _quiet():  # its report of unused weights; missing ones are an error below
            model, info = auto.from_pretrained(
                settings.id,
                config=config,
                revision=settings.revision or "main",
                dtype=getattr(torch, settings.dtype),
                attn_implementation=settings.attention,
                trust_remote_code=settings.trust_remote_code,
                output_loading_info=True,
                **options,
            )
    except torch.OutOfMemoryError:
        raise UserError(
            f"target.id {settings.id} does not fit on {device} in {settings.dtype}: each process holds "
            "the whole target, so use a device with more memory, and one process a device"
        ) from None
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"cannot load target.id {settings.id}: {error}") from None
    lacking = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise UserError(
            f"the checkpoint of target.id {settings.id} lacks weights of {type(model).__name__}: {shown}. "
            "It is damaged, or needs another version of transformers."
        )
    return model if device.type == "cuda" else model.to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging as bars

    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    if not sys.stderr.isatty():  # a progress bar in a log file is a page of noise
        bars.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(before)


def _end_tokens(model: nn.Module) -> frozenset[int]:
    """The ids that end a text: of the generation config, else of the text config."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):  # type: ignore[operator,union-attr]
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return frozenset(end if isinstance(end, list) else [end])
    return frozenset()


def _set_greedy(model: Any) -> None:
    """Plain argmax: a checkpoint's own generation config may sample, or penalise repetition."""
    from transformers import GenerationConfig

    end = sorted(_end_tokens(model))
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=end or None, pad_token_id=end[0] if end else 0, use_cache=True
    )
