# SPDX-License-Identifier: Apache-2.0
"""A hybrid in plain torch: layers of the gated delta rule, every fourth one of full attention.

The layers are those of Qwen3-Next and Qwen3.5 (dense), small enough to read: a short convolution in
front of the delta rule, keys and queries of length 1, a gate behind; attention has a gate, too, and
rotary positions in a quarter of a head. `tests/bench/test_hybrids.py` compares it with the one of
transformers. Or Mamba-2 is in the place of the delta rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lab.delta import Carried, Map, Tokens, affine, scan
from lab.model import Mlp, Norm, attend, rotate
from lab.state_space import StateSpace


@dataclass(frozen=True)
class HybridShape:
    """Sizes of the model, named as in a Qwen3.5 configuration."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e6
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    fades: bool = False
    """Whether Mamba-2 stands in the place of the delta rule (`state_space.py`)."""

    @property
    def rotary(self) -> int:
        """Channels of a head that are turned by the position."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def convolved(self) -> int:
        """Channels that go through a short convolution: queries, keys and values."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + self.linear_num_value_heads * self.linear_value_head_dim

    def attends(self, layer: int) -> bool:
        """Whether a layer is one of full attention."""
        return (layer + 1) % self.full_attention_interval == 0


@dataclass(frozen=True)
class Cached:
    """KV of a layer of full attention.

    Attributes:
        keys: `[rows, heads, length, head_dim]`, turned by their positions.
        values: of the same shape.
    """

    keys: Tensor
    values: Tensor


class Linear(nn.Module):
    """The gated delta rule behind a short convolution."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.linear_num_value_heads
        values = heads * shape.linear_value_head_dim
        self.in_proj_qkv = nn.Linear(shape.hidden_size, shape.convolved, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden_size, heads, bias=False)
        channels, kernel = shape.convolved, shape.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
        # Of the published model: half lives from a token to thousands, spread over the heads.
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log())
        time = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(time + torch.log(-torch.expm1(-time)))
        self.norm = Norm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(values, shape.hidden_size, bias=False)

    def empty(self, rows: int) -> Carried:
        """What stands in front of a text."""
        shape, like = self.shape, self.A_log
        sizes = (shape.linear_num_value_heads, shape.linear_key_head_dim)
        state = like.new_zeros(rows, *sizes, shape.linear_value_head_dim)
        kernel = shape.linear_conv_kernel_dim
        return Carried(state, like.new_zeros(rows, kernel - 1, shape.convolved))

    def forward(
        self, x: Tensor, carried: Carried, mapped: bool = False
    ) -> tuple[Tensor, Carried, Map | None]:
        """Read `[rows, length, hidden]` behind what is carried.

        Args:
            x: normed hidden states.
            carried: of what stands in front.
            mapped: whether the map of these tokens is wanted, too.

        Returns:
            The layer's output, what it hands on, and the map.
        """
        mixed = torch.cat((carried.tail.to(x.dtype), self.in_proj_qkv(x)), 1)
        length = x.shape[1]
        weight = self.conv1d.weight[:, 0].to(mixed.dtype)
        taps = (mixed[:, tap : tap + length] * weight[:, tap] for tap in range(weight.shape[1]))
        queries, tokens = self._tokens(F.silu(sum(taps)), x)
        read, state = scan(tokens, carried.state, queries)
        assert read is not None
        gate = F.silu(self.in_proj_z(x).unflatten(-1, (read.shape[1], -1)))
        gated = self.norm(read.transpose(1, 2)).to(x.dtype) * gate
        tail = mixed[:, length:]
        found = affine(tokens) if mapped else None
        return self.out_proj(gated.flatten(2)), Carried(state, tail), found

    def _tokens(self, mixed: Tensor, x: Tensor) -> tuple[Tensor, Tokens]:
        shape = self.shape
        keys = shape.linear_num_key_heads * shape.linear_key_head_dim
        parts = mixed.float().split((keys, keys, mixed.shape[-1] - 2 * keys), -1)
        q, k, v = (
            part.unflatten(-1, (-1, size)).transpose(1, 2)
            for part, size in zip(
                parts,
                (shape.linear_key_head_dim,) * 2 + (shape.linear_value_head_dim,),
                strict=True,
            )
        )
        groups = v.shape[1] // k.shape[1]
        q, k = (_unit(one).repeat_interleave(groups, 1) for one in (q, k))
        rate = F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        decay = (-self.A_log.exp() * rate).transpose(1, 2)
        strength = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        return q * shape.linear_key_head_dim**-0.5, Tokens(k, v, decay, strength)


class Attention(nn.Module):
    """Grouped-query attention with a gate behind."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        # As in `lab.model`: sharper than usual from the start.
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps, start=1.5)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps, start=1.5)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], before: Cached | None = None
    ) -> tuple[Tensor, Cached, Tensor]:
        """Read `[rows, length, hidden]` behind cached tokens.

        Args:
            x: normed hidden states.
            turn: cosines and sines of their positions, `[length, rotary / 2]`.
            before: KV of what stands in front; None: nothing does.

        Returns:
            The layer's output, KV of all that it saw, and the turned queries.
        """
        size = self.shape.head_dim
        heads = (*x.shape[:2], -1, size)
        q, gate = self.q_proj(x).view(*x.shape[:2], -1, 2 * size).chunk(2, -1)
        q = self._turned(self.q_norm(q).transpose(1, 2), turn)
        k = self._turned(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), turn)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if before is None:
            seen = attend(q, k, v)
        else:
            k, v = torch.cat((before.keys, k), 2), torch.cat((before.values, v), 2)
            seen = _attend_behind(q, k, v)
        gated = seen.transpose(1, 2) * gate.sigmoid()
        return self.o_proj(gated.flatten(2)), Cached(k, v), q

    def _turned(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        turned, rest = x.split((self.shape.rotary, x.shape[-1] - self.shape.rotary), -1)
        return torch.cat((rotate(turned, *turn), rest), -1)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: HybridShape, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        if attends:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = StateSpace(shape) if shape.fades else Linear(shape)
        self.mlp = Mlp(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        """`[rows, length, hidden]` to the same, with nothing in front."""
        normed = self.input_layernorm(x)
        if self.attends:
            mixed, _, _ = self.self_attn(normed, turn)
        else:
            mixed, _, _ = self.linear_attn(normed, self.linear_attn.empty(x.shape[0]))
        return self.behind(x, mixed)

    def behind(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows what mixes tokens."""
        x = x + mixed
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Hybrid(nn.Module):
    """The model up to its last norm; `head` gives logits (the embedding is tied)."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, shape.attends(layer)) for layer in range(shape.num_hidden_layers)
        )
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.dim() != 2:
                continue
            std = 0.1 if "embed" in name else parameter.shape[1] ** -0.5 * 0.7
            if "o_proj" in name or "out_proj" in name or "down_proj" in name:
                std *= (2 * shape.num_hidden_layers) ** -0.5
            nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[rows, length]` token ids to normed hidden states `[rows, length, hidden]`."""
        cos, sin = self.turn(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
            cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
        for layer in self.layers:
            x = layer(x, (cos, sin))
        result: Tensor = self.norm(x)
        return result

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, `[length, rotary / 2]`."""
        half = self.shape.rotary // 2
        frequency = self.shape.rope_theta ** -(torch.arange(half, device=positions.device) / half)
        angle = positions[:, None] * frequency
        return angle.cos(), angle.sin()

    def head(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to logits `[..., vocabulary]`."""
        return F.linear(hidden, self.embed_tokens.weight)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _attend_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last tokens to all that stand in front of them, and themselves."""
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    sees = torch.ones(length, k.shape[2], dtype=torch.bool).tril(k.shape[2] - length)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
