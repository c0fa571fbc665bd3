"""Who sees whom: the mask against loops written from the definition, the implementations against each other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from dflash_stream.errors import UserError
from train import attention
from train.attention import build, dense_mask, flex_rule, resolve

WINDOWS = [None, 1, 3, 6, 100]
ANCHORS = torch.tensor(
    [[2, 3, 5, 11, 19, 19], [0, 1, 12, 12, 12, 12]]
)  # overlapping; the last of each is padding
KEEP = torch.tensor([[True] * 5 + [False], [True] * 3 + [False] * 3])
CONTEXT, BLOCK = 20, 4


def visible_by_definition(b: int, query: int, key: int, window: int | None) -> bool:
    """Before the anchor; own block only; a window counts the query and makes the block causal."""
    block, slot = divmod(query, BLOCK)
    anchor = int(ANCHORS[b, block])
    position = anchor + slot
    if key < CONTEXT:
        in_window = window is None or position - key < window
        return bool(KEEP[b, block]) and key < anchor and in_window
    other_block, other_slot = divmod(key - CONTEXT, BLOCK)
    if other_block != block:
        return False
    return window is None or (other_slot <= slot and position - (anchor + other_slot) < window)


def by_definition(window: int | None) -> Tensor:
    queries = ANCHORS.shape[1] * BLOCK
    return torch.tensor(
        [
            [[visible_by_definition(b, q, k, window) for k in range(CONTEXT + queries)] for q in range(queries)]
            for b in range(len(ANCHORS))
        ]
    )


@pytest.mark.parametrize("window", WINDOWS)
def test_a_block_never_sees_its_own_future_or_another_block(window: int | None) -> None:
    mask = dense_mask(ANCHORS, KEEP, 0, CONTEXT, BLOCK, window)
    assert torch.equal(mask[:, 0], by_definition(window))


@pytest.mark.parametrize("window", WINDOWS)
def test_the_rule_for_cuda_is_the_same_rule(window: int | None) -> None:
    queries = ANCHORS.shape[1] * BLOCK
    rule = flex_rule(ANCHORS, KEEP, torch.tensor(CONTEXT), BLOCK, window)
    b = torch.arange(len(ANCHORS))[:, None, None]
    q, k = torch.arange(queries)[:, None], torch.arange(CONTEXT + queries)
    assert torch.equal(rule(b, torch.tensor(0), q, k), by_definition(window))


def random_case(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, context keys and values, block keys and values: 6 query heads on 2 key heads."""
    generator = torch.Generator().manual_seed(0)
    queries = ANCHORS.shape[1] * BLOCK
    shapes = [(6, queries), (2, CONTEXT), (2, CONTEXT), (2, queries), (2, queries)]
    return [
        torch.randn(2, heads, tokens, 8, generator=generator).to(dtype).requires_grad_()
        for heads, tokens in shapes
    ]


def kept_rows(out: Tensor) -> Tensor:
    """[B, heads, N·L, d] → the rows of blocks that are no padding."""
    return out.unflatten(2, (-1, BLOCK)).permute(0, 2, 1, 3, 4)[KEEP]


@pytest.mark.parametrize("window", WINDOWS)
def test_grouped_attention_has_the_values_and_gradients_of_the_dense_reference(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.attention.RUN_QUERIES", 2 * BLOCK)  # several runs, one of them only padding
    results = []
    for name in ("sdpa", "grouped"):
        case = random_case()
        attend = build(name, ANCHORS, KEEP, context_tokens=CONTEXT, block_tokens=BLOCK, window=window)  # type: ignore[arg-type]
        out = kept_rows(attend(*case))
        (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
        results.append([out, *(x.grad for x in case)])
    for reference, grouped in zip(*results, strict=True):
        assert reference is not None
        torch.testing.assert_close(grouped, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_has_the_values_of_the_dense_reference(window: int | None) -> None:
    case = [x.detach() for x in random_case()]
    reference, flex = (
        kept_rows(build(name, ANCHORS, KEEP, context_tokens=CONTEXT, block_tokens=BLOCK, window=window)(*case))  # type: ignore[arg-type]
        for name in ("sdpa", "flex")
    )
    torch.testing.assert_close(flex, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["sdpa", "grouped"])
@pytest.mark.parametrize("window", [None, 3])
def test_padded_blocks_make_no_nan_in_values_or_gradients(name: str, window: int | None) -> None:
    case = random_case()
    nothing = torch.zeros_like(KEEP)
    out = build(name, ANCHORS, nothing, context_tokens=CONTEXT, block_tokens=BLOCK, window=window)(*case)  # type: ignore[arg-type]
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in case)


def test_the_grouped_context_is_cut_at_the_last_anchor_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saving itself: what lies behind a run's anchors, or before its window, is not even read."""
    monkeypatch.setattr("train.attention.RUN_QUERIES", 2 * BLOCK)
    anchors, keep = torch.tensor([[8, 9, 14, 15]]), torch.ones(1, 4, dtype=torch.bool)
    seen: list[int] = []
    original = torch.nn.functional.scaled_dot_product_attention

    def recording(query: Tensor, key: Tensor, *rest: Tensor, **options: object) -> Tensor:
        seen.append(key.shape[2])
        return original(query, key, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", recording)
    x = torch.zeros(1, 1, 16, 8)
    context = torch.zeros(1, 1, CONTEXT, 8)
    for window, expected in ((None, [9 + 8, 15 + 8]), (4, [9 - 5 + 8, 15 - 11 + 8])):
        seen.clear()
        attend = build("grouped", anchors, keep, context_tokens=CONTEXT, block_tokens=BLOCK, window=window)
        attend(x, context, context, x, x)
        assert seen == expected


def test_attention_is_chosen_by_device_and_flex_is_refused_where_it_cannot_train() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve("auto", cpu) == "grouped"
    assert resolve("auto", cuda) == "flex"
    assert resolve("sdpa", cuda) == "sdpa"
    with pytest.raises(UserError, match=r"train\.attention = flex trains on CUDA only, this is cpu"):
        resolve("flex", cpu)
    with pytest.raises(UserError, match="choose auto, sdpa, grouped or flex"):
        resolve("magic", cpu)


def test_flex_attention_falls_back_to_the_dense_grid_after_a_few_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Past its limit of variants dynamo runs the function as it is: that must be far off, and an error."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    attention._compiled_flex.cache_clear()
    try:
        flex, _ = attention._compiled_flex()
        assert torch._dynamo.config.recompile_limit >= 64
        monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", flex)
        case = [x.detach() for x in random_case()]
        plain, windowed = (
            build("flex", ANCHORS, KEEP, context_tokens=CONTEXT, block_tokens=BLOCK, window=window)
            for window in (None, 16)
        )
        with torch._dynamo.config.patch(recompile_limit=1):
            plain(*case)
            with pytest.raises(FailOnRecompileLimitHit):
                windowed(*case)
    finally:
        attention._compiled_flex.cache_clear()
