"""The whole target with the cache of one text: it extends the text, shows its tapped states, and takes tokens back.

The live decoding loop asks it to verify drafts. What differs between targets is only how rejected tokens are
taken back: attention layers drop rows of their keys and values; a linear-attention layer has mixed the rejected
tokens into its state, so the states of before are put back and the accepted tokens are run once more. Works
with the cache interface of transformers 5.12 and later.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from dflash_stream.target.load import Target
from dflash_stream.target.taps import tapped


class Verifier:
    """A target with the cache of one text (batch 1).

    target: loaded whole; layers: the decoder layers to tap (0-based, their output). `forwards` counts the
    forward passes made, replays included.
    """

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.forwards = 0
        self._target, self._layers = target, list(layers)
        self._cache, self._replays = _new_cache(target.model.config)
        accepted = inspect.signature(target.model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._before: list[dict[str, Any]] = []  # what the cache layers held before the last extension
        self._last: Tensor | None = None

    @torch.inference_mode()
    def extend(self, tokens: Tensor, *, last: bool = False) -> tuple[Tensor, Tensor]:
        """Append tokens [n] → (the target's greedy successor of each of them [n], tapped states [n, K, H]).

        With `last` only the successor of the last token, [1]: a long prompt needs no logits of its other
        tokens.
        """
        if self._replays:
            self._before = [_snapshot(layer) for layer in self._cache.layers]
        self._last = tokens
        return self._forward(tokens, keep_logits=1 if last else 0)

    @torch.inference_mode()
    def keep(self, count: int) -> None:
        """Take back all but the first `count` tokens of the last `extend`."""
        assert self._last is not None
        surplus = len(self._last) - count
        if surplus == 0:
            return
        if not self._replays:
            self._cache.crop(-surplus)
            return
        for layer, state in zip(self._cache.layers, self._before, strict=True):
            layer.__dict__.update(state)
        self._forward(self._last[:count], keep_logits=1)

    def _forward(self, tokens: Tensor, keep_logits: int) -> tuple[Tensor, Tensor]:
        arguments = {self._cache_name: self._cache, "use_cache": True, "logits_to_keep": keep_logits}
        states: dict[int, Tensor] = {}
        with tapped(self._target.layers, self._layers, states.__setitem__):
            logits = self._target.model(input_ids=tokens[None], **arguments).logits[0]
        self.forwards += 1
        return logits.argmax(dim=-1), torch.stack([states[place][0] for place in sorted(states)], dim=1)


def _new_cache(config: Any) -> tuple[DynamicCache, bool]:
    """An empty cache, and whether taking tokens back needs a replay.

    Targets of attention layers alone get a cache that keeps every key and value, sliding layers too (their mask
    does the sliding): any number of rows can be dropped from it, also beyond the window, where a cache that
    keeps only the window has lost what a rollback needs.
    """
    cache = DynamicCache(config=config)
    if all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers):
        return DynamicCache(), False
    return cache, True


def _snapshot(layer: Any) -> dict[str, Any]:
    """What a cache layer holds, safe from later updates: keys and values grow by concatenation, into new
    tensors; everything else may be written in place and is cloned."""
    return {
        name: value if name in ("keys", "values") else _cloned(value) for name, value in vars(layer).items()
    }


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _cloned(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_cloned(item) for item in value]
    return value
