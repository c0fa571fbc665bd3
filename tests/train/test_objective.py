"""The loss against one worked out by hand and against autograd over whole logits; the counts; the gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.train.drafter_cases import collated, loud_drafter, random_sample, tables, tiny_config
from train.objective import block_loss


def test_the_loss_is_the_one_computed_by_hand() -> None:
    """Two blocks of three slots, two tokens in the vocabulary, logits (x, 0) for token 0 and 1."""
    x = torch.tensor([[[5.0, 1.0, 2.0], [5.0, 0.0, -3.0]]])
    hidden = torch.stack([x, torch.zeros_like(x)], dim=-1)
    labels = torch.tensor([[[0, 0, 1], [0, 1, 1]]])
    weights = torch.tensor([[[0.0, 1.0, 0.5], [0.0, 1.0, 0.0]]])
    sums = block_loss(hidden, torch.eye(2), labels, weights, chunk_rows=10)
    # -log softmax: label 0 at x=1, label 1 at x=2, label 1 at x=0
    by_hand = math.log(1 + math.exp(-1)) + 0.5 * math.log(1 + math.exp(2)) + math.log(2)
    assert sums.loss_sum.item() == pytest.approx(by_hand, rel=1e-6)
    assert sums.weight_sum.item() == 2.5
    assert sums.correct.tolist() == [1, 0]  # at x=0 the two are even and the first one, 0, is taken: wrong
    assert sums.count.tolist() == [2, 1]
    assert sums.blocks.item() == 2
    assert sums.prefix_sum.item() == 2 + 1


def test_the_prefix_ends_at_the_first_wrong_slot_or_missing_label() -> None:
    right, wrong = [9.0, 0.0], [0.0, 9.0]
    slots = [
        [wrong, right, right, right],  # all right: 4
        [wrong, right, wrong, right],  # 2
        [wrong, wrong, right, right],  # 1
        [wrong, right, right, right],  # its second slot has no label: 2
        [wrong, right, right, right],  # padding: not a block
    ]
    weights = torch.ones(1, 5, 4)
    weights[..., 0] = 0
    weights[0, 3, 2] = 0
    weights[0, 4] = 0
    sums = block_loss(
        torch.tensor([slots]), torch.eye(2), torch.zeros(1, 5, 4, dtype=torch.long), weights, chunk_rows=3
    )
    assert sums.prefix_sum.item() == 4 + 2 + 1 + 2
    assert sums.blocks.item() == 4
    assert sums.correct.tolist() == [3, 2, 4]
    assert sums.count.tolist() == [4, 3, 4]


def whole_logits_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy((hidden @ head.T).flatten(0, -2), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum()


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_chunks_change_neither_loss_nor_gradient(chunk_rows: int) -> None:
    _, head = tables()
    blocks = collated([random_sample(20, 0), random_sample(13, 1)], 6, config=tiny_config())
    hidden = torch.randn(*blocks.labels.shape, head.shape[1], generator=torch.Generator().manual_seed(1))
    ours, reference = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    sums = block_loss(ours, head, blocks.labels, blocks.weights, chunk_rows=chunk_rows)
    expected = whole_logits_loss(reference, head, blocks.labels, blocks.weights)
    (3 * sums.loss_sum).backward()
    (3 * expected).backward()
    torch.testing.assert_close(sums.loss_sum, expected, rtol=1e-6, atol=0)
    assert ours.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(ours.grad, reference.grad, atol=1e-5, rtol=1e-5)


def test_slot_0_and_padding_and_the_frozen_tables_get_no_gradient() -> None:
    config = tiny_config()
    drafter = loud_drafter(config)
    embedding, head = (table.requires_grad_() for table in tables())
    blocks = collated([random_sample(20, 0), random_sample(6, 1)], 6, config=config)
    hidden = drafter(
        embedding.detach()[blocks.block_ids], drafter.project(blocks.hidden_states), blocks.anchors, blocks.keep
    )
    hidden.retain_grad()
    block_loss(hidden, head, blocks.labels, blocks.weights, chunk_rows=8).loss_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad[blocks.weights > 0].abs().sum(-1).min() > 0
    assert not hidden.grad[blocks.weights == 0].any()
    assert head.grad is None
    assert embedding.grad is None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())


def test_the_whole_logits_are_never_in_memory() -> None:
    """No tensor that autograd keeps has vocabulary-wide rows."""
    kept: list[tuple[int, ...]] = []
    _, head = tables()
    hidden = torch.randn(1, 8, 4, head.shape[1], requires_grad=True)
    labels, weights = torch.zeros(1, 8, 4, dtype=torch.long), torch.ones(1, 8, 4)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block_loss(hidden, head, labels, weights, chunk_rows=4).loss_sum.backward()
    assert kept
    assert all(shape[-1:] != (len(head),) for shape in kept)


def test_the_cross_entropy_is_fp32_under_bf16_autocast() -> None:
    """Logits come out of the matmul in bf16; what follows must not: it would be off by percents."""
    _, head = tables()
    blocks = collated([random_sample(20, 0)], 6, config=tiny_config())
    hidden = torch.randn(*blocks.labels.shape, head.shape[1], generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        leaf = hidden.clone().requires_grad_()
        sums = block_loss(leaf, head, blocks.labels, blocks.weights, chunk_rows=5)
        sums.loss_sum.backward()
    rounded = (hidden.bfloat16() @ head.bfloat16().T).float()
    losses = F.cross_entropy(rounded.flatten(0, -2), blocks.labels.flatten(), reduction="none")
    assert sums.loss_sum.dtype == torch.float32
    assert sums.loss_sum.item() == pytest.approx((losses * blocks.weights.flatten()).sum().item(), rel=1e-5)
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
