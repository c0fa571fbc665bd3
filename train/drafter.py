"""The DFlash drafter: a few Qwen3-style layers that turn an anchor token and mask tokens into a block of draft tokens.

The block reads the target's tapped hidden states (the context) through keys and values only: context tokens have no
query, no residual stream and no MLP. Embedding and lm_head are the target's and live in `dflash_stream.head`. Tensor names
and arithmetic are those of the published checkpoints (z-lab), so that a trained drafter serves in vLLM and SGLang.
Who sees whom is in `train.attention`; anchors and labels are in `train.blocks`; the config.json is in `train.drafter_config`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train import attention as block_attention
from train.attention import Attend, Implementation
from train.drafter_config import DrafterConfig

__all__ = ["Drafter", "DrafterCache", "DrafterConfig"]

INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """x / rms(x) · weight: statistics and product in fp32, the result in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


@dataclass(frozen=True)
class Rotation:
    """cos and sin of rotary angles, [..., T, head_dim] fp32; the two halves of a head are the pairs ("half-split")."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(positions: Tensor, head_dim: int, theta: float) -> Rotation:
        """For positions [..., T] int64."""
        exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions[..., None].float() * (1.0 / theta**exponent)
        angles = torch.cat([angles, angles], dim=-1)
        return Rotation(angles.cos(), angles.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, heads, T, head_dim], rotated in fp32 and returned in x's dtype."""
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x.float() * self.cos + turned * self.sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, heads · d] → [B, heads, T, d]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys (normalised, rotated) and values of x [B, T, H]: the same projections serve context and block."""
        values = self.heads(self.v_proj(x))
        return rotation(self.k_norm(self.heads(self.k_proj(x)))).to(values.dtype), values

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rotation: Rotation, attend: Attend) -> Tensor:
        """x [B, N·L, H] normalised block tokens, context keys and values [B, kv_heads, S, d]."""
        keys, values = self.keys_values(x, rotation)
        query = rotation(self.q_norm(self.heads(self.q_proj(x)))).to(values.dtype)
        out = attend(query, *context, keys, values)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer over block tokens. The context does not pass through input_layernorm."""

    def __init__(self, config: DrafterConfig, window: int | None) -> None:
        super().__init__()
        self.window = window
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rotation: Rotation, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass
class DrafterCache:
    """Context keys and values of one sequence for every layer, [1, kv_heads, tokens, d]; grown in place by doubling."""

    tokens: int = 0
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new context tokens behind `self.tokens`; returns all of this layer's."""
        total = self.tokens + keys.shape[2]
        if layer == len(self.layers):
            self.layers.append((keys, values))
        elif total > self.layers[layer][0].shape[2]:
            self.layers[layer] = tuple(_grown(old, self.tokens, 2 * total) for old in self.layers[layer])  # type: ignore[assignment]
        stored_keys, stored_values = self.layers[layer]
        stored_keys[:, :, self.tokens : total] = keys
        stored_values[:, :, self.tokens : total] = values
        return stored_keys[:, :, :total], stored_values[:, :, :total]


def _grown(old: Tensor, used: int, size: int) -> Tensor:
    new = old.new_empty(*old.shape[:2], size, old.shape[3])
    new[:, :, :used] = old[:, :, :used]
    return new


class Drafter(nn.Module):
    """The drafter. Parameters: 11 tensors a layer, fc, hidden_norm and norm; nothing else is in its state_dict.

    gradient_checkpointing: recompute the activations of each layer in backward.
    """

    def __init__(self, config: DrafterConfig, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = gradient_checkpointing
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, window) for window in config.windows)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @torch.no_grad()
    def initialize(self, seed: int) -> Drafter:
        """Fresh weights: matrices normal with std 0.02, norms 1. A function of the seed and each tensor's name alone, so
        equal on every device and for every number of processes. Returns self."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * INITIAL_STD)
        return self

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation.at(positions, self.config.head_dim, self.config.rope_theta)

    def project(self, hidden_states: Tensor) -> Tensor:
        """Tapped states [B, S, K, H] → context [B, S, H], which every layer reads."""
        return self.hidden_norm(self.fc(hidden_states.flatten(2)))

    def forward(
        self,
        block_embeddings: Tensor,
        context: Tensor,
        anchors: Tensor,
        keep: Tensor,
        *,
        attention: Implementation = "sdpa",
    ) -> Tensor:
        """All blocks of a micro-batch at once.

        block_embeddings [B, N, L, H]: the target's embedding of the block's tokens; context [B, S, H] from `project`,
        positions 0 … S-1; anchors [B, N] int64, sorted; keep [B, N] bool → [B, N, L, H] after the final norm, ready for
        lm_head. Rows of padded blocks are finite and mean nothing.
        """
        B, N, L, H = block_embeddings.shape
        S = context.shape[1]
        context_rotation = self._rotation(torch.arange(S, device=context.device))
        positions = anchors[..., None] + torch.arange(L, device=anchors.device)
        block_rotation = self._rotation(positions.flatten(1)[:, None])  # one for all heads
        attend = {
            window: block_attention.build(
                attention, anchors, keep, context_tokens=S, block_tokens=L, window=window
            )
            for window in set(self.config.windows)
        }

        def through(layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
            def run(x: Tensor, context: Tensor) -> Tensor:
                keys_values = layer.self_attn.keys_values(context, context_rotation)
                return layer(x, keys_values, block_rotation, attend[layer.window])

            return run

        x = block_embeddings.reshape(B, N * L, H)
        for layer in self.layers:
            run = through(layer)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(run, x, context, use_reentrant=False)
            else:
                x = run(x, context)
        return self.norm(x).view(B, N, L, H)

    @torch.no_grad()
    def draft(self, block_embeddings: Tensor, new_context: Tensor, cache: DrafterCache, start: int) -> Tensor:
        """One block of one sequence, incrementally, as in live decoding.

        block_embeddings [1, L, H] of the block whose anchor is at position `start`; new_context [1, n, H] from `project`
        for positions cache.tokens … start-1, whose keys and values are kept in `cache` (those of the block are not)
        → [1, L, H] after the final norm. ValueError when the context does not end right before `start`.
        """
        if cache.tokens + new_context.shape[1] != start:
            raise ValueError(
                f"context of {cache.tokens} + {new_context.shape[1]} tokens for a block at position {start}: "
                "it must end right before the block"
            )
        device, L = block_embeddings.device, block_embeddings.shape[1]
        context_rotation = self._rotation(torch.arange(cache.tokens, start, device=device))
        block_rotation = self._rotation(torch.arange(start, start + L, device=device))
        anchors = torch.tensor([[start]], device=device)
        attend = {
            window: block_attention.build(
                "grouped",
                anchors,
                torch.ones_like(anchors, dtype=torch.bool),
                context_tokens=start,
                block_tokens=L,
                window=window,
            )
            for window in set(self.config.windows)
        }
        x = block_embeddings
        for index, layer in enumerate(self.layers):
            new = layer.self_attn.keys_values(new_context, context_rotation)
            x = layer(x, cache.append(index, *new), block_rotation, attend[layer.window])
        cache.tokens = start
        return self.norm(x)
