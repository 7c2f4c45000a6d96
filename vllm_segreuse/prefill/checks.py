# SPDX-License-Identifier: Apache-2.0
"""Prove at start-up that segment reuse is right for the loaded model, or refuse to start.

Works on the model itself: page layout and rotation of every layer, and the sparse pass against the
model's own forward. What the configuration alone rules out is refused earlier (`supported.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config import CompilationMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_segreuse.kernels import dispatch, reference
from vllm_segreuse.kernels.pages import PageLayout, flat_pages
from vllm_segreuse.model import rope
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.kv_layout import LayoutError, discover_layout
from vllm_segreuse.model.layers import DecoderStack, UnsupportedModelError
from vllm_segreuse.model.rope import DeltaRope, RopeError
from vllm_segreuse.plan import Recipe, ReusePlan, Score
from vllm_segreuse.prefill.align import Aligner, TokenCopies
from vllm_segreuse.prefill.attention import LONG_RUN, PassAttention
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.programs import Layers
from vllm_segreuse.prefill.rows import RowBuilder
from vllm_segreuse.prefill.tokens import TokenTable
from vllm_segreuse.supported import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Runtime:
    """What was proven, ready to run.

    Attributes:
        prefill: the sparse pass.
        max_deviation: how far the KV of the sparse pass was from that of the model's own forward,
            relative to its norm, at the worst layer.
        kernels: which kernels the pass runs.
    """

    prefill: SparsePrefill
    max_deviation: float
    kernels: str


def prove(model: nn.Module, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Runtime:
    """Build the sparse pass for a loaded model and prove it, on scratch blocks of the empty cache.

    Raises:
        RefusedError: naming the layer or the property that could not be proven.
    """
    group = kv_cache_config.kv_cache_groups[0]
    by_name = vllm_config.compilation_config.static_forward_context
    attention = {name: by_name[name] for name in group.layer_names}
    block_size = group.kv_cache_spec.block_size
    try:
        _check_attention(attention, block_size)
        stack = DecoderStack(model, attention)
        layouts = [discover_layout(layer, block_size) for layer in stack.attention]
        first = stack.attention[0]
        kernels = dispatch.choose(first.kv_cache.device, first.kv_cache.dtype, layouts[0])
        rows = RowBuilder(
            vllm_config,
            group.layer_names,
            group.kv_cache_spec,
            first.get_attn_backend(),
            _most_rows(vllm_config, kernels),
        )
        fast_ops = FastOps(model)
        proof = _Proof(stack, rows, fast_ops, block_size, kv_cache_config.num_blocks, vllm_config)
        ropes = proof.ropes()
        aligner = Aligner(stack.attention, layouts, ropes, kernels.align)
        layers = Layers(
            stack,
            layouts,
            PassAttention(rows, stack.attention, layouts, kernels),
            kernels.token_scores,
            fast_ops,
            vllm_config.scheduler_config.max_num_batched_tokens,
        )
        prefill = SparsePrefill(layers, aligner)
        proof.moves(aligner, layouts, ropes)
        proof.scores(kernels.token_scores, layouts)
        max_deviation = proof.sparse_pass(prefill)
        proof.warm_up(prefill)
        layers.compiled = _may_run_compiled(vllm_config)
        return Runtime(prefill, max_deviation, kernels.description)
    except (LayoutError, RopeError, UnsupportedModelError) as error:
        raise RefusedError(f"{error}; serve this model without --segreuse") from error


def _most_rows(vllm_config: VllmConfig, kernels: dispatch.Kernels) -> int:
    """Most runs of active tokens that the stock backend is given at once."""
    scheduler = vllm_config.scheduler_config
    tokens = scheduler.max_num_batched_tokens
    if kernels.sparse_attention is None:
        return tokens
    # Long on average, or, in the exact tier, whole blocks and one end of each plan.
    return tokens // LONG_RUN + scheduler.max_num_seqs + 1


def _may_run_compiled(vllm_config: VllmConfig) -> bool:
    """Whether there is a compiled model that takes token ids and positions, and nothing else of
    the runner's.

    Multimodal models take embeddings; experts count their calls, and take a mask of the padding.
    """
    model = vllm_config.model_config
    eager = vllm_config.compilation_config.mode == CompilationMode.NONE
    return not (eager or model.is_multimodal_model or model.is_moe)


def _check_attention(attention: dict[str, nn.Module], block_size: int) -> None:
    for name, layer in attention.items():
        # Its subclasses attend to chunks, to another sequence, or in both directions.
        if type(layer) is not Attention:
            raise UnsupportedModelError(f"{name} is {type(layer).__name__}, not plain attention")
        kernel_tokens = layer.kv_cache.numel() // (
            layer.kv_cache.shape[0] * layer.num_kv_heads * 2 * layer.head_size
        )
        alibi = getattr(layer.impl, "alibi_slopes", None) is not None
        window = getattr(layer.impl, "sliding_window", None)
        for wrong, why in (
            (layer.sliding_window is not None, f"has a sliding window of {layer.sliding_window}"),
            (window not in (None, -1, (-1, -1)), f"has a sliding window of {window}"),
            (layer.has_sink, "has attention sinks"),
            (alibi, "has ALiBi positions"),
            (bool(getattr(layer.impl, "logits_soft_cap", 0)), "caps its attention logits"),
            (layer.kv_sharing_target_layer_name is not None, "shares the KV of another layer"),
            (layer.attn_type != "decoder", f"is {layer.attn_type} attention"),
            (layer.head_size_v != layer.head_size, "has values of another size than its keys"),
            (
                kernel_tokens != block_size,
                f"has pages of {kernel_tokens} tokens, the scheduler's have {block_size}",
            ),
        ):
            if wrong:
                raise UnsupportedModelError(f"{name} {why}")


class _Proof:
    """Runs the model on random tokens in scratch blocks.

    Nothing is cached yet when this runs; vLLM zeroes or overwrites blocks before it reads them.
    """

    _BLOCKS = 4

    def __init__(
        self,
        stack: DecoderStack,
        rows: RowBuilder,
        fast_ops: FastOps,
        block_size: int,
        num_blocks: int,
        vllm_config: VllmConfig,
    ) -> None:
        if num_blocks < 2 * self._BLOCKS + 1:
            raise UnsupportedModelError(
                f"the KV cache has {num_blocks} blocks only; give it more memory"
            )
        self._stack = stack
        self._rows = rows
        self._fast_ops = fast_ops
        self._block_size = block_size
        self._dtype = vllm_config.model_config.dtype
        self._count = min(
            self._BLOCKS * block_size - 3,
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.max_model_len // 2,
        )
        # Positions of the moved tokens stay within those the model has angles for.
        self._distance = min(211, vllm_config.model_config.max_model_len - self._count)
        generator = np.random.default_rng(0)
        vocabulary = vllm_config.model_config.get_vocab_size()
        self._token_ids = generator.integers(1, vocabulary, self._count, dtype=np.int32)
        self._own = np.arange(1, 1 + self._BLOCKS, dtype=np.int32)
        self._copy = self._own + self._BLOCKS

    @torch.inference_mode()
    def ropes(self) -> list[DeltaRope | None]:
        """Rotation of each layer, None where keys carry no position (NoPE).

        A layer's rotation is derived from the rotary module whose output is the key it caches. It
        is then proven on the model: with all positions moved by the same distance, attention sees
        the same relative positions, so every layer must cache the same keys, rotated by that
        distance. Leaves the tokens' KV at their own positions in the first scratch blocks.
        """
        moved, _ = self._keys(self._distance)
        keys, rotary = self._keys(0)
        ropes = []
        for layer, key, shifted, module in zip(
            self._stack.attention, keys, moved, rotary, strict=True
        ):
            delta_rope = None if module is None else rope.derive(module, layer.layer_name)
            _prove_rotation(layer, key, shifted, delta_rope, self._distance)
            ropes.append(delta_rope)
        return ropes

    def _keys(self, distance: int) -> tuple[list[torch.Tensor], list[nn.Module | None]]:
        """Keys each layer caches with positions from `distance` on, and what rotated them."""
        keys: list[torch.Tensor] = []
        modules: list[nn.Module | None] = []
        latest: list[tuple[nn.Module, torch.Tensor]] = []

        def note_rotation(module: nn.Module, _: Any, output: Any) -> None:
            latest[:] = [(module, output[1].clone())]

        def note_key(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = args[1] if len(args) > 1 else kwargs["key"]
            keys.append(key.clone())
            rotated = bool(latest) and torch.equal(latest[0][1].reshape(-1), key.reshape(-1))
            modules.append(latest[0][0] if rotated else None)
            latest.clear()

        rotary = {
            id(m): m
            for layer in self._stack.layers
            for m in layer.modules()
            if isinstance(m, RotaryEmbeddingBase)
        }
        handles = [module.register_forward_hook(note_rotation) for module in rotary.values()]
        for layer in self._stack.attention:
            handles.append(layer.register_forward_pre_hook(note_key, with_kwargs=True))
        try:
            self._forward(distance)
        finally:
            for handle in handles:
                handle.remove()
        return keys, modules

    def _forward(self, distance: int) -> None:
        device = self._stack.attention[0].kv_cache.device
        positions = torch.arange(self._count, device=device)
        blocks = torch.from_numpy(self._own).to(device)
        slots = blocks[positions // self._block_size].long() * self._block_size
        tokens = TokenTable(
            torch.from_numpy(self._token_ids).long().to(device),
            positions,
            torch.zeros_like(positions),
            slots + positions % self._block_size,
        )
        # With the pass's own kernels: the pass is compared, not the rounding of two kernels.
        with self._fast_ops.preferred(), self._rows.forward_context(tokens, blocks[None]):
            self._stack.forward(tokens.token_ids, positions + distance)

    def moves(
        self, aligner: Aligner, layouts: list[PageLayout], ropes: list[DeltaRope | None]
    ) -> None:
        """The kernel that moves tokens must do what the proven rotation says, at every layer.

        Moves the scratch tokens one slot on, so that the copy crosses pages.
        """
        size, count = self._block_size, self._count - 1
        tokens = np.arange(count)

        def slots(blocks: np.ndarray, positions: np.ndarray) -> np.ndarray:
            return blocks.astype(np.int64)[positions // size] * size + positions % size

        # Some stay, some move back: one call carries all kinds.
        moved = np.array([self._distance, 0, -7])[tokens // 50 % 3]
        source, target = slots(self._own, tokens), slots(self._copy, tokens + 1)
        self._clear_copy()
        aligner.align(TokenCopies(source, target, moved))
        distances = torch.from_numpy(moved).to(self._stack.attention[0].kv_cache.device)
        for layer, layout, delta_rope in zip(self._stack.attention, layouts, ropes, strict=True):
            pages = flat_pages(layer.kv_cache)
            for part, rotation in ((layout.keys, delta_rope), (layout.values, None)):
                before, after = (
                    part.tokens(pages[blocks.tolist()])[first : first + count]
                    for blocks, first in ((self._own, 0), (self._copy, 1))
                )
                expected = before if rotation is None else rotation.rotate(before, distances)
                error = float((after.float() - expected.float()).norm() / expected.float().norm())
                if not error <= torch.finfo(before.dtype).eps:
                    raise UnsupportedModelError(
                        f"{layer.layer_name}: moved keys or values are not where and what they "
                        f"should be (off by {error:.2g} of their norm)"
                    )

    @torch.inference_mode()
    def scores(self, token_scores: Callable[..., torch.Tensor], layouts: list[PageLayout]) -> None:
        """The kernel that scores tokens must agree with plain torch, at every layer.

        Nothing else here would notice: whatever is chosen, the pass reproduces the KV.
        """
        device = self._stack.attention[0].kv_cache.device
        blocks = torch.from_numpy(self._own).to(device)
        positions = torch.arange(self._count % 5, self._count, 5, device=device)
        generator = torch.Generator().manual_seed(0)
        for layer, layout in zip(self._stack.attention, layouts, strict=True):
            shape = (len(positions), layer.num_heads, layer.head_size)
            query = torch.randn(shape, generator=generator).to(device, self._dtype)
            pages = flat_pages(layer.kv_cache)
            given = (query, positions, pages, layout.keys, blocks, self._count, layer.impl.scale)
            for highest in (False, True):
                expected = reference.token_scores(*given, highest)
                found = token_scores(*given, highest)
                error = float((found - expected).norm() / expected.norm())
                if not error <= _tolerance(self._dtype):
                    raise UnsupportedModelError(
                        f"{layer.layer_name}: the scores of tokens are not the attention that "
                        f"queries pay them (off by {error:.2g} of their norm)"
                    )

    def sparse_pass(self, prefill: SparsePrefill) -> float:
        """Plans that reuse every other stretch unmoved must reproduce the KV of the full forward.

        Covers copying, rows, slot mapping, the layer loop, the boundary and the selection. Also
        warms up everything the first request would otherwise wait for.

        Returns:
            The largest deviation of a layer's keys and values, relative to their norm.
        """
        positions = np.arange(self._count)
        worst = 0.0
        for stretch, program in self._programs():
            self._clear_copy()
            prefill.run([self._plan((positions // stretch) % 2 == 1, program)])
            worst = max(worst, self._deviation())
        dtype = self._stack.attention[0].kv_cache.dtype
        tolerance = _tolerance(dtype)
        if not worst <= tolerance:
            raise UnsupportedModelError(
                "the sparse pass does not reproduce this model's own forward (off by "
                f"{worst:.2g} of its norm, allowed {tolerance:.2g})"
            )
        return worst

    def _programs(self) -> list[tuple[int, dict[str, Any]]]:
        """Tokens per stretch, and fields of the recipe: every program that a policy may ask for."""
        # Short stretches are scattered queries, long ones are rows (`attention.py`).
        return [
            (7, {}),
            (20, {}),
            (20, {"stock": True}),
            (7, {"top_k": 9}),
            (7, {"top_k": 9, "dense_layers": 1}),
            (7, {"dense_layers": len(self._stack)}),
            (7, {"top_k": 9, "dense_layers": 1, "score": Score.DEVIATION}),
            (7, {"top_k": 9, "score": Score.ALL_LAYERS}),
            (7, {"top_k": 9, "score": Score.PEAK, "least_share": 0.01}),
        ]

    def warm_up(self, prefill: SparsePrefill) -> None:
        """Passes of few active tokens, for which Triton compiles programs of other sizes."""
        for few in (1, 2, 4, 8):
            reused = np.ones(self._count, dtype=np.bool_)
            reused[: 3 * few : 3] = False
            prefill.run([self._plan(reused, {"top_k": 1})])

    def _plan(self, reused: np.ndarray, program: dict[str, Any]) -> ReusePlan:
        """A plan that takes some of the scratch tokens as they are, and computes the others."""
        size, where = self._block_size, np.flatnonzero(reused)
        new = {"always": ~reused, "probes": ~reused}
        pieces = np.stack(
            [where, np.ones_like(where), self._own[where // size], where % size, where], 1
        )
        return ReusePlan(
            "start-up proof",
            0,
            self._count,
            self._token_ids,
            pieces.astype(np.int32),
            Recipe(**new | {"dense_layers": 0, "top_k": 0} | program),
            self._own.tolist(),
            0,
            self._copy,
        )

    def _clear_copy(self) -> None:
        for layer in self._stack.attention:
            flat_pages(layer.kv_cache)[self._copy.tolist()] = 0

    def _deviation(self) -> float:
        worst = 0.0
        for layer in self._stack.attention:
            pages = flat_pages(layer.kv_cache)
            full, sparse = pages[self._own.tolist()].float(), pages[self._copy.tolist()].float()
            worst = max(worst, float((full - sparse).norm() / full.norm()))
        return worst


def _tolerance(dtype: torch.dtype) -> float:
    """How far two ways of computing the same may be apart, as a share of the norm."""
    tolerance = max(8 * torch.finfo(dtype).eps, 1e-4)
    return float(tolerance)


def _prove_rotation(
    layer: nn.Module,
    key: torch.Tensor,
    shifted: torch.Tensor,
    delta_rope: DeltaRope | None,
    distance: int,
) -> None:
    """`shifted` must be `key` rotated by `distance`, or equal to it where there is no rotation."""
    expected = key = key.view(-1, layer.num_kv_heads, layer.head_size)
    if delta_rope is not None:
        deltas = torch.full((len(key),), distance, device=key.device)
        expected = delta_rope.rotate(key, deltas)
    error = float((expected.float() - shifted.view_as(key).float()).norm() / key.float().norm())
    # The model rounds its cosines to its dtype; a wrong rotation is off by about 1.
    if not error < 16 * max(torch.finfo(key.dtype).eps, 2.0**-16):
        what = (
            "carries positions that no rotary module explains"
            if delta_rope is None
            else "does not turn with its position as its rotary module says"
        )
        raise RopeError(f"{layer.layer_name}: the cached key {what} (off by {error:.2g})")
