"""The drafter itself: its tensors, its two paths (training and decoding), precision, memory options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.train.drafter_cases import (
    FULL,
    HIDDEN,
    SLIDING,
    TAPS,
    collated,
    loud_drafter,
    random_sample,
    tables,
    tiny_config,
)
from train.attention import Implementation
from train.blocks import Blocks
from train.drafter import Drafter, DrafterCache
from train.objective import block_loss

KINDS = [
    pytest.param({}, id="full"),
    pytest.param({"layer_types": [SLIDING] * 3, "sliding_window": 6}, id="sliding"),
    pytest.param({"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 5}, id="mixed"),
]


def run(drafter: Drafter, blocks: Blocks, attention: Implementation = "sdpa") -> Tensor:
    embedding, _ = tables()
    context = drafter.project(blocks.hidden_states)
    return drafter(embedding[blocks.block_ids], context, blocks.anchors, blocks.keep, attention=attention)


def test_tensor_names_and_shapes_are_those_of_the_published_checkpoints() -> None:
    config = tiny_config()
    layer = {
        "self_attn.q_proj.weight": (32, HIDDEN),
        "self_attn.k_proj.weight": (16, HIDDEN),
        "self_attn.v_proj.weight": (16, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (64, HIDDEN),
        "mlp.up_proj.weight": (64, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 64),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    expected = {f"layers.{i}.{name}": shape for i in range(3) for name, shape in layer.items()}
    expected |= {
        "fc.weight": (HIDDEN, TAPS * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    drafter = Drafter(config)
    assert {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()} == expected
    assert {name for name, _ in drafter.named_parameters()} == set(expected)
    assert not list(drafter.named_buffers())


def test_the_drafter_of_qwen3_8b_has_the_published_number_of_weights() -> None:
    config = tiny_config(
        hidden_size=4096, vocab_size=151936, num_target_layers=36, target_layer_ids=[1, 9, 17, 25, 33],
        num_hidden_layers=5, layer_types=[FULL] * 5, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128,
        intermediate_size=12288, block_size=16,
    )  # fmt: skip
    with torch.device("meta"):
        drafter = Drafter(config)
    assert len(drafter.state_dict()) == 58
    assert sum(p.numel() for p in drafter.parameters()) == pytest.approx(1048.6e6, rel=1e-4)


@pytest.mark.parametrize("changes", KINDS)
def test_decoding_step_by_step_gives_what_training_saw(changes: dict[str, object]) -> None:
    """Rounds that take 3, 1, 5 and 2 tokens, then many: the cache also grows past its first size."""
    config = tiny_config(**changes)
    drafter = loud_drafter(config).eval()
    embedding, _ = tables()
    sample = random_sample(40)
    starts = [4, 7, 8, 13, 15, 30, 38]
    blocks = collated([sample], 100, config=config)
    assert set(starts) <= set(blocks.anchors[0].tolist())
    trained = run(drafter, blocks)
    context = drafter.project(sample.hidden_states[None])
    cache = DrafterCache()
    for start in starts:
        ids = torch.tensor([[int(sample.input_ids[start])] + [config.mask_token_id] * 3])
        drafted = drafter.draft(embedding[ids], context[:, cache.tokens : start], cache, start)
        torch.testing.assert_close(
            drafted[0], trained[0, blocks.anchors[0].tolist().index(start)], atol=2e-5, rtol=1e-5
        )
        assert cache.tokens == start


def test_a_shorter_block_is_drafted_as_the_head_of_a_causal_one() -> None:
    """Near a length limit fewer tokens are drafted; where the layers are causal that changes nothing."""
    config = tiny_config(layer_types=[SLIDING] * 3, sliding_window=6)
    drafter = loud_drafter(config).eval()
    block, context = torch.randn(1, 4, HIDDEN), torch.randn(1, 9, HIDDEN)
    whole = drafter.draft(block, context, DrafterCache(), 9)
    torch.testing.assert_close(
        drafter.draft(block[:, :2], context, DrafterCache(), 9), whole[:, :2], atol=1e-5, rtol=0
    )


def test_a_gap_between_context_and_block_is_refused() -> None:
    drafter = loud_drafter(tiny_config())
    cache = DrafterCache()
    drafter.draft(torch.zeros(1, 4, HIDDEN), torch.zeros(1, 5, HIDDEN), cache, 5)
    for start in (7, 9):
        with pytest.raises(ValueError, match=f"5 cached and 3 new context tokens for a block at {start}"):
            drafter.draft(torch.zeros(1, 4, HIDDEN), torch.zeros(1, 3, HIDDEN), cache, start)
    assert cache.tokens == 5


@pytest.mark.parametrize("changes", KINDS)
def test_samples_of_a_batch_and_blocks_of_a_sample_do_not_mix(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    drafter = loud_drafter(config)
    samples = [random_sample(30, 0), random_sample(11, 1)]
    together = collated(samples, 8, config=config)
    for attention in ("sdpa", "grouped"):
        out = run(drafter, together, attention)  # type: ignore[arg-type]
        for b, sample in enumerate(samples):
            alone = collated([sample], 8, config=config)
            torch.testing.assert_close(out[b][together.keep[b]], run(drafter, alone)[0], atol=2e-5, rtol=1e-5)


def gradients(drafter: Drafter, blocks: Blocks, attention: Implementation) -> dict[str, Tensor]:
    _, head = tables()
    drafter.zero_grad()
    block_loss(
        run(drafter, blocks, attention), head, blocks.labels, blocks.weights, chunk_rows=16
    ).loss_sum.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", KINDS)
def test_grouped_attention_and_checkpointing_leave_every_gradient_as_it_was(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    blocks = collated([random_sample(40, 0), random_sample(21, 1)], 12, config=config)
    reference = gradients(loud_drafter(config), blocks, "sdpa")
    assert len(reference) == 36
    for options, attention in (({}, "grouped"), ({"gradient_checkpointing": True}, "grouped")):
        found = gradients(loud_drafter(config, **options), blocks, attention)  # type: ignore[arg-type]
        for name, gradient in reference.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(found[name], gradient, atol=1e-5 * max(1, scale), rtol=1e-4, msg=name)


def test_checkpointing_keeps_fewer_activations() -> None:
    config = tiny_config()
    blocks = collated([random_sample(40)], 30, config=config)

    def kept_bytes(**options: bool) -> int:
        sizes: list[int] = []

        def keep(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run(loud_drafter(config, **options), blocks)
        return sum(sizes)

    assert kept_bytes(gradient_checkpointing=True) < kept_bytes() / 3


@pytest.mark.parametrize("embedding_dtype", [torch.float32, torch.bfloat16])
def test_bf16_autocast_keeps_master_weights_and_gradients_in_fp32(embedding_dtype: torch.dtype) -> None:
    config = tiny_config(layer_types=[SLIDING, FULL, FULL], sliding_window=6)
    drafter = loud_drafter(config)
    blocks = collated([random_sample(40, dtype=torch.bfloat16)], 12, config=config)
    embedding, head = (table.to(embedding_dtype) for table in tables())
    for attention in ("sdpa", "grouped"):
        drafter.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            context = drafter.project(blocks.hidden_states)
            hidden = drafter(
                embedding[blocks.block_ids],
                context,
                blocks.anchors,
                blocks.keep,
                attention=attention,  # type: ignore[arg-type]
            )
            sums = block_loss(hidden, head, blocks.labels, blocks.weights, chunk_rows=16)
        sums.loss_sum.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())
        exact = run(drafter, blocks)
        error = (hidden.float() - exact).norm() / exact.norm()
        assert 1e-4 < error < 0.1, f"{attention}: {error}"


def test_states_stored_as_bf16_are_taken_by_an_fp32_drafter() -> None:
    drafter = loud_drafter(tiny_config())
    states = random_sample(10, dtype=torch.bfloat16).hidden_states[None]
    assert torch.equal(drafter.project(states), drafter.project(states.float()))


def test_fresh_weights_are_a_function_of_the_seed() -> None:
    config = tiny_config()
    torch.manual_seed(1)
    first = Drafter(config).initialize(7).state_dict()
    torch.manual_seed(2)
    again, other = Drafter(config).initialize(7).state_dict(), Drafter(config).initialize(8).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].dim() == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({first[name].flatten()[0].item() for name in matrices}) == len(matrices)
    assert first["fc.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert all((first[name] == 1).all() for name in first if name not in matrices)


def test_saved_and_loaded_weights_draft_the_same(tmp_path: Path) -> None:
    config = tiny_config()
    blocks = collated([random_sample(20)], 5, config=config)
    drafter = loud_drafter(config)
    save_file(drafter.state_dict(), tmp_path / "model.safetensors")
    loaded = Drafter(config)
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(run(loaded, blocks), run(drafter, blocks))
