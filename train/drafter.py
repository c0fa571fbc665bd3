"""The DFlash drafter: a few Qwen3-style layers that turn an anchor token and mask tokens into draft tokens.

The block reads the target's tapped hidden states (the context) through keys and values only: context tokens
have no query, no residual stream and no MLP. Embedding and lm_head are the target's and lie outside. Tensor
names and arithmetic are those of the published checkpoints (z-lab), so that a trained drafter serves in vLLM
and SGLang. Who sees whom is in `train.attention`, anchors and labels in `train.blocks`, the config.json in
`train.drafter_config`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from train.attention import Attend, Implementation, build
from train.drafter_config import INITIAL_STD, DrafterConfig

__all__ = ["Drafter", "DrafterCache", "DrafterConfig"]

KeysValues = tuple[Tensor, Tensor]  # each [B, kv_heads, T, d]


class RMSNorm(nn.Module):
    """x / rms(x) · weight, in x's dtype; the statistics are fp32 in every dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return normed.to(x.dtype)  # autocast may widen


@dataclass(frozen=True)
class Rotation:
    """cos and sin of rotary angles, [..., T, d] fp32; a pair is one number from each half of the head."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(positions: Tensor, head_dim: int, theta: float) -> Rotation:
        """For positions [..., T] int64. Every number of a head is rotated."""
        exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        angles = positions[..., None].float() * (1.0 / theta**exponent)
        angles = torch.cat([angles, angles], dim=-1)
        return Rotation(angles.cos(), angles.sin())

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, heads, T, d], rotated in fp32 and returned in x's dtype."""
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x.float() * self.cos + turned * self.sin).to(x.dtype)


class Attention(nn.Module):
    """Block tokens attend to the context and to their block; queries and keys are normalised head by head."""

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

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeysValues:
        """Keys (normalised, rotated) and values of x [B, T, H]; one projection serves context and block."""
        return rotation(self.k_norm(self.heads(self.k_proj(x)))), self.heads(self.v_proj(x))

    def forward(self, x: Tensor, context: KeysValues, rotation: Rotation, attend: Attend) -> Tensor:
        """x [B, N·L, H]: block tokens, normalised; context: keys and values of S tokens."""
        query = rotation(self.q_norm(self.heads(self.q_proj(x))))
        out = attend(query, *context, *self.keys_values(x, rotation))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), [..., H] → [..., H]."""

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

    def forward(self, x: Tensor, context: KeysValues, rotation: Rotation, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotation, attend)
        return x + self.mlp(self.post_attention_layernorm(x))

    def over(self, x: Tensor, context: Tensor, rotations: tuple[Rotation, Rotation], attend: Attend) -> Tensor:
        """The same over context states [B, S, H]; rotations: of the context, of the block."""
        return self(x, self.self_attn.keys_values(context, rotations[0]), rotations[1], attend)


@dataclass
class DrafterCache:
    """Keys and values of the first `tokens` context tokens of one sequence, for every layer.

    The stored tensors [1, kv_heads, size, d] double in size when they are full, so that appending stays cheap.
    """

    tokens: int = 0
    layers: dict[int, KeysValues] = field(default_factory=dict)

    def append(self, layer: int, new: KeysValues) -> KeysValues:
        """Add what follows a layer's first `tokens`, return all of it. The caller moves `tokens`, last."""
        total = self.tokens + new[0].shape[2]
        stored = self.layers.get(layer)
        if stored is None or stored[0].shape[2] < total:
            grown = cast(KeysValues, tuple(x.new_empty(*x.shape[:2], 2 * total, x.shape[3]) for x in new))
            for old, larger in zip(stored or (), grown, strict=False):
                larger[:, :, : self.tokens] = old[:, :, : self.tokens]
            stored = self.layers[layer] = grown
        for x, kept in zip(new, stored, strict=True):
            kept[:, :, self.tokens : total] = x
        return stored[0][:, :, :total], stored[1][:, :, :total]


class Drafter(nn.Module):
    """The drafter. Its state_dict is the published checkpoint: 11 tensors a layer, fc, hidden_norm and norm.

    gradient_checkpointing: recompute the activations of each layer in backward instead of keeping them.
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
        """Fresh weights: matrices normal with the published std, norms 1. Returns self.

        A function of the seed and each tensor's name: equal on every device and for every number of processes.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
                continue
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * INITIAL_STD)
        return self

    def project(self, hidden_states: Tensor) -> Tensor:
        """Tapped states [B, S, K, H] of any float dtype → context [B, S, H], which every layer reads."""
        return self.hidden_norm(self.fc(self._computable(hidden_states.flatten(2))))

    def forward(
        self,
        block_embeddings: Tensor,
        context: Tensor,
        anchors: Tensor,
        keep: Tensor,
        *,
        attention: Implementation = "sdpa",
    ) -> Tensor:
        """All blocks of a micro-batch at once → [B, N, L, H] after the final norm, ready for lm_head.

        block_embeddings [B, N, L, H]: the target's embedding of the blocks' tokens; its dtype is that of the
        residual stream under autocast. context [B, S, H]: from `project`, positions 0 … S-1. anchors [B, N]
        int64 (the position of each block's first token, at most S), keep [B, N] bool. Rows of padded blocks are
        finite, no more.
        """
        B, N, L, _ = block_embeddings.shape
        S = context.shape[1]
        positions = anchors[..., None] + torch.arange(L, device=anchors.device)
        rotations = (
            self._rotation(torch.arange(S, device=context.device)),
            self._rotation(positions.flatten(1)[:, None]),  # one for all heads
        )
        attend = {
            window: build(attention, anchors, keep, context_tokens=S, block_tokens=L, window=window)
            for window in set(self.config.windows)
        }
        x = self._computable(block_embeddings.flatten(1, 2))
        for layer in self._layers():
            arguments = (x, context, rotations, attend[layer.window])
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer.over, *arguments, use_reentrant=False)
            else:
                x = layer.over(*arguments)
        return self.norm(x).view(B, N, L, -1)

    @torch.no_grad()
    def draft(self, block_embeddings: Tensor, new_context: Tensor, cache: DrafterCache, start: int) -> Tensor:
        """One block of one sequence, incrementally, as in decoding → [1, L, H] after the final norm.

        block_embeddings [1, L, H]: the block whose anchor is at position `start`; new_context [1, n, H]: from
        `project`, positions cache.tokens … start-1. The cache keeps the context's keys and values, not the
        block's. ValueError when the context does not end right before `start`.
        """
        if cache.tokens + new_context.shape[1] != start:
            raise ValueError(
                f"{cache.tokens} cached and {new_context.shape[1]} new context tokens for a block at {start}: "
                "the context must end right before the block"
            )
        device, L = block_embeddings.device, block_embeddings.shape[1]
        context_rotation = self._rotation(torch.arange(cache.tokens, start, device=device))
        block_rotation = self._rotation(torch.arange(start, start + L, device=device))
        anchors, keep = torch.tensor([[start]], device=device), torch.tensor([[True]], device=device)
        attend = {
            window: build("grouped", anchors, keep, context_tokens=start, block_tokens=L, window=window)
            for window in set(self.config.windows)
        }
        x = self._computable(block_embeddings)
        for index, layer in enumerate(self._layers()):
            keys_values = cache.append(index, layer.self_attn.keys_values(new_context, context_rotation))
            x = layer(x, keys_values, block_rotation, attend[layer.window])
        cache.tokens = start
        return self.norm(x)

    def _layers(self) -> Iterable[Layer]:
        return cast("Iterable[Layer]", self.layers)

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation.at(positions, self.config.head_dim, self.config.rope_theta)

    def _computable(self, x: Tensor) -> Tensor:
        """x in a dtype that the projections take: their own, unless autocast sees to it."""
        return x if torch.is_autocast_enabled(x.device.type) else x.to(self.fc.weight.dtype)
