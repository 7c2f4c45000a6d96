# SPDX-License-Identifier: Apache-2.0
"""Random tokens in scratch blocks, which all proofs work on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vllm_segreuse.compat.attention_impl import queries_as_computed, replaced_forward
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.kernels.pages import PageLayout
from vllm_segreuse.kernels.reference import attend
from vllm_segreuse.model.attention_kind import kind_of
from vllm_segreuse.model.kv_format import is_fp8, stored_dtype, typed_pages
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.modules import UnsupportedModelError, in_the_place_of
from vllm_segreuse.prefill.layer_runner import PassSettings
from vllm_segreuse.prefill.rows import RowBuilder
from vllm_segreuse.prefill.tokens import TokenTable

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_BLOCKS = 4


class Scratch:
    """Runs the model on random tokens in scratch blocks.

    Nothing is cached yet when this runs; vLLM zeroes or overwrites blocks before it reads them.

    Args:
        stack: the model's decoder layers, or its draft.
        layouts: how each layer's pages are laid out.
        rows: builds rows of the stock backend.
        settings: how the layers run; proofs use no adapter.
        group: the KV cache.
        num_blocks: of the KV cache.
        vllm_config: the engine's.
        stage: of the stack; None: the only one.

    Attributes:
        stack, layouts, stage: as given.
        block_size: tokens per block.
        entering: what the stage before has made of each token; None: there is none.
        dtype, max_model_len: of the model.
        count: number of the scratch tokens.
        token_ids: int32 `[count]`.
        distance: positions that a move covers, so that all stay within those of the model.
        own: int32, blocks of the tokens' own KV, in the first table.
        copy: int32, blocks that moves and passes write to, there.
        tables: of each layer, which of a request's block tables it has.
        numbers: int32 `[3, count + 1]`, by which M-RoPE rotates; None: the tokens are text.

    Raises:
        UnsupportedModelError: the KV cache is too small.
    """

    def __init__(
        self,
        stack: Any,
        layouts: Sequence[PageLayout],
        rows: RowBuilder,
        settings: PassSettings,
        group: KvGroup,
        num_blocks: int,
        vllm_config: VllmConfig,
        stage: Stage | None = None,
    ) -> None:
        self.tables = [group.tables.get(layer.layer_name, 0) for layer in stack.attention]
        if num_blocks < 2 * _BLOCKS * self.num_tables + 1:
            raise UnsupportedModelError(
                f"the KV cache has {num_blocks} blocks only; give it more memory"
            )
        self.stack = stack
        self.stage = Stage.alone(len(stack.attention)) if stage is None else stage
        self.entering: LayerState | None = None
        self.layouts = layouts
        self._rows = rows
        self._settings = settings
        self.block_size = block_size = group.block_size
        self.dtype = vllm_config.model_config.dtype
        self.max_model_len = vllm_config.model_config.max_model_len
        self.count, self.distance = count_and_distance(stack.attention, block_size, vllm_config)
        generator = np.random.default_rng(0)
        vocabulary = vllm_config.model_config.get_vocab_size()
        self.token_ids = generator.integers(1, vocabulary, self.count, dtype=np.int32)
        self.own = np.arange(1, 1 + _BLOCKS, dtype=np.int32)
        self.copy = self.own + _BLOCKS
        self.mrope_positions: np.ndarray | None = None

    @property
    def num_tables(self) -> int:
        """Block tables of the scratch tokens. No block is in two of them: layers of several tables
        share the memory of a block."""
        return 1 + max(self.tables, default=0)

    def own_in(self, table: int) -> np.ndarray:
        """int32, blocks of the tokens' own KV in a table."""
        return np.asarray(self.own + 2 * _BLOCKS * table, np.int32)

    def copy_in(self, table: int) -> np.ndarray:
        """int32, blocks that moves and passes write to in a table."""
        return self.own_in(table) + _BLOCKS

    def forward(self, distance: int = 0) -> None:
        """The model's own forward on the scratch tokens, with positions from `distance` on."""
        # With the pass's own kernels: the pass is compared, not the rounding of two kernels.
        with self._settings.fast_ops.preferred():
            self._forward(slice(0, self.count), self.own_in, distance)

    def hand_on(self) -> LayerState:
        """The same from position 0 on; what the next stage is given of it."""
        with self._settings.fast_ops.preferred():
            run = self.stack.forward_to_next
            state: LayerState = self._forward(slice(0, self.count), self.own_in, run=run)
            return state.clone()

    def states_for_drafts(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same from position 0 on; what of it drafts may be given."""
        with self._settings.fast_ops.preferred():
            run = self.stack.forward_for_drafts
            return self._forward(slice(0, self.count), self.own_in, run=run)

    def forward_rounded_otherwise(self) -> None:
        """The same into the copy's blocks, in two chunks and by the kernels that vLLM prefers; what
        leaves attention is off by up to a unit in the last place, as of another kernel."""
        generator = torch.Generator(self.stack.attention[0].kv_cache.device).manual_seed(0)

        def round_otherwise(_: nn.Module, output: torch.Tensor) -> torch.Tensor:
            noise = 2 * torch.rand(output.shape, generator=generator, device=output.device) - 1
            eps = torch.finfo(output.dtype).eps
            return (output.float() * (1 + eps * noise)).to(output.dtype)

        half = self.count // 2
        with changed_outputs(self.stack.attention, round_otherwise):
            for part in (slice(0, half), slice(half, self.count)):
                self._forward(part, self.copy_in)

    def _forward(
        self,
        part: slice,
        into: Callable[[int], np.ndarray],
        distance: int = 0,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        device = self.stack.attention[0].kv_cache.device
        positions = torch.arange(part.start, part.stop, device=device)
        tables = np.stack([into(table) for table in range(self.num_tables)])
        blocks = torch.from_numpy(tables).to(device)
        slots = blocks[0][positions // self.block_size].long() * self.block_size
        tokens = TokenTable(
            torch.from_numpy(self.token_ids[part]).long().to(device),
            positions,
            torch.zeros_like(positions),
            slots + positions % self.block_size,
        )
        rotary = positions
        if self.mrope_positions is not None:
            rotary = torch.from_numpy(self.mrope_positions[:, part].astype(np.int64)).to(device)
        computing = self._rows.forward_context(tokens, blocks)
        entering: AbstractContextManager[None] = nullcontext()
        if self.entering is not None:
            entering = self.stack.given(self.entering.take(part).clone())
        with self._settings.adapters.applied(0, len(tokens)), computing, entering:
            return (run or self.stack.forward)(tokens.token_ids, rotary + distance)

    def clear_copy(self) -> None:
        """Zero the blocks that passes and moves write to."""
        self._clear(self.copy_in)

    def clear_own(self) -> None:
        """Zero the blocks of the tokens' own KV, where the engine has run since it was computed."""
        self._clear(self.own_in)

    def _clear(self, blocks: Callable[[int], np.ndarray]) -> None:
        for layer, table in zip(self.stack.attention, self.tables, strict=True):
            typed_pages(layer)[blocks(table).tolist()] = 0

    @contextmanager
    def unrounded(self) -> Iterator[None]:
        """Forwards attend to keys and values as they are computed, not as fp8 caches round them.

        The same keys, turned further, are rounded to other numbers: from layer to layer that grows
        to more than a wrong rotation makes of plain caches.
        """
        layers = self.stack.attention
        if not is_fp8(stored_dtype(layers[0])):
            yield
            return
        with queries_as_computed(layers), replaced_forward(layers, _attend_to_all_before):
            yield


@contextmanager
def changed_outputs(
    modules: Iterable[nn.Module], change: Callable[[nn.Module, Any], Any]
) -> Iterator[None]:
    """Modules return what `change` makes of their outputs; where that is None, these.

    Also where their `forward` is called by itself, as the Transformers backend does with attention.
    """

    def changed(module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            made = change(module, output)
            return output if made is None else made

        return run

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(in_the_place_of([module], changed(module)))
        yield


def _attend_to_all_before(
    layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Causal attention of one request's tokens `[tokens, heads, head_size]`, all of them given."""
    positions = torch.arange(len(query), device=query.device)
    return output.copy_(attend(query, key, value, positions, layer.impl.scale))


def count_and_distance(
    attention: Sequence[torch.nn.Module], block_size: int, vllm_config: VllmConfig
) -> tuple[int, int]:
    """How many scratch tokens there are, and how many positions they are moved by: whole chunks,
    where chunks would begin elsewhere otherwise.

    Args:
        attention: vLLM's attention layers.
        block_size: tokens per block.
        vllm_config: the engine's.

    Raises:
        UnsupportedModelError: prompts are too short for that.
    """
    max_model_len = vllm_config.model_config.max_model_len
    count = min(
        _BLOCKS * block_size - 3,
        vllm_config.scheduler_config.max_num_batched_tokens,
        max_model_len // 2,
    )
    # Positions of the moved tokens stay within those the model has angles for.
    distance = min(211, max_model_len - count)
    chunk = max(kind_of(layer, max_model_len).chunk for layer in attention)
    if not chunk or count + distance <= chunk:
        return count, distance
    if chunk + count > max_model_len:
        raise UnsupportedModelError(
            f"prompts of {max_model_len} tokens are too short to prove layers that attend to "
            f"chunks of {chunk}; raise --max-model-len"
        )
    return count, chunk


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far two tensors are apart, as a share of the norm of what is expected."""
    expected = expected.float()
    return float((found.float() - expected).norm() / expected.norm())


def tolerance(dtype: torch.dtype) -> float:
    """How far two ways of computing the same may be apart, as a share of the norm."""
    return float(max(8 * torch.finfo(dtype).eps, 1e-4))
