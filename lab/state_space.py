# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in the place of the gated delta rule: a hybrid's layer whose heads fade by a number.

A head keeps a state `S` `[key, value]`. A token with key `k`, value `v`, decay `a` and strength `b`
makes `a S + b k v^T` of it, and reads `S^T q`; in Mamba-2's own words `B`, `x`, `exp(A dt)`, `dt`
and `C`. The product of a segment's map is a number of each head. `python -m lab DIR --kind mamba2`.

Dao, Gu: "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured
State Space Duality" (2024).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lab.delta import CHUNK, Carried, Map, Tokens, cut
from lab.model import Norm

if TYPE_CHECKING:
    from lab.hybrid import HybridShape


def scan(
    tokens: Tokens, state: Tensor, queries: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Read tokens one after the other; arguments and what comes back are those of `lab.delta`."""
    length = tokens.keys.shape[2]
    keys, queries = cut(tokens.keys, chunk), cut(queries, chunk)
    written = cut(tokens.values * tokens.strength[..., None], chunk)
    decay = cut(tokens.decay[..., None], chunk).squeeze(-1).cumsum(-1)
    # Of all that token i finds, what token j wrote has been through the decays of j + 1 to i.
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    inside = (queries @ keys.transpose(-1, -2) * between) @ written
    last = decay[..., -1:]
    added = (keys * (last - decay).exp()[..., None]).transpose(-1, -2) @ written
    since, left = decay.exp()[..., None], last.exp()[..., None]
    read = []
    for index in range(keys.shape[2]):
        read.append(since[:, :, index] * (queries[:, :, index] @ state) + inside[:, :, index])
        state = left[:, :, index] * state + added[:, :, index]
    return torch.cat(read, 2)[:, :, :length], state


def affine(tokens: Tokens) -> Map:
    """The map of these tokens: by what a state fades, and what they leave behind nothing."""
    rows, heads, _, size = tokens.keys.shape
    empty = tokens.values.new_zeros(rows, heads, size, tokens.values.shape[-1])
    _, added = scan(tokens, empty, tokens.keys)
    return Map(tokens.decay.sum(-1)[..., None, None].exp(), added)


class StateSpace(nn.Module):
    """Mamba-2 behind a short convolution, with one group of keys and queries for all heads."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.linear_num_value_heads
        self.values = heads * shape.linear_value_head_dim
        channels = self.values + 2 * shape.linear_key_head_dim
        self.in_proj = nn.Linear(shape.hidden_size, self.values + channels + heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.linear_conv_kernel_dim, groups=channels)
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        time = torch.exp(torch.empty(heads).uniform_(-6.9, -2.3))
        self.dt_bias = nn.Parameter(time + torch.log(-torch.expm1(-time)))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = Norm(self.values, shape.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, shape.hidden_size, bias=False)

    def empty(self, rows: int) -> Carried:
        """What stands in front of a text."""
        shape, zeros = self.shape, self.A_log.new_zeros
        sizes = shape.linear_num_value_heads, shape.linear_key_head_dim, shape.linear_value_head_dim
        tail = zeros(rows, shape.linear_conv_kernel_dim - 1, self.conv1d.in_channels)
        return Carried(zeros(rows, *sizes), tail)

    def forward(
        self, x: Tensor, carried: Carried, mapped: bool = False
    ) -> tuple[Tensor, Carried, Map | None]:
        """Read `[rows, length, hidden]` behind what is carried; see `lab.hybrid.Linear`."""
        heads, size = self.D.shape[0], self.shape.linear_key_head_dim
        parts = self.values, self.conv1d.in_channels, heads
        gate, inputs, rate = self.in_proj(x).split(parts, -1)
        mixed = torch.cat((carried.tail.to(x.dtype), inputs), 1)
        convolved = F.silu(self.conv1d(mixed.transpose(1, 2)).transpose(1, 2)).float()
        v, k, q = convolved.split((self.values, size, size), -1)
        v = v.unflatten(-1, (heads, -1)).transpose(1, 2)
        k, q = (one[:, None].expand(-1, heads, -1, -1) for one in (k, q))
        strength = F.softplus(rate.float() + self.dt_bias).transpose(1, 2)
        tokens = Tokens(k, v, -self.A_log.exp()[:, None] * strength, strength)
        read, state = scan(tokens, carried.state, q)
        found = affine(tokens) if mapped else None
        read = (read + self.D[:, None, None] * v).transpose(1, 2).flatten(2)
        gated = self.norm(read * F.silu(gate.float())).to(x.dtype)
        return self.out_proj(gated), Carried(state, mixed[:, x.shape[1] :]), found
