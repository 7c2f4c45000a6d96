# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, in chunks; and what a segment does to the state, as an affine map.

A head keeps a state `S` `[key, value]`. A token with key `k` (of length 1), value `v`, decay `a`
and strength `b` makes of it

    S  <-  a (I - b k k^T) S + b k v^T

and reads `S^T q`. Whatever the tokens of a segment are, they make `A S + B` of the state: `A`
`[key, key]` and `B` `[key, value]` are of the segment alone, wherever it stands.

Yang, Kautz, Hatamizadeh: "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2025). Chunks:
Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

CHUNK = 32


@dataclass(frozen=True)
class Tokens:
    """What the tokens of some rows do to the states of their heads.

    Attributes:
        keys: `[rows, heads, length, key]`, each of length 1.
        values: `[rows, heads, length, value]`.
        decay: `[rows, heads, length]`, logarithms: 0 keeps all of the state.
        strength: `[rows, heads, length]`, from 0 (nothing is written) to 1.
    """

    keys: Tensor
    values: Tensor
    decay: Tensor
    strength: Tensor


@dataclass(frozen=True)
class Map:
    """What a segment makes of a state: `kept @ state + added`.

    Attributes:
        kept: `A`, `[rows, heads, key, key]`; or `[rows, heads, 1, 1]`, a number of each head.
        added: `B`, `[rows, heads, key, value]`: the state that the segment leaves behind nothing.
    """

    kept: Tensor
    added: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        """The state behind the segment, of one in front of it: `[rows, heads, key, value]`."""
        return _times(self.kept, state) + self.added

    def then(self, later: Map) -> Map:
        """The map of this segment and a later one, as one."""
        return Map(_times(later.kept, self.kept), later(self.added))


@dataclass(frozen=True)
class Carried:
    """What a layer hands on from token to token.

    Attributes:
        state: `[rows, heads, key, value]`.
        tail: the last inputs of the convolution, `[rows, kernel - 1, channels]`.
    """

    state: Tensor
    tail: Tensor


def scan(
    tokens: Tokens, state: Tensor, queries: Tensor | None = None, chunk: int = CHUNK
) -> tuple[Tensor | None, Tensor]:
    """Read tokens one after the other.

    Args:
        tokens: what is read.
        state: in front of them, `[rows, heads, key, value]`.
        queries: `[rows, heads, length, key]`; None: only the state is wanted.
        chunk: tokens that are worked on at once.

    Returns:
        What the queries read, `[rows, heads, length, value]`, and the state behind the tokens.
    """
    length = tokens.keys.shape[2]
    keys, values = cut(tokens.keys, chunk), cut(tokens.values, chunk)
    strength = cut(tokens.strength[..., None], chunk)
    decay = cut(tokens.decay[..., None], chunk).squeeze(-1).cumsum(-1)
    # Of all that token i finds, what token j wrote has been through the decays of j + 1 to i.
    between = (decay[..., :, None] - decay[..., None, :]).tril().exp().tril()
    system = (strength * keys) @ keys.transpose(-1, -2) * between
    since = decay.exp()[..., None]
    # What each token writes is less what is known of its key by then: a triangular system.
    solved = torch.linalg.solve_triangular(
        system, strength * torch.cat((values, keys * since), -1), upper=False, unitriangular=True
    )
    writes, seen = solved.split((values.shape[-1], keys.shape[-1]), -1)
    last = decay[..., -1:]
    outgoing = (keys * (last - decay).exp()[..., None]).transpose(-1, -2)
    left = last.exp()[..., None]
    if queries is not None:
        queries = cut(queries, chunk)
        inside = queries @ keys.transpose(-1, -2) * between
        queries = queries * since
    read = []
    for index in range(keys.shape[2]):
        written = writes[:, :, index] - seen[:, :, index] @ state
        if queries is not None:
            read.append(queries[:, :, index] @ state + inside[:, :, index] @ written)
        state = left[:, :, index] * state + outgoing[:, :, index] @ written
    return (torch.cat(read, 2)[:, :, :length] if read else None), state


def affine(tokens: Tokens, chunk: int = CHUNK) -> Map:
    """The map of these tokens: one scan behind the identity, writing nothing, and behind 0."""
    rows, heads, _, size = tokens.keys.shape
    nothing = tokens.keys.new_zeros(tokens.keys.shape)
    values = torch.cat((nothing, tokens.values), -1)
    identity = torch.eye(size, dtype=nothing.dtype).expand(rows, heads, size, size)
    empty = nothing.new_zeros(rows, heads, size, tokens.values.shape[-1])
    both = Tokens(tokens.keys, values, tokens.decay, tokens.strength)
    _, state = scan(both, torch.cat((identity, empty), -1), chunk=chunk)
    return Map(state[..., :size], state[..., size:])


def _times(kept: Tensor, state: Tensor) -> Tensor:
    return kept * state if kept.shape[-1] == 1 else kept @ state


def cut(x: Tensor, chunk: int) -> Tensor:
    """`[rows, heads, length, size]` to `[rows, heads, chunks, chunk, size]`, filled up with 0: with
    tokens that decay nothing and write nothing."""
    x = F.pad(x, (0, 0, 0, -x.shape[2] % chunk))
    return x.unflatten(2, (-1, chunk))
