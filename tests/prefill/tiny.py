# SPDX-License-Identifier: Apache-2.0
"""A decoder of four layers over a paged cache, built as vLLM builds its models.

Passes run on it as they do on a loaded model: through `LayerRunner`, `DecoderStack`,
`PassAttention` and the reference kernels. Only vLLM's forward context is replaced.
`tests/prefill/loop.py` computes the same token by token.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vllm_segreuse.compat.lora_manager import Adapters
from vllm_segreuse.compat.model_runner import CapturedGraphs
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.dispatch import Kernels
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.plan import (
    Check,
    Fixed,
    Pieces,
    Program,
    Recipe,
    ReusePlan,
    fates_of,
    staged,
)
from vllm_segreuse.prefill import attention as attention_module
from vllm_segreuse.prefill import selection, states
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.graphs import CudaGraphs
from vllm_segreuse.prefill.layer_runner import LayerRunner, PassSettings
from vllm_segreuse.prefill.rows import EAGER, Execution, common_metadata
from vllm_segreuse.prefill.states import BoundaryStates
from vllm_segreuse.prefill.tokens import TokenTable

LAYERS, HEADS, KV_HEADS, CHANNELS, SIZE = 4, 4, 2, 8, 4
HIDDEN, VOCABULARY, POSITIONS = HEADS * CHANNELS, 50, 256
SCALE = 1 / math.sqrt(CHANNELS)
FIXED = Fixed()


def half(number: int) -> TiledStrides:
    """Keys (0) or values (1) of a page `[2, KV_HEADS, SIZE, CHANNELS]`."""
    head = SIZE * CHANNELS
    offset = number * KV_HEADS * head
    shape = (KV_HEADS, SIZE, CHANNELS)
    return TiledStrides(shape, offset, head, SIZE, head, CHANNELS, CHANNELS, CHANNELS, 1)


LAYOUT = PageLayout(half(0), half(1))


def norm(x: torch.Tensor) -> torch.Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


class Backend:
    """What vLLM calls `layer.impl`: writes pages, and attends in rows.

    As vLLM's kernel for CPUs it multiplies values up to the end of a block, those behind a token by
    zero.
    """

    scale = SCALE

    def __init__(self, world: "World", index: int) -> None:
        self._world, self._index = world, index

    def do_kv_cache_update(
        self,
        layer: nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self._world.written.append((self._index, slots[slots >= 0].tolist()))
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
        kv_cache[slots // SIZE, 0, :, slots % SIZE] = key
        kv_cache[slots // SIZE, 1, :, slots % SIZE] = value

    def forward(
        self, layer: nn.Module, query: Any, key: Any, value: Any, kv_cache: Any, rows: Any, out: Any
    ) -> None:
        """Rows of queries, of which the last sees all of its sequence, as vLLM's backends do it."""
        self._world.in_rows += 1
        bounds = rows.query_start_loc.tolist()
        for row in range(rows.num_reqs):
            seen = int(rows.seq_lens[row])
            pages = kv_cache[rows.block_table_tensor[row].long()]
            keys, values = (
                pages[:, part].transpose(1, 2).reshape(-1, KV_HEADS, CHANNELS) for part in (0, 1)
            )
            stop = -(-seen // SIZE) * SIZE
            window = self._world.kinds[self._index].window or seen
            first, last = bounds[row], bounds[row + 1]
            for number in range(first, last):
                visible = seen - (last - 1 - number)
                hidden = max(0, visible - window)
                for head in range(HEADS):
                    of = head // (HEADS // KV_HEADS)
                    weights = torch.zeros(stop - hidden)
                    attended = keys[hidden:visible, of] @ query[number, head] * SCALE
                    weights[: visible - hidden] = attended.softmax(0)
                    out[number, head] = weights @ values[hidden:stop, of]


class Attention(nn.Module):
    """vLLM's `Attention` layer."""

    num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, CHANNELS
    kv_cache_dtype = "auto"

    def __init__(self, world: "World", index: int, kv_cache: torch.Tensor) -> None:
        super().__init__()
        self.layer_name = str(index)
        self.world, self.kv_cache = world, kv_cache
        self.impl = Backend(world, index)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        _, metadata = self.world.context
        query = query.view(-1, HEADS, CHANNELS)
        key, value = (x.view(-1, KV_HEADS, CHANNELS) for x in (key, value))
        self.impl.do_kv_cache_update(self, key, value, self.kv_cache, self.world.slots)
        out = torch.full_like(query, torch.nan)
        if isinstance(metadata, dict):
            metadata = metadata[self.layer_name]
        self.impl.forward(self, query, key, value, self.kv_cache, metadata, out)
        return out.view(-1, HIDDEN)


class Decoder(nn.Module):
    """A decoder layer; where `world.in_place`, it changes what it is given, as fused norms do."""

    def __init__(self, world: "World", index: int, kv_cache: torch.Tensor) -> None:
        super().__init__()
        self.world, self.index = world, index
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * CHANNELS, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * CHANNELS, bias=False)
        self.output = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.mlp = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.attn = Attention(world, index, kv_cache)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states.clone()
        elif self.world.in_place:
            residual += hidden_states
        else:
            residual = residual + hidden_states
        x = norm(residual)
        if self.world.in_place:
            x = hidden_states.copy_(x)
        residual = residual + self.output(self.attn(self.query(x), self.key(x), self.value(x)))
        hidden_states = self.mlp(norm(residual)).tanh()
        self.world.left_layer(self.index, positions, hidden_states, residual)
        return hidden_states, residual


class Model(nn.Module):
    """As vLLM's decoder models: token ids and positions in, hidden states out."""

    def __init__(self, world: "World", caches: list[torch.Tensor]) -> None:
        super().__init__()
        self.world = world
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Embedding(POSITIONS, HIDDEN)
        self.layers = nn.ModuleList(Decoder(world, i, cache) for i, cache in enumerate(caches))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        replayed = self.world.replayed(input_ids, positions)
        hidden, residual = self.tokens(input_ids) + self.positions(positions), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        found = norm(hidden + residual)
        return found if replayed is None else replayed.copy_(found)


class Rows:
    """`RowBuilder` without vLLM's configuration."""

    def __init__(self, world: "World") -> None:
        self.vllm_config = world

    @contextmanager
    def forward_context(
        self, tokens: TokenTable, block_tables: torch.Tensor, execution: Execution = EAGER
    ) -> Iterator[None]:
        metadata = common_metadata(tokens, block_tables)
        with self.vllm_config.entered(metadata, tokens, execution):
            yield

    def most_tokens(self, tokens: TokenTable) -> int:
        return len(tokens)

    def metadata(self, tokens: TokenTable, block_tables: torch.Tensor) -> dict[str, Any]:
        metadata = common_metadata(tokens, block_tables)
        return dict.fromkeys(map(str, range(LAYERS)), metadata)


class World:
    """The model with a cache of random pages, and what runs passes on it.

    Args:
        scattered: whether scattered queries have a kernel; else all of them attend in rows.
        max_chunk_tokens: see `LayerRunner`.
        windows: of each layer; 0: none.
        in_rows: layers whose scattered queries have no kernel, whatever the others have.
        lora_manager: vLLM's, where LoRA is enabled.
        cuts: layers whose input is kept, as boundary states.

    Attributes:
        kinds: of the layers.
        in_place: whether norms write over their input.
        captured: what CUDA graphs read, if there are any.
        written: (layer, slots) of every write of keys and values.
        in_rows: calls of the stock backend.
        align: the kernel that moves tokens.
        spoil: called with what leaves each layer: index, positions, hidden states, residual.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        scattered: bool = True,
        max_chunk_tokens: int = 1000,
        windows: tuple[int, ...] = (0,) * LAYERS,
        in_rows: tuple[int, ...] = (),
        lora_manager: Any = None,
        cuts: tuple[int, ...] = (),
    ) -> None:
        torch.manual_seed(0)
        self.written: list[tuple[int, list[int]]] = []
        self.in_rows = 0
        self.kinds = [AttentionKind(window) for window in windows]
        self.in_place = True
        self.spoil: Any = None
        self.context: Any = None
        self.contexts: list[tuple[Any, TokenTable, Execution]] = []
        self.slots = torch.empty(0, dtype=torch.int64)
        self.captured: CapturedGraphs | None = None
        self._outputs = torch.empty(0)
        self.caches = [torch.randn(100, 2, KV_HEADS, SIZE, CHANNELS) for _ in range(LAYERS)]
        self.model = Model(self, self.caches).requires_grad_(False)
        for layer in self.model.layers:
            for part in (layer.query, layer.key):
                part.weight *= 4  # heads that look for something
        by_name = {str(i): layer.attn for i, layer in enumerate(self.model.layers)}
        self.stack = DecoderStack(self.model, by_name)
        self.align = reference.align
        kernels = Kernels(
            lambda *given: self.align(*given),
            reference.store,
            reference.token_scores,
            reference.sparse_attention if scattered else None,
            None,
            "reference",
            carry=reference.carry,
        )
        rows_only = dataclasses.replace(kernels, sparse_attention=None)
        kv = [
            LayerKv(layer, LAYOUT, None, rows_only if index in in_rows else kernels, kind)
            for index, (layer, kind) in enumerate(
                zip(self.stack.attention, self.kinds, strict=True)
            )
        ]
        self._kv, self._attention = kv, PassAttention(Rows(self), kv)  # type: ignore[arg-type]
        self._settings = PassSettings(
            SimpleNamespace(preferred=nullcontext),  # type: ignore[arg-type]
            Adapters(SimpleNamespace(lora_manager=lora_manager)),
            max_chunk_tokens,
        )
        self._states = None
        if cuts:
            self._states = BoundaryStates(
                self.stack, cuts, 100 * SIZE, HIDDEN, torch.float32, torch.device("cpu")
            )
        self.run_compiled(False)
        patch.setattr(states, "slots_of_forward", self._slots_of_forward)
        patch.setattr(attention_module, "pass_context", _pass_context)
        patch.setattr(selection, "get_tp_group", lambda: SimpleNamespace(world_size=1))

    def run_compiled(self, compiled: bool = True) -> None:
        """What runs passes from here on; eagerly, unless this is called."""
        settings = self._settings._replace(compiled=compiled)
        self.layers = LayerRunner(self.stack, self._kv, self._attention, settings, self._states)
        self.prefill = SparsePrefill(self.layers, Aligner(self._kv))

    def capture(self, *sizes: int) -> None:
        """Compiled passes run by CUDA graphs of these sizes from here on."""
        self.captured = CapturedGraphs(
            *(sizes, torch.full((sizes[-1] + 3,), 7, dtype=torch.int32)),
            torch.arange(sizes[-1] + 3),
            sampled_first=True,
        )
        self._outputs = torch.empty(sizes[-1], HIDDEN)
        self.run_compiled()
        self.layers.graphs = CudaGraphs(self.stack, self.captured)

    def replayed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Where the graph of this forward context leaves its output: the next one overwrites it."""
        size = self.contexts[-1][2].graph_tokens if self.contexts else 0
        if not size:
            return None
        assert self.captured is not None
        for read, given in zip(self.captured[1:3], (token_ids, positions), strict=True):
            assert given.data_ptr() == read.data_ptr(), "a graph reads where it was captured"
            assert len(given) == size
        return self._outputs[:size]

    @contextmanager
    def entered(self, metadata: Any, tokens: TokenTable, execution: Execution) -> Iterator[None]:
        """vLLM's forward context, as far as attention layers ask it."""
        assert self.context is None
        self.context, self.slots = (tokens, metadata), tokens.slots
        padding = execution.graph_tokens - len(tokens)
        if padding > 0:
            self.slots = torch.cat([tokens.slots, torch.full((padding,), -1)])
        self.contexts.append((metadata, tokens, execution))
        try:
            yield
        finally:
            self.context = None

    def _slots_of_forward(self, layer_name: str) -> torch.Tensor | None:
        return None if self.context is None else self.slots

    def left_layer(self, index: int, *state: torch.Tensor) -> None:
        if self.spoil is not None:
            self.spoil(index, *state)

    @property
    def layer_tokens(self) -> int:
        """Tokens whose keys and values were written, summed over the layers."""
        return sum(len(slots) for _, slots in self.written)

    def kv(self, plan: ReusePlan) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        """(layer, position) -> keys and values, each `[KV_HEADS, CHANNELS]`, float64; without the
        suffix, whose slots nobody reads."""
        found = {}
        for layer, cache in enumerate(self.caches):
            for position in range(plan.stop):
                block, offset = plan.block_ids[position // SIZE], position % SIZE
                found[layer, position] = tuple(cache[block, :, :, offset].double().numpy())
        return found


def _pass_context(
    world: World, metadata: Any, tokens: TokenTable, execution: Execution, slots: None
) -> AbstractContextManager[None]:
    assert slots is None, "there is one block table"
    return world.entered(metadata, tokens, execution)


def make_plan(
    name: str,
    start: int,
    always: list[int],
    count: int,
    blocks: np.ndarray,
    suffix: Sequence[int] = (),
    pieces: list[tuple[int, int, int, int, int]] | None = None,
    probes: list[int] | None = None,
    program: Program = FIXED,
    top_k: int = 0,
    lora_id: int = 0,
    enters: np.ndarray | None = None,
) -> ReusePlan:
    """A plan of `count` tokens from `start` on.

    Args:
        always, probes: counted from `start`; probes are those that are always computed, unless
            given.
        suffix, pieces: see `ReusePlan`.
        program, top_k: see `Recipe`.
        lora_id: see `ReusePlan`.
        enters: see `staged`.
    """
    masks = []
    for indices in (always, always if probes is None else probes):
        masks.append(np.zeros(count, bool))
        masks[-1][indices] = True
    recipe = staged(Recipe.of(program, fates_of(*masks), top_k), enters)
    token_ids = np.random.default_rng(len(name) + start).integers(0, VOCABULARY, count)
    return ReusePlan(
        name,
        start,
        start + count,
        token_ids.astype(np.int32),
        Pieces.from_table(pieces or []),
        recipe,
        donor_blocks=[],
        donor_depth=0,
        block_ids=blocks.astype(np.int32),
        suffix=np.array(suffix, np.int32),
        reports=recipe.program.reports,
        lora_id=lora_id,
    )


def checked(plan: ReusePlan, check: Check | None) -> ReusePlan:
    """The same plan, which tests similar segments."""
    program = dataclasses.replace(plan.recipe.program, check=check)
    return dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, program=program))
