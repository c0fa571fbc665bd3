"""What the reader hands to a trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sample:
    """One sample on the host.

    row: its row in the sample table; epoch: which pass over the data it belongs to (0 for validation)
    input_ids [T] int64, loss_mask [T] bool, hidden_states [T, K, H] bfloat16
    greedy_*: the target's own text for a held-out sample: input_ids [P+N] int64 (prompt and continuation),
    prompt_tokens P, hidden_states [P+N, K, H]
    """

    key: str
    row: int
    epoch: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor
    greedy_input_ids: torch.Tensor | None = None
    greedy_hidden_states: torch.Tensor | None = None
    greedy_prompt_tokens: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """The samples that one rank takes through the drafter at once. May be empty: every rank has as many in a step.

    step: number of the global batch, from 0; last: the step ends with this one (on every rank alike)
    """

    step: int
    last: bool
    samples: list[Sample]
