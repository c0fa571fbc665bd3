"""The tensors of a sample: their names, dtypes and shapes, and the check that a sample keeps to them.

T tokens of the sample, K tapped layers, H hidden size, G tokens of the target's own text (prompt and
continuation). How they are stored is left to `codec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dflash_stream.errors import UserError


class SampleError(UserError):
    """A sample, or its stored form, is not what the format says."""


@dataclass(frozen=True)
class Rule:
    """dtype and shape of a tensor; `shape` has one letter a dimension. `state`: goes through the codec."""

    dtype: torch.dtype
    shape: str
    state: bool = False


RULES: dict[str, Rule] = {
    "input_ids": Rule(torch.int32, "T"),
    "loss_mask": Rule(torch.uint8, "T"),  # 1: supervised
    "hidden_states": Rule(torch.bfloat16, "TKH", state=True),
    "final_state": Rule(torch.bfloat16, "TH", state=True),  # optional: the last layer, before the norm
    "greedy.input_ids": Rule(torch.int32, "G"),  # optional, all three or none
    "greedy.prompt_tokens": Rule(torch.int32, "1"),
    "greedy.hidden_states": Rule(torch.bfloat16, "GKH", state=True),
}
REQUIRED = ("input_ids", "loss_mask", "hidden_states")
GREEDY = ("greedy.input_ids", "greedy.prompt_tokens", "greedy.hidden_states")


def check(
    tensors: Mapping[str, torch.Tensor],
    where: str,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    final_state: bool | None = None,
) -> None:
    """Raise SampleError, naming `where` and the tensor, unless names, dtypes and shapes agree with RULES.

    What is given of K, H and the presence of final_state must agree with the tensors too.
    """
    missing = [name for name in REQUIRED if name not in tensors]
    if final_state and "final_state" not in tensors:
        missing.append("final_state")
    if any(name in tensors for name in GREEDY):
        missing += [name for name in GREEDY if name not in tensors]
    unknown = [
        name for name in tensors if name not in RULES or (name == "final_state" and final_state is False)
    ]
    if missing or unknown:
        said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has also {', '.join(unknown)}"] * bool(
            unknown
        )
        raise SampleError(
            f"{where} {' and '.join(said)}: the tensors of a sample are those that run.json names"
        )
    sizes = {"1": 1}
    if num_layers is not None:
        sizes["K"] = num_layers
    if hidden_size is not None:
        sizes["H"] = hidden_size
    for name, rule in RULES.items():
        if name in tensors:
            _check_one(name, rule, tensors[name], sizes, where)
    if "greedy.prompt_tokens" in tensors and not 0 < int(tensors["greedy.prompt_tokens"]) <= sizes["G"]:
        raise SampleError(
            f"{where}: greedy.prompt_tokens is {int(tensors['greedy.prompt_tokens'])}, "
            f"not within the {sizes['G']} tokens of greedy.input_ids"
        )


def _check_one(name: str, rule: Rule, tensor: torch.Tensor, sizes: dict[str, int], where: str) -> None:
    """Check one tensor against its rule; dimensions met for the first time are entered in `sizes`."""
    if tensor.dtype != rule.dtype:
        raise SampleError(f"{where}: {name} is {tensor.dtype}, expected {rule.dtype}")
    fits = tensor.ndim == len(rule.shape) and all(
        size > 0 and size == sizes.setdefault(letter, size)
        for letter, size in zip(rule.shape, tensor.shape, strict=True)
    )
    if not fits:
        expected = ", ".join(
            f"{letter}={sizes[letter]}" if letter in sizes else letter for letter in rule.shape
        )
        raise SampleError(f"{where}: {name} has shape {list(tensor.shape)}, expected [{expected}]")
