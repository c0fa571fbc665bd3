"""Puts token sequences through the target and gets their states back in order, whatever happens to a batch.

A batch that does not fit in memory is split in halves. A sequence whose states are no good is tried once
more, alone.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from dflash_stream.errors import UserError
from dflash_stream.extract.batches import in_order, plan
from dflash_stream.target.load import Target
from dflash_stream.target.taps import PendingStates, States, Tokens

log = logging.getLogger(__name__)

T = TypeVar("T")


def states_in_order(target: Target, sequences: Sequence[Tokens], budget_tokens: int) -> Iterator[States]:
    """The states of each sequence, in order. `problem` is set where they were no good twice.

    A batch is started before the one ahead of it is waited for, so that its copy to the host and the upload
    run meanwhile. UserError when a single sequence does not fit in memory.
    """
    return in_order(_results(target, sequences, plan([len(tokens) for tokens in sequences], budget_tokens)))


def _results(
    target: Target, sequences: Sequence[Tokens], batches: list[list[int]]
) -> Iterator[tuple[int, States]]:
    todo = deque(batches)
    flying: tuple[list[int], PendingStates] | None = None
    while todo or flying:
        started = None
        if todo:
            batch = todo.popleft()
            pending = fits(partial(target.submit, [sequences[place] for place in batch]))
            if pending is not None:
                started = batch, pending
            elif flying is not None:  # it may fit when the batch ahead of it has left the device
                todo.appendleft(batch)
            else:
                todo.extendleft(reversed(halves(batch, [len(sequences[place]) for place in batch])))
        if flying is not None:
            for place, states in zip(flying[0], flying[1].wait(), strict=True):
                yield place, _once_more(target, sequences[place], states) if states.problem else states
        flying = started


def _once_more(target: Target, tokens: Tokens, states: States) -> States:
    """The states of a sequence alone; the first ones when that does not even fit."""
    alone = fits(partial(target.submit, [tokens]))
    return states if alone is None else alone.wait()[0]


def continuations(
    target: Target, prompts: Sequence[Tokens], new_tokens: int, budget_tokens: int
) -> list[list[int]]:
    """The target's greedy continuation of each prompt, in order: at most `new_tokens` tokens."""
    found: dict[int, list[int]] = {}
    todo = deque(plan([len(prompt) + new_tokens for prompt in prompts], budget_tokens))
    while todo:
        batch = todo.popleft()
        made = fits(partial(target.greedy, [prompts[place] for place in batch], new_tokens))
        if made is None:
            todo.extendleft(reversed(halves(batch, [len(prompts[place]) + new_tokens for place in batch])))
        else:
            found.update(zip(batch, made, strict=True))
    return [found[place] for place in range(len(prompts))]


def fits(work: Callable[[], T]) -> T | None:
    """What `work` returns; None when it ran out of memory, which is free again by then."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not is_out_of_memory(error):
            raise
    gc.collect()  # outside the except: the error held the tensors of the failed pass
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate, on CUDA or on the CPU (where it has no exception class of its own)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return any(sign in text for sign in ("not enough memory", "can't allocate memory", "out of memory"))


def halves(batch: list[int], lengths: list[int]) -> list[list[int]]:
    """A batch that did not fit, as two. UserError when it is a single sequence."""
    if len(batch) == 1:
        raise UserError(
            f"out of memory at a single sample of {lengths[0]} tokens: its unit stays open. "
            "Use a device with more memory (nothing else should run on it), or prepare a run with a smaller "
            "prepare.max_tokens; extract.tokens_per_batch does not matter for a single sample."
        )
    log.warning(
        "out of memory at a batch of %d samples, %d padded tokens: trying halves; "
        "a lower extract.tokens_per_batch avoids this",
        len(batch),
        len(batch) * max(lengths),
    )
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]
