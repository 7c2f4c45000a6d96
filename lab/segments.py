# SPDX-License-Identifier: Apache-2.0
"""A hybrid that reads a prompt in segments; a segment read elsewhere may be put in place of one.

Of a segment that was read somewhere, layers of attention leave KV, and layers of the delta rule a
map of their state and the tail of their convolution:

    prompt A:  | head | siblings | document |     ->  KV, maps, tail
    prompt B:  | head | document | ...            <-  KV turned to its place, state = A S + B, tail

Turning and composing are exact; what was read behind other text is not what it would be here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.delta import Carried, Map
from lab.hybrid import Attention, Cached, Hybrid
from lab.model import rotate


@dataclass(frozen=True)
class Memory:
    """What stands in front of the next token; nothing changes it, so a prompt may branch.

    Attributes:
        layers: what each layer hands on, in order.
        length: tokens read or put so far.
    """

    layers: tuple[Carried | Cached, ...]
    length: int

    @property
    def num_rows(self) -> int:
        """Prompts that are read side by side."""
        first = self.layers[0]
        return (first.keys if isinstance(first, Cached) else first.tail).shape[0]

    @classmethod
    def of_rows(cls, parts: Sequence[Memory]) -> Memory:
        """Rows of memories of one length, one behind the other."""
        layers = (
            type(same[0])(*(torch.cat([vars(one)[name] for one in same]) for name in vars(same[0])))
            for same in zip(*(part.layers for part in parts), strict=True)
        )
        return cls(tuple(layers), parts[0].length)

    def rows(self, index: Tensor) -> Memory:
        """These rows, in this order; a row may be there more than once."""
        layers: list[Carried | Cached] = []
        for layer in self.layers:
            if isinstance(layer, Cached):
                layers.append(Cached(layer.keys[index], layer.values[index]))
            else:
                layers.append(Carried(layer.state[index], layer.tail[index]))
        return replace(self, layers=tuple(layers))

    def with_states_of(self, other: Memory) -> Memory:
        """This KV, and the states of another."""
        layers = (
            mine if isinstance(mine, Cached) else theirs
            for mine, theirs in zip(self.layers, other.layers, strict=True)
        )
        return replace(self, layers=tuple(layers))


@dataclass(frozen=True)
class Passed:
    """What a segment leaves in a layer of the delta rule: the map of its state, and its tail."""

    map: Map
    tail: Tensor


@dataclass(frozen=True)
class Segment:
    """What is kept of tokens that were read, to be put elsewhere; of one row.

    Attributes:
        layers: of each layer, in order; keys are turned by the positions where they were read.
        first: the position of the first of them.
        length: their number.
    """

    layers: tuple[Passed | Cached, ...]
    first: int
    length: int

    def as_dtype(self, dtype: torch.dtype) -> Segment:
        """Maps and tails rounded as if they were kept in `dtype`; KV as it is."""
        layers: list[Passed | Cached] = []
        for layer in self.layers:
            if isinstance(layer, Passed):
                kept, added, tail = (
                    one.to(dtype).to(one.dtype)
                    for one in (layer.map.kept, layer.map.added, layer.tail)
                )
                layers.append(Passed(Map(kept, added), tail))
            else:
                layers.append(layer)
        return replace(self, layers=tuple(layers))

    def numbers(self) -> tuple[int, int]:
        """How many numbers are kept: of maps and tails, and of KV."""
        maps = kv = 0
        for layer in self.layers:
            if isinstance(layer, Passed):
                maps += layer.map.kept.numel() + layer.map.added.numel() + layer.tail.numel()
            else:
                kv += layer.keys.numel() + layer.values.numel()
        return maps, kv


@dataclass(frozen=True)
class Read:
    """What came of reading tokens.

    Attributes:
        hidden: normed hidden states, `[rows, length, hidden]`.
        memory: behind them.
        segment: what may be put elsewhere, if it was wanted.
        paid: `[rows, memory.length]`: attention that the tokens paid, summed over them, heads and
            layers, if it was wanted.
    """

    hidden: Tensor
    memory: Memory
    segment: Segment | None
    paid: Tensor | None


class Reader:
    """Reads with a model, without gradients."""

    def __init__(self, model: Hybrid) -> None:
        self.model = model.eval().requires_grad_(requires_grad=False)

    def nothing(self) -> Memory:
        """In front of a prompt of one row."""
        shape = self.model.shape
        none = torch.zeros(1, shape.num_key_value_heads, 0, shape.head_dim)
        layers = (
            Cached(none, none) if layer.attends else layer.linear_attn.empty(1)
            for layer in self.model.layers
        )
        return Memory(tuple(layers), 0)

    def read(
        self, tokens: Sequence[int] | Tensor, memory: Memory, kept: bool = False, pays: bool = False
    ) -> Read:
        """Read tokens behind what is in memory.

        Args:
            tokens: ids of one row, or `[rows, length]`.
            memory: of as many rows.
            kept: whether a segment is wanted.
            pays: whether the attention paid is wanted.
        """
        tokens = torch.as_tensor(tokens, dtype=torch.int64)
        tokens = tokens if tokens.dim() == 2 else tokens[None]
        first, length = memory.length, tokens.shape[1]
        turn = self.model.turn(torch.arange(first, first + length))
        x = self.model.embed_tokens(tokens)
        after: list[Carried | Cached] = []
        left: list[Passed | Cached] = []
        paid = torch.zeros(tokens.shape[0], first + length) if pays else None
        for layer, before in zip(self.model.layers, memory.layers, strict=True):
            normed = layer.input_layernorm(x)
            if isinstance(before, Cached):
                mixed, cached, queries = layer.self_attn(normed, turn, before)
                left.append(Cached(cached.keys[:, :, first:], cached.values[:, :, first:]))
                after.append(cached)
                if paid is not None:
                    paid += _paid(layer.self_attn, queries, cached.keys)
            else:
                mixed, carried, found = layer.linear_attn(normed, before, kept)
                after.append(carried)
                if found is not None:
                    left.append(Passed(found, carried.tail))
            x = layer.behind(x, mixed)
        segment = Segment(tuple(left), first, length) if kept else None
        return Read(self.model.norm(x), Memory(tuple(after), first + length), segment, paid)

    def put(self, segment: Segment, memory: Memory, passes: bool = True) -> Memory:
        """Put a segment behind what is in memory, as if it had been read.

        Args:
            segment: read anywhere.
            memory: of any number of rows.
            passes: whether states pass through it; else they stay as they were.
        """
        turn = self.model.turn(torch.tensor([memory.length - segment.first]))
        layers: list[Carried | Cached] = []
        for there, before in zip(segment.layers, memory.layers, strict=True):
            if isinstance(there, Cached) and isinstance(before, Cached):
                keys = self._turned(there.keys, turn)
                layers.append(
                    Cached(_behind(before.keys, keys), _behind(before.values, there.values))
                )
            elif isinstance(there, Passed) and isinstance(before, Carried):
                tail = _behind(before.tail, there.tail, 1)[:, -there.tail.shape[1] :]
                layers.append(Carried(there.map(before.state), tail) if passes else before)
            else:
                raise TypeError("the segment was read by a model with other layers than this one")
        return Memory(tuple(layers), memory.length + segment.length)

    def _turned(self, keys: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        rotary = self.model.shape.rotary
        return torch.cat((rotate(keys[..., :rotary], *turn), keys[..., rotary:]), -1)


def _behind(one: Tensor, other: Tensor, dim: int = 2) -> Tensor:
    """A segment's tensor, of one row, behind those of several."""
    return torch.cat((one, other.expand(one.shape[0], *other.shape[1:])), dim)


def _paid(attention: Attention, queries: Tensor, keys: Tensor) -> Tensor:
    """`[rows, keys]`: attention of the last tokens, summed over them and over heads."""
    groups, length = queries.shape[1] // keys.shape[1], queries.shape[2]
    keys = keys.repeat_interleave(groups, 1)
    scores = queries @ keys.transpose(-1, -2) * attention.shape.head_dim**-0.5
    sees = torch.ones(length, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - length)
    return scores.masked_fill(~sees, float("-inf")).softmax(-1).sum((1, 2))
