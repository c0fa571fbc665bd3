"""One optimizer step over a global batch: the schedule, the flat gradient with its sums, clipping and AdamW.

A global batch is cut into micro-batches on several ranks, and the cut must not matter. So nothing is averaged:
each micro-batch adds the gradient of its weighted loss *sum* to one flat fp32 buffer, and the sums that belong
to it (weights, losses, counts, who wants to stop) to the tail of the same buffer. One all-reduce of that buffer
ends the step; then the gradient is divided by the weight of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dflash_stream.config import TrainSettings
from train.objective import LossSums
from train.ranks import Ranks

# What travels with the gradient, in this order, before `correct` and `count` for each slot of a block.
SCALARS = ("weight", "loss", "prefix", "blocks", "samples", "tokens", "wait_s", "sigterm", "sigint", "failed")


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """The rate of step `step` (from 0): linear warm-up to the peak, then a cosine down to min_lr_ratio of it."""
    warmup_steps = round(settings.warmup_fraction * total_steps)
    if step < warmup_steps:
        return settings.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class Sums:
    """The tail of a step as plain numbers, over all ranks. correct, count: one entry for each drafted slot."""

    weight: float
    loss: float
    prefix: float
    blocks: float
    samples: float
    tokens: float
    wait_s: float
    sigterm: float
    sigint: float
    failed: float
    correct: list[float]
    count: list[float]

    @staticmethod
    def total(parts: Sequence[Sums]) -> Sums:
        """The sums of several steps as one."""
        scalars = (sum(getattr(part, name) for part in parts) for name in SCALARS)
        rows = ([sum(column) for column in zip(*lists, strict=True)] for lists in
                ([part.correct for part in parts], [part.count for part in parts]))  # fmt: skip
        return Sums(*scalars, *rows)

    @property
    def mean_loss(self) -> float:
        """Weighted mean cross-entropy; 0 when nothing was supervised."""
        return self.loss / self.weight if self.weight else 0.0

    def figures(self) -> dict[str, float]:
        """Loss, agreement length (1 + leading correct slots, mean over blocks) and accuracy of each slot, for a log."""
        accuracy = {
            f"accuracy/slot_{slot}": correct / count
            for slot, (correct, count) in enumerate(zip(self.correct, self.count, strict=True), start=1)
            if count
        }
        agreement = {"agreement_length": self.prefix / self.blocks} if self.blocks else {}
        return {"loss": self.mean_loss, **agreement, **accuracy}


class SumsBuffer:
    """The sums of a step or a validation on the device: one fp32 vector, in the order of SCALARS, correct, count."""

    def __init__(self, block_size: int, device: torch.device, values: torch.Tensor | None = None) -> None:
        self._slots = block_size - 1
        self.values = torch.zeros(self.size(block_size), device=device) if values is None else values

    @staticmethod
    def size(block_size: int) -> int:
        return len(SCALARS) + 2 * (block_size - 1)

    def add_sums(self, sums: LossSums) -> None:
        """Add what one micro-batch measured, without waiting for the device."""
        scalars = (sums.weight_sum, sums.loss_sum, sums.prefix_sum, sums.blocks)
        self.values[: len(scalars)] += torch.stack([value.detach().to(self.values) for value in scalars])
        counts = len(SCALARS)
        self.values[counts : counts + self._slots] += sums.correct.to(self.values)
        self.values[counts + self._slots :] += sums.count.to(self.values)

    def add(self, **scalars: float) -> None:
        """Add plain numbers to the sums of their names."""
        for name, value in scalars.items():
            self.values[SCALARS.index(name)] += value

    def read(self) -> Sums:
        """The sums as numbers; waits for the device."""
        values = self.values.tolist()
        counts = values[len(SCALARS) :]
        scalars = dict(zip(SCALARS, values, strict=False))
        return Sums(**scalars, correct=counts[: self._slots], count=counts[self._slots :])


class Accumulator:
    """The flat fp32 buffer of a step: the gradient of every parameter, then the sums.

    Each parameter's `.grad` is a view into it, so that backward passes accumulate in place and nothing is
    packed.
    """

    def __init__(self, parameters: list[nn.Parameter], block_size: int) -> None:
        size = sum(parameter.numel() for parameter in parameters)
        device = parameters[0].device
        self._buffer = torch.zeros(size + SumsBuffer.size(block_size), dtype=torch.float32, device=device)
        self.gradient = self._buffer[:size]
        self.sums = SumsBuffer(block_size, device, self._buffer[size:])
        begin = 0
        for parameter in parameters:
            parameter.grad = self.gradient[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()

    def clear(self) -> None:
        self._buffer.zero_()

    def reduce(self, ranks: Ranks) -> Sums:
        """Sum gradient and sums over the ranks: the one collective of a step."""
        ranks.sum_(self._buffer)
        return self.sums.read()


class Optimizer:
    """AdamW over fp32 weights. Norm weights (vectors) do not decay."""

    def __init__(self, model: nn.Module, settings: TrainSettings) -> None:
        self._settings = settings
        self.named = dict(model.named_parameters())
        matrices = [parameter for parameter in self.named.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.named.values() if parameter.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
        self.steps = 0  # taken; fewer than the training's when a batch had no supervised token
        self._prepare_state()

    def _prepare_state(self) -> None:
        """Create what AdamW would create at its first step, so that a checkpoint has the same tensors at any step."""
        for parameter in self.named.values():
            self._adamw.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self, gradient: torch.Tensor, weight: float, rate: float) -> float:
        """Divide the summed gradient by the batch's weight, clip, step. Returns the norm before clipping.

        gradient: the flat buffer that every `.grad` is a view of. A batch without weight, or with a gradient
        that is not finite, changes nothing: the caller sees the norm.
        """
        if not weight:
            return 0.0
        norm = float(torch.linalg.vector_norm(gradient)) / weight
        if not math.isfinite(norm):
            return norm
        gradient.mul_(min(1.0, self._settings.max_grad_norm / (norm + 1e-6)) / weight)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.steps += 1
        return norm

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as named tensors: `exp_avg.NAME` and `exp_avg_sq.NAME`, live, in order of the parameters."""
        return {
            f"{moment}.{name}": self._adamw.state[parameter][moment]
            for moment in ("exp_avg", "exp_avg_sq")
            for name, parameter in self.named.items()
        }

    def restore_steps(self, steps: int) -> None:
        """Set the number of steps taken; the tensors are filled by the caller through `tensors`."""
        self.steps = steps
        for state in self._adamw.state.values():
            state["step"].fill_(float(steps))
