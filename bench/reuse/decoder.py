# SPDX-License-Identifier: Apache-2.0
"""A decoder that computes any tokens of a sequence against KV that is there for the others.

Transformers' own layers run; only attention is ours, which writes keys and values to their
positions in a `KV` and attends to all of it that is in front. So whatever Transformers knows can be
asked, and full prefill is the same code with all tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

NAME = "bench-reuse"
"""Of our attention, among those of Transformers."""


class KV:
    """Keys and values of a sequence, at every layer.

    Args:
        keys: `[layers, KV heads, room, channels]`, rotated to their positions; a list of layers'
            will do where it is only computed with, as for gradients.
        values: the same shape.
        hidden: positions that nobody attends to.
    """

    def __init__(self, keys: Any, values: Any, hidden: torch.Tensor | None = None) -> None:
        self.keys, self.values, self.hidden = keys, values, hidden

    def copy(self) -> KV:
        """One that may be written to."""
        return KV(self.keys.clone(), self.values.clone(), self.hidden)

    def take(self, others: KV, tokens: torch.Tensor | slice) -> None:
        """Have the keys and values that others have at these positions."""
        self.keys[:, :, tokens] = others.keys[:, :, tokens]
        self.values[:, :, tokens] = others.values[:, :, tokens]


class Paid:
    """Attention that some queries pay, layer by layer.

    Args:
        probes: bool `[tokens computed]`, whose queries count.
        last: how many of the last probes are summed by themselves, too.

    Attributes:
        sums: float32 `[2, heads, keys]` of each layer: by all probes, and by the last.
    """

    def __init__(self, probes: torch.Tensor, last: int) -> None:
        self._probes, self._last = probes, last
        self.sums: list[torch.Tensor] = []

    def note(
        self, query: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, scale: float
    ) -> None:
        """Add a layer.

        Args:
            query: `[heads, tokens computed, channels]`.
            keys: `[heads, keys, channels]`.
            seen: bool `[tokens computed, keys]`.
            scale: of the products.
        """
        products = query[:, self._probes].float() @ keys.float().mT * scale
        shares = products.masked_fill(~seen[self._probes], float("-inf")).softmax(-1)
        self.sums.append(torch.stack([shares.sum(1), shares[:, -self._last :].sum(1)]))


@dataclass(frozen=True)
class Side:
    """The nearest computed token on one side of each token that is not computed.

    Attributes:
        rows: which of the computed ones, int64 `[others]`; -1: there is none.
        distances: from it, int64 `[others]`, below 0 in front of it.
        values, keys: shares `[others]` of the change of either; None: of keys none.
    """

    rows: torch.Tensor
    distances: torch.Tensor
    values: torch.Tensor
    keys: torch.Tensor | None = None


class Carry:
    """Tokens that are not computed take part in what others, which are, have changed.

    Args:
        computed: int64 `[computed]`, ascending: whose KV is compared with what stood there.
        others: int64 `[others]`.
        sides: whose changes they take part in.
    """

    def __init__(self, computed: torch.Tensor, others: torch.Tensor, sides: Sequence[Side]) -> None:
        self._computed, self._others, self._sides = computed, others, sides

    def write(
        self,
        kv: KV,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        turned: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """Change the KV of others.

        Args:
            kv: as it was moved.
            layer: whose.
            key, value: `[heads, tokens, channels]`, about to be written.
            positions: where.
            turned: gives changes of keys `[heads, others, channels]`, so many positions further
                `[1, others]`.
        """
        change_of_keys = self._changes(kv.keys[layer], key, positions)
        change_of_values = self._changes(kv.values[layer], value, positions)
        for side in self._sides:
            there = side.rows >= 0
            rows, distances = side.rows[there], side.distances[there][None]
            if side.keys is not None:
                turning = turned(change_of_keys[:, rows], distances)
                self._add(kv.keys[layer], there, side.keys, turning)
            self._add(kv.values[layer], there, side.values, change_of_values[:, rows])

    def _add(
        self, held: torch.Tensor, there: torch.Tensor, shares: torch.Tensor, change: torch.Tensor
    ) -> None:
        others = self._others[there]
        carried = held[:, others].float() + shares[there, None] * change
        held[:, others] = carried.to(held.dtype)

    def _changes(
        self, held: torch.Tensor, new: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        rows = torch.searchsorted(positions, self._computed)
        return new[:, rows].float() - held[:, self._computed].float()


class _Reading:
    """One run of some tokens through all layers: what our attention needs beside its arguments."""

    def __init__(
        self,
        kv: KV,
        positions: torch.Tensor,
        paid: Paid | None,
        further: torch.Tensor | None,
        carry: Carry | None,
        turned: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._kv, self._positions, self._paid, self._further = kv, positions, paid, further
        self._carry, self._turned = carry, turned
        self._stop = int(positions[-1]) + 1
        self._seen: dict[int | None, torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """`[1, tokens, heads, channels]`, of `[heads, tokens, channels]`."""
        if self._carry is not None:
            turned = functools.partial(self._turned, layer)
            self._carry.write(self._kv, layer, key, value, self._positions, turned)
        keys = self._written(self._kv.keys[layer], key)
        values = self._written(self._kv.values[layer], value)
        groups = query.shape[0] // keys.shape[0]
        keys, values = (one.repeat_interleave(groups, 0) for one in (keys, values))
        seen = self._seen_by(window)
        found = scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=seen, scale=scale
        )
        if self._paid is not None:
            self._paid.note(query, keys, seen, scale)
        return found.transpose(1, 2)

    def _written(self, into: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        if self._further is not None:
            new = new + self._further[:, None] * (new - into[:, self._positions])
        into[:, self._positions] = new.to(into.dtype)
        return into[:, : self._stop]

    def _seen_by(self, window: int | None) -> torch.Tensor:
        if window not in self._seen:
            key, query = torch.arange(self._stop), self._positions[:, None]
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            if (hidden := self._kv.hidden) is not None:
                seen[:, hidden[hidden < self._stop]] = False
            self._seen[window] = seen
        return self._seen[window]


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    reading: _Reading,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    found = reading.attend(module.layer_idx, query[0], key[0], value[0], scaling, sliding_window)
    return found, None


AttentionInterface.register(NAME, _attention)


class Decoder:
    """A causal model of Transformers with rotary positions.

    Attributes:
        tokenizer: of the model.
        num_layers: of it.
        stops: ids of tokens that end an answer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        config = model.config
        # Gradients are of KV, where they are asked for at all.
        self._model, self.tokenizer = model.requires_grad_(False), tokenizer
        self.num_layers = config.num_hidden_layers
        self._layer_types = getattr(config, "layer_types", None) or [None] * self.num_layers
        self._heads = config.num_key_value_heads
        self._channels = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        ends = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
        self.stops = frozenset([ends] if isinstance(ends, int) else ends or ())

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
        """The model of a folder of Hugging Face."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME)
        return cls(model.eval(), AutoTokenizer.from_pretrained(folder))

    def empty(self, room: int) -> KV:
        """KV of a sequence of which nothing is computed."""
        shape = (self.num_layers, self._heads, room, self._channels)
        return KV(
            torch.zeros(shape, dtype=self._model.dtype), torch.zeros(shape, dtype=self._model.dtype)
        )

    def compute(
        self,
        kv: KV,
        tokens: Sequence[int] | torch.Tensor,
        positions: torch.Tensor,
        logits: int = 1,
        paid: Paid | None = None,
        further: torch.Tensor | None = None,
        carry: Carry | None = None,
    ) -> torch.Tensor:
        """Compute tokens, and write their KV where they stand.

        Args:
            kv: of the whole sequence; written to.
            tokens: ids of those that are computed.
            positions: int64, ascending, of each.
            logits: of how many of the last tokens they are wanted.
            paid: what attention is noted in.
            further: `[tokens computed]`: KV that is written goes beyond what was computed, by this
                share of its difference from what stood there.
            carry: what becomes of the values of tokens that are not computed.

        Returns:
            float32 `[logits, vocabulary]`.
        """

        def turned(layer: int, keys: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
            return self._turned(keys, turn, self._layer_types[layer])

        states = self._model.model(
            input_ids=torch.as_tensor(tokens)[None],
            position_ids=positions[None],
            use_cache=False,
            reading=_Reading(kv, positions, paid, further, carry, turned),
        ).last_hidden_state[0]
        if not logits:
            return torch.empty(0)
        return self._model.lm_head(states[-logits:]).float()

    def moved(self, kv: KV, first: int, stop: int, to: int) -> KV:
        """Keys and values of `[first, stop)`, as they are from position `to` on (delta RoPE)."""
        keys = kv.keys[:, :, first:stop].clone()
        turn = torch.full((1, 1), to - first)
        for kind in set(self._layer_types):
            layers = [i for i, one in enumerate(self._layer_types) if one == kind]
            keys[layers] = self._turned(keys[layers].float(), turn, kind).to(keys.dtype)
        return KV(keys, kv.values[:, :, first:stop].clone())

    def _turned(self, keys: torch.Tensor, turn: torch.Tensor, kind: str | None) -> torch.Tensor:
        """Float32 keys `[..., tokens, channels]`, so many positions further `[1, tokens]`."""
        cos, sin = self._rotation(keys, turn, kind)
        low, high = keys.chunk(2, -1)
        return keys * cos + torch.cat([-high, low], -1) * sin

    def _rotation(
        self, like: torch.Tensor, turn: torch.Tensor, kind: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotary = self._model.model.rotary_emb
        own = (
            {"layer_type": kind}
            if "layer_type" in inspect.signature(rotary.forward).parameters
            else {}
        )
        cos, sin = rotary(like.float(), turn, **own)
        scale = (cos.square() + sin.square()).sqrt()  # YaRN scales both: keys are scaled already
        return cos / scale, sin / scale
