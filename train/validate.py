"""How good a drafter is on samples that it never trained on, measured while it trains.

Over the text of the data set: the training's loss, the accuracy of each slot, and the agreement length. Over
the target's own greedy text: the acceptance length, which is what decoding gains. Samples are split over the
ranks, sums are added up. Intervals and comparisons are `evaluate`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from dflash_stream.stream.sample import Sample
from train.decode import acceptance_walk
from train.learner import Learner
from train.optimizer import SumsBuffer
from train.ranks import Ranks


@torch.no_grad()
def validate(
    learner: Learner, samples: Iterable[Sample], ranks: Ranks, *, give_up: Callable[[], bool] = lambda: False
) -> dict[str, float]:
    """Figures over this rank's and all other ranks' samples: loss, agreement_length, accuracy/slot_k,
    acceptance_length, samples. A figure without data is left out. Collective: every rank calls it at the same
    step, with or without samples. When `give_up` says so on any rank, samples are left out and there are no
    figures.
    """
    config = learner.drafter.config
    buffer = SumsBuffer(config.block_size, learner.device)
    walked = torch.zeros(2, dtype=torch.float64)  # tokens gained, rounds
    for sample in samples:
        if give_up():
            buffer.add(failed=1)
            break
        buffer.add(samples=1)
        blocks = learner.blocks([sample])
        if blocks is not None:
            buffer.add_sums(learner.measure(blocks))
        if sample.greedy_input_ids is not None and sample.greedy_hidden_states is not None:
            with learner.autocast():
                lengths = acceptance_walk(
                    learner.drafter,
                    learner.head,
                    sample.greedy_input_ids,
                    sample.greedy_hidden_states,
                    sample.greedy_prompt_tokens,
                )
            walked += torch.tensor([sum(lengths), len(lengths)])
    walked = walked.to(learner.device, torch.float32)
    ranks.sum_(walked)
    ranks.sum_(buffer.values)
    sums = buffer.read()
    tokens, rounds = walked.tolist()
    if sums.failed or not sums.samples:
        return {}
    figures = {"samples": sums.samples}
    if sums.weight:
        figures |= sums.figures()
    if rounds:
        figures["acceptance_length"] = tokens / rounds
    return figures
