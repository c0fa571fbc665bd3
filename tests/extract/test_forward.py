"""Batches that do not fit in memory, and samples whose states are no good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_stream.config import TargetSettings
from dflash_stream.errors import UserError
from dflash_stream.extract.forward import continuations, is_out_of_memory, states_in_order
from dflash_stream.target.load import Target, load_target
from tests.tiny_targets import VOCAB


@pytest.fixture
def target(tiny_llama: Path) -> Target:
    settings = TargetSettings(id=str(tiny_llama), dtype="float32")
    return load_target(settings, layers=[1, 3, 5], whole=True, device="cpu")


def texts(count: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(2, 50)).astype(np.int32) for _ in range(count)]


def limit_memory(
    target: Target, name: str, tokens: int, error: type[Exception] = torch.OutOfMemoryError
) -> list[int]:
    """Make a method of the target run out of memory above so many padded tokens; returns what was run."""
    whole = getattr(target, name)
    sizes: list[int] = []

    def limited(batch: Any, *rest: Any) -> Any:
        padded = len(batch) * max(len(text) for text in batch)
        if padded > tokens:
            raise error("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")
        sizes.append(padded)
        return whole(batch, *rest)

    setattr(target, name, limited)
    return sizes


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_batch_that_does_not_fit_stops_the_run(target: Target, error: type[Exception]) -> None:
    sequences = texts(9)
    expected = [states.hidden_states.clone() for states in states_in_order(target, sequences, 300)]
    sizes = limit_memory(target, "submit", 100, error)
    found = list(states_in_order(target, sequences, 300))
    assert max(sizes) <= 100
    for mine, whole, text in zip(found, expected, sequences, strict=True):
        assert mine.hidden_states.shape[0] == len(text)
        torch.testing.assert_close(mine.hidden_states, whole, rtol=2**-7, atol=1e-4)


def test_a_single_sample_that_does_not_fit_is_left_out(target: Target) -> None:
    limit_memory(target, "submit", 20)
    with pytest.raises(
        UserError, match=r"single sample of \d+ tokens: its unit stays open.*prepare\.max_tokens"
    ):
        list(states_in_order(target, texts(4), 400))


def test_generation_that_does_not_fit_stops_the_run(target: Target) -> None:
    prompts = texts(5, seed=2)
    expected = continuations(target, prompts, 6, 10_000)
    limit_memory(target, "greedy", 60)
    assert continuations(target, prompts, 6, 10_000) == expected


def test_another_error_passes_for_lack_of_memory() -> None:
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    )


def test_a_passing_fault_costs_the_sample(target: Target) -> None:
    """States that were bad once are asked for again, alone: a fault of the device need not cost a sample."""
    sequences = texts(5)
    faults = [True]

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        if faults and output.shape[0] > 1:
            faults.pop()
            return output * float("nan")
        return None

    target.layers[3].register_forward_hook(hook)
    assert [states.problem for states in states_in_order(target, sequences, 1000)] == [""] * 5


def test_a_lasting_fault_spoils_its_batch(target: Target) -> None:
    with torch.no_grad():
        target.model.get_input_embeddings().weight[1] = float("inf")
    sequences = texts(5)
    sequences[2] = np.asarray([4, 1, 5], np.int32)
    problems = [states.problem for states in states_in_order(target, sequences, 1000)]
    assert problems[2] == "states of layer 1, 3, 5 are not finite"
    assert problems[:2] + problems[3:] == [""] * 4
