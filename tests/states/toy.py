# SPDX-License-Identifier: Apache-2.0
"""A model of two layers of the delta rule and two of attention, written token by token, as far as
plans with states need one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from segreuse_extras.states.capture import Captures
from segreuse_extras.states.kinds import state_layer
from segreuse_extras.states.layers import HeldStates, StateLayers
from segreuse_extras.states.messages import CaptureOrder, Placed, PlanStates
from segreuse_extras.states.prefill import StatesPrefill
from tests.states.test_capture import CHANNELS, HEADS, INPUTS, delta_rule, layer_like
from vllm_segreuse.compat.gdn_attention import Scan
from vllm_segreuse.kernels.pages import Part, TiledStrides
from vllm_segreuse.plan import Pieces, Recipe, ReusePlan
from vllm_segreuse.prefill.align import TokenCopies
from vllm_segreuse.prefill.executor import PassReport
from vllm_segreuse.prefill.tokens import TokenTable

BLOCK, BLOCKS, VOCABULARY = 8, 64, 50
RUNNING, BEFORE = 2, 3
"""Blocks of the states, and of those in front of a plan behind a prefix hit."""
REQUEST = "request"


def half(number: int) -> TiledStrides:
    """Keys (0) or values (1) of a page `[BLOCK, 2, HEADS, CHANNELS]`."""
    token = 2 * HEADS * CHANNELS
    offset = number * HEADS * CHANNELS
    shape = (HEADS, BLOCK, CHANNELS)
    return TiledStrides(shape, offset, CHANNELS, BLOCK, 0, token, CHANNELS, 0, 1)


class Attending:
    """A backend: writes keys and values of its tokens, and attends to all in front of them.

    As vLLM's kernel for CPUs it multiplies by whole blocks, what is behind a token by zero.
    """

    scale = 0.7

    def __init__(self) -> None:
        self.paid = torch.zeros(BLOCK * BLOCKS)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ToyRows,
        output: torch.Tensor,
    ) -> torch.Tensor:
        tokens, table = metadata.tokens, metadata.table
        kv_cache[tokens.slots, 0], kv_cache[tokens.slots, 1] = key, value
        for row, position in enumerate(tokens.positions.tolist()):
            at = torch.arange((position // BLOCK + 1) * BLOCK)
            seen = kv_cache[table[at // BLOCK].long() * BLOCK + at % BLOCK]
            scores = torch.einsum("hd,khd->hk", query[row], seen[:, 0]) * self.scale
            weights = scores.masked_fill(at > position, float("-inf")).softmax(-1)
            self.paid[: len(at)] += weights.sum(0)
            output[row] = torch.einsum("hk,khd->hd", weights, seen[:, 1])
        return output


class ToyRows:
    """Of one request."""

    running: Sequence[int] = ()
    tokens: TokenTable
    table: torch.Tensor

    @contextmanager
    def forward_context(self, tokens: TokenTable, table: torch.Tensor) -> Iterator[None]:
        self.tokens, self.table = tokens, table[0]
        yield


class Toy:
    """The model, what carries plans out on it, and what a test reads off it."""

    block_size = BLOCK
    num_layers = 4

    def __init__(self, max_tokens: int = 1000) -> None:
        torch.manual_seed(1)
        self.rows = ToyRows()
        self.embedding = torch.randn(VOCABULARY, INPUTS)
        self.weights = torch.randn(self.num_layers, 4, HEADS * CHANNELS, INPUTS) / INPUTS**0.5
        self.out = torch.randn(self.num_layers, INPUTS, HEADS * CHANNELS) / INPUTS**0.5
        pages = [torch.zeros(BLOCKS, BLOCK, 2, HEADS, CHANNELS) for _ in range(2)]
        self.attention: list[Any] = [
            SimpleNamespace(
                impl=Attending(),
                kv_cache=each,
                slots=each.flatten(0, 1),
                kv_cache_dtype="auto",
                num_heads=HEADS,
                head_size=CHANNELS,
            )
            for each in pages
        ]
        self.loaded = [layer_like() for _ in range(2)]
        of_states = [state_layer(f"layers.{n}", it, 0) for n, it in enumerate(self.loaded)]
        self.states = StateLayers(of_states, 1)
        self.captures = Captures(self.states, list)
        kv: list[Any] = [
            SimpleNamespace(
                attention=layer,
                pages=layer.kv_cache.flatten(1),
                parts=[Part(half(number), None) for number in range(2)],
                table=0,
                layout=SimpleNamespace(attended=None),
                kernels=SimpleNamespace(token_scores=token_scores),
                softmax=dict,
            )
            for layer in self.attention
        ]
        self.layers = kv
        given: Any = (self, self.states, self.rows, kv, self, self.captures, max_tokens)
        self.prefill = StatesPrefill(*given)

    def align(self, copies: TokenCopies) -> None:
        """Its keys do not turn."""
        for layer in self.attention:
            source, target = (
                torch.from_numpy(it) for it in (copies.source_slots, copies.target_slots)
            )
            layer.slots[target] = layer.slots[source]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding[token_ids]
        for number in range(self.num_layers):
            mixed = self._attend if number % 2 else self._scan
            normed = torch.nn.functional.rms_norm(hidden, (INPUTS,))
            hidden = hidden + mixed(number, normed, positions) @ self.out[number].T
        return hidden

    def _attend(self, number: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        layer, heads = self.attention[number // 2], (len(hidden), HEADS, CHANNELS)
        query, key, value = ((hidden @ it.T).view(heads) for it in self.weights[number, :3])
        output = torch.empty_like(query)
        layer.impl.forward(layer, query, key, value, layer.slots, self.rows, output)
        return output.flatten(1)

    def _scan(self, number: int, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        convolution, states = self.loaded[number // 2].kv_cache
        [block] = self.rows.running
        if not positions[0]:
            convolution[block] = states[block] = 0
        inputs = torch.cat((convolution[block], hidden))
        convolved = hidden + inputs[2:-1] + inputs[:-3] / 2
        heads = 1, len(hidden), HEADS, CHANNELS
        query, key, value, gate = ((convolved @ it.T).view(heads) for it in self.weights[number])
        text = {
            "query": query,
            "key": torch.nn.functional.normalize(key, dim=-1),
            "value": value,
            "g": -0.02 * gate[..., 0].sigmoid(),
            "beta": gate[..., 1].sigmoid(),
        }
        of_layer = {
            "cu_seqlens": torch.zeros(2, dtype=torch.int32),
            "initial_state": states,
            "initial_state_indices": torch.zeros(1, dtype=torch.int32),
        }
        name = self.states.layers[number // 2].name
        self.captures.observe(Scan(name, hidden, 0, delta_rule, text | of_layer))
        found = []
        for t in range(len(hidden)):
            one = {part: it[:, t : t + 1] for part, it in text.items()}
            delta_rule(**one, initial_state=states[block : block + 1])
            found.append(torch.einsum("hkv,hk->hv", states[block], query[0, t]).flatten())
        convolution[block] = inputs[-3:]
        return torch.stack(found)

    def run(
        self,
        plan: ReusePlan,
        segments: Sequence[Placed] = (),
        orders: Sequence[CaptureOrder] = (),
    ) -> tuple[PassReport, HeldStates]:
        """Carry a plan out; what is reported, and the states that it leaves."""
        self.captures.order(orders)
        before = (BEFORE,) if plan.start else ()
        self.prefill.given = {REQUEST: PlanStates(tuple(segments), (RUNNING,), before)}
        report = self.prefill.run([plan])
        return report, self.states.held([RUNNING])

    def read_prefix(self, tokens: np.ndarray, blocks: np.ndarray) -> None:
        """Whoever computed it, it is there."""
        self.run(plan_of(tokens, blocks, len(tokens), Pieces.from_table([])))
        for layer in self.states.layers:
            layer.copy(RUNNING, BEFORE)

    def kv(self, blocks: np.ndarray, first: int, stop: int) -> list[torch.Tensor]:
        """What layers of attention have of some positions."""
        at = np.arange(first, stop)
        slots = torch.from_numpy(blocks[at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK)
        return [layer.slots[slots].clone() for layer in self.attention]


def token_scores(
    query: torch.Tensor,
    positions: torch.Tensor,
    pages: torch.Tensor,
    keys: None,
    blocks: torch.Tensor,
    num_tokens: int,
    scale: float,
) -> torch.Tensor:
    """As `reference.token_scores`, of the toy's pages."""
    at = torch.arange(num_tokens)
    keys_and_values = pages.view(-1, 2, HEADS, CHANNELS)
    seen = keys_and_values[blocks[at // BLOCK].long() * BLOCK + at % BLOCK, 0]
    scores = torch.einsum("qhd,khd->qhk", query, seen) * scale
    sees = at <= positions[:, None, None]
    return scores.masked_fill(~sees, float("-inf")).softmax(-1).sum((0, 1))


def plan_of(
    tokens: np.ndarray,
    blocks: np.ndarray,
    stop: int,
    pieces: Pieces,
    recipe: Recipe | None = None,
    start: int = 0,
    **more: Any,
) -> ReusePlan:
    """Of the first tokens of a prompt, behind a prefix hit; what is behind is its question, if the
    recipe asks."""
    recipe = recipe or Recipe.without_choice(~pieces.reused(start, stop))
    asks = recipe.program.probes_suffix
    return ReusePlan(
        request_id=REQUEST,
        start=start,
        stop=stop,
        token_ids=tokens[start:stop],
        pieces=pieces,
        recipe=recipe,
        donor_blocks=[],
        donor_depth=0,
        block_ids=blocks,
        suffix=tokens[stop:] if asks else tokens[:0],
        reports=recipe.program.reports,
        **more,
    )
