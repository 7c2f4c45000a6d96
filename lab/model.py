# SPDX-License-Identifier: Apache-2.0
"""Qwen3 in plain torch, with the parameter names of its checkpoints: small enough to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, named as in a Qwen3 configuration."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 1e6
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-6


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., size]` to the same."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        # Sharper than usual from the start: heads this narrow find their positions sooner.
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps, start=1.5)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps, start=1.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[rows, length, hidden]` to the same; `cos`, `sin`: `[length, head_dim / 2]`."""
        heads = (*x.shape[:2], -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        result: Tensor = self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return result


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of `[rows, heads, length, head_dim]`; keys and values have fewer heads.

    Short rows on CPU are written out: for heads as narrow as these, products of whole matrices are
    several times faster than torch's blockwise kernel.
    """
    groups = q.shape[1] // k.shape[1]
    if q.device.type != "cpu" or q.shape[2] > 256:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows, heads, length, size = q.shape
    folded = q.reshape(rows * heads // groups, groups * length, size)
    scores = folded @ k.flatten(0, 1).transpose(1, 2)
    scores = scores.view(-1, groups, length, length) * size**-0.5
    position = torch.arange(length, device=q.device)
    scores = scores.masked_fill(position[None, :] > position[:, None], float("-inf"))
    weights = scores.float().softmax(-1).to(v.dtype).view(-1, groups * length, length)
    return (weights @ v.flatten(0, 1)).view(rows, heads, length, size)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + half) of `[..., length, head_dim]`."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[rows, length, hidden]` to the same."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """The model up to its last norm; `head` gives logits (the embedding is tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                continue
            std = 0.1 if "embed" in name else parameter.shape[1] ** -0.5 * 0.7
            if "o_proj" in name or "down_proj" in name:
                std *= (2 * shape.num_hidden_layers) ** -0.5
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[rows, length]` token ids to normed hidden states `[rows, length, hidden]`."""
        half = self.shape.head_dim // 2
        frequency = self.shape.rope_theta ** -(torch.arange(half, device=tokens.device) / half)
        angle = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
            cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, cos, sin)
        result: Tensor = self.norm(x)
        return result

    def head(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to logits `[..., vocabulary]`."""
        return F.linear(hidden, self.embed_tokens.weight)
