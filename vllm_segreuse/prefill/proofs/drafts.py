# SPDX-License-Identifier: Apache-2.0
"""The draft of speculative decoding: its rotations, its attention, and its KV after a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_segreuse.compat.lora_manager import Adapters
from vllm_segreuse.engine.kv_group import KvGroup
from vllm_segreuse.kernels import dispatch
from vllm_segreuse.model.attention_kind import kind_of
from vllm_segreuse.model.drafts import Draft
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.kv_format import check_format, typed_pages
from vllm_segreuse.model.kv_layout import discover_layout
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.rope import DeltaRope
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.drafts import DraftRunner
from vllm_segreuse.prefill.layer_runner import ForDrafts, PassSettings
from vllm_segreuse.prefill.proofs.attention import prove_attention
from vllm_segreuse.prefill.proofs.causal import check_attention, check_split_keys
from vllm_segreuse.prefill.proofs.moves import prove_moves
from vllm_segreuse.prefill.proofs.rotations import prove_rotations
from vllm_segreuse.prefill.proofs.scratch import Scratch
from vllm_segreuse.prefill.rows import RowBuilder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class DraftProof:
    """What is known of a draft, and how it is proven, beside its target.

    Args:
        draft: as loaded; its KV caches are bound.
        target: the target's, on the same scratch blocks.
        group: the KV cache of both.
        adapters: of the target.
        vllm_config: the engine's.

    Attributes:
        layers: of the draft.
        runner: computes its KV in a pass.
        scratch: the same tokens, run by the draft.

    Raises:
        UnsupportedModelError, LayoutError, RopeError: naming the layer and what it does.
    """

    def __init__(
        self,
        draft: Draft,
        target: Scratch,
        group: KvGroup,
        adapters: Adapters,
        vllm_config: VllmConfig,
    ) -> None:
        by_name = dict(zip(draft.names, draft.attention, strict=True))
        check_attention(by_name, group.block_size)
        check_split_keys(by_name)
        check_format(draft.attention)
        self._draft, self._target = draft, target
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._rows = RowBuilder(vllm_config, by_name, group.specs, most_tokens)
        settings = PassSettings(FastOps(draft.model), adapters, most_tokens)
        size, blocks = group.block_size, int(draft.attention[0].kv_cache.shape[0])
        self._layouts = [discover_layout(layer, size) for layer in draft.attention]
        self.scratch = Scratch(
            draft, self._layouts, self._rows, settings, group, blocks, vllm_config
        )
        self.scratch.distance -= 1  # positions begin one later than the target's
        needed = self.scratch.count + self.scratch.distance + 1
        if draft.max_positions < needed:
            raise UnsupportedModelError(
                f"the draft takes {draft.max_positions} positions, the proof needs {needed}"
            )
        self._ropes = self._rotations()
        pages, dtype = typed_pages(draft.attention[0]), vllm_config.model_config.dtype
        most = vllm_config.model_config.max_model_len
        self.layers = [
            LayerKv(
                layer,
                layout,
                rope,
                dispatch.choose(pages.device, pages.dtype, layout, dtype),
                kind_of(layer, most),
            )
            for layer, layout, rope in zip(draft.attention, self._layouts, self._ropes, strict=True)
        ]
        self._attention = PassAttention(self._rows, self.layers)
        self.runner = DraftRunner(draft, self._attention, most_tokens)

    @property
    def wanted(self) -> ForDrafts:
        """What the target's pass has to give to it."""
        auxiliary = self._draft.auxiliary_layers
        return ForDrafts(self._draft.takes_states and not auxiliary, auxiliary)

    @torch.inference_mode()
    def _rotations(self) -> list[DeltaRope | None]:
        """As of the target. MTP masks what is at position 0: all begin one later."""
        self._give_states()
        seen = _Counted(self._draft.attention)
        self._draft.first = 1
        try:
            with seen:
                self.scratch.forward()
            if seen.idle:
                raise UnsupportedModelError(
                    f"{', '.join(seen.idle)} of the draft is not run, so that its KV cannot be "
                    "compared"
                )
            return prove_rotations(self.scratch)
        finally:
            self._draft.first = 0

    def _give_states(self) -> None:
        """The target's own, from its own forward."""
        output, auxiliary = self._target.states_for_drafts()
        states = torch.cat(auxiliary, -1) if self._draft.auxiliary_layers else output
        self._draft.given = self._draft.combined(states) if self._draft.takes_states else None

    @torch.inference_mode()
    def prove(self, aligner: Aligner) -> None:
        """Moves and attention. Leaves in the tokens' own blocks what vLLM's proposer would write
        there: what passes are compared with."""
        prove_moves(self.scratch, aligner, self._layouts, self._ropes)
        prove_attention(self.scratch, self.layers, self._rows, self._attention)
        self._give_states()
        token_ids = self.scratch.token_ids
        if self._draft.takes_states:
            self.scratch.token_ids = token_ids.take(range(1, len(token_ids) + 1), mode="wrap")
        try:
            self.scratch.forward()
        finally:
            self.scratch.token_ids = token_ids
            self._draft.given = None


class _Counted:
    """Which attention layers run inside the block.

    Attributes:
        idle: names of those that have not.
    """

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        self._layers = layers
        self.idle = [str(layer.layer_name) for layer in layers]

    def __enter__(self) -> _Counted:
        self._handles = [layer.register_forward_pre_hook(self._note) for layer in self._layers]
        return self

    def _note(self, layer: torch.nn.Module, _: object) -> None:
        if layer.layer_name in self.idle:
            self.idle.remove(layer.layer_name)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
