# SPDX-License-Identifier: Apache-2.0
"""Build the sparse pass for the loaded model and prove it at start-up, or refuse to start.

The proofs (`proofs/`) work on the model itself. What the configuration alone rules out is refused
earlier (`engine/supported.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from vllm.config import CompilationMode
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_segreuse.compat.lora_manager import Adapters
from vllm_segreuse.engine.kv_group import KvGroup, segment_group
from vllm_segreuse.engine.stage import Stage, stage_of
from vllm_segreuse.engine.supported import DRAFTS, WITHOUT, RefusedError
from vllm_segreuse.kernels import dispatch
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.pages import PageLayout
from vllm_segreuse.model.attention_kind import kind_of
from vllm_segreuse.model.drafts import Draft
from vllm_segreuse.model.fast_ops import FastOps
from vllm_segreuse.model.kv_format import check_format, typed_pages
from vllm_segreuse.model.kv_layout import PageLayoutError, discover_layout
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.layer_state import LayerState
from vllm_segreuse.model.layers import DecoderStack
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.positions import position_rows
from vllm_segreuse.model.rope import DeltaRope, RopeError, of_transformers
from vllm_segreuse.plan import ModelLayers
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.attention import PassAttention
from vllm_segreuse.prefill.backlog import Backlog
from vllm_segreuse.prefill.drafts import DraftRunner
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.layer_runner import (
    NOTHING,
    LayerRunner,
    PassSettings,
    model_layers,
)
from vllm_segreuse.prefill.proofs.attention import prove_attention
from vllm_segreuse.prefill.proofs.causal import (
    check_attention,
    check_scored,
    check_split_keys,
    sharing_layers,
)
from vllm_segreuse.prefill.proofs.codecs import prove_codec
from vllm_segreuse.prefill.proofs.drafts import DraftProof
from vllm_segreuse.prefill.proofs.graphs import GraphProof
from vllm_segreuse.prefill.proofs.long_contexts import prove_long_contexts
from vllm_segreuse.prefill.proofs.moves import prove_moves
from vllm_segreuse.prefill.proofs.passes import (
    prove_compiled,
    prove_passes,
    warm_up,
)
from vllm_segreuse.prefill.proofs.rotations import check_rotated_channels, prove_rotations
from vllm_segreuse.prefill.proofs.scores import prove_scores
from vllm_segreuse.prefill.proofs.scratch import Scratch, count_and_distance
from vllm_segreuse.prefill.rows import MOST_DECODES, RowBuilder
from vllm_segreuse.prefill.states import BoundaryStates
from vllm_segreuse.prefill.tables import BlockTables

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
        parts: what the pass is built of and was proven on, for proofs of features; None: it is that
            of one of several pipeline stages.
        graphs: proves CUDA graphs, once they are captured; None: passes run by none.
    """

    prefill: SparsePrefill
    max_deviation: float
    kernels: str
    parts: PassParts | None
    graphs: GraphProof | None


@dataclass(frozen=True)
class Structure:
    """What is known of a model before anything is computed with its weights.

    Attributes:
        group: its KV cache.
        attention: its attention layers, by name.
        stack: its decoder layers.
        stage: which of the model's these are.
        layouts: how each layer's pages are laid out.
        kernels: what runs on pages of each layout.
        draft: what drafts for it; None: nothing that has KV.
    """

    group: KvGroup
    attention: dict[str, nn.Module]
    stack: DecoderStack
    stage: Stage
    layouts: list[PageLayout]
    kernels: dict[PageLayout, dispatch.Kernels]
    draft: Draft | None = None

    @property
    def description(self) -> str:
        """Which kernels run, and why better ones do not."""
        return "; ".join(dict.fromkeys(chosen.description for chosen in self.kernels.values()))


def read_structure(
    model: nn.Module,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    drafter: Any | None = None,
) -> Structure:
    """Check the layers of a model, whose KV caches are bound. Its weights are not looked at.

    Args:
        model: as loaded.
        vllm_config: the engine's.
        kv_cache_config: vLLM's.
        drafter: vLLM's proposer of a draft that has KV.

    Raises:
        RefusedError: naming the layer and what it does.
    """
    group = segment_group(kv_cache_config)
    by_name = vllm_config.compilation_config.static_forward_context
    of_draft = set() if drafter is None else set(drafter._draft_attn_layer_names)
    try:
        sharing = sharing_layers(by_name, has_draft=bool(of_draft))
        others = of_draft | sharing.keys()
        attention = {
            name: layer
            for name, layer in by_name.items()
            if name in group.specs and name not in others
        }
        check_attention(attention, group.block_size)
        check_split_keys(attention)
        check_format(attention.values())
        stage = stage_of(vllm_config, len(attention))
        rows = position_rows(model, vllm_config.model_config)
        stack = DecoderStack(model, attention, rows, sharing, hands_on=not stage.is_last)
        check_rotated_channels(stack)
        if stage.is_first:
            check_scored(layers_of(stack, vllm_config.model_config.max_model_len), stage.num_stages)
        count_and_distance(stack.attention, group.block_size, vllm_config)
        layouts = [discover_layout(layer, group.block_size) for layer in stack.attention]
        draft = None if drafter is None else Draft(drafter, by_name, stack)
    except (PageLayoutError, UnsupportedModelError) as error:
        raise RefusedError(f"{error}{WITHOUT}") from error
    first, queries = typed_pages(stack.attention[0]), vllm_config.model_config.dtype
    kernels = {
        layout: dispatch.choose(first.device, first.dtype, layout, queries)
        for layout in dict.fromkeys(layouts)
    }
    return Structure(group, attention, stack, stage, layouts, kernels, draft)


def layers_of(stack: DecoderStack, max_model_len: int) -> ModelLayers:
    """A model's layers as programs see them, or those of one pipeline stage."""
    kinds = [kind_of(layer, max_model_len) for layer in stack.attention]
    return model_layers(kinds, len(stack.behind), is_last=not stack.hands_on)


class OtherStages(Protocol):
    """The other pipeline stages, to a worker of one of them: `linked` of a `stages.py` makes it,
    before anything can fail. After that no stage waits for a later one, and vLLM hears of errors in
    the order of ranks."""

    def exchange(self, scratch: Scratch) -> LayerState | None:
        """Give the scratch tokens what the stage before has made of them. Returns what the model
        hands on of them; None: this stage is the last."""

    def proven(self, parts: PassParts) -> tuple[SparsePrefill, float]:
        """The pass of this stage, whose states go to the next one, and the largest deviation.

        Raises:
            UnsupportedModelError: it could not be proven.
        """

    def backlog(self, prefill: SparsePrefill, step_work: int) -> Backlog:
        """What carries plans out together with the others.

        Args:
            step_work: layer-tokens in one step.
        """


def prove(
    model: nn.Module,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    cuts: Sequence[int] = (),
    codec: Codec = Codec.RAW,
    drafter: Any | None = None,
    stages: OtherStages | None = None,
) -> Runtime:
    """Build the sparse pass for a loaded model and prove it, on scratch blocks of the empty cache.

    Args:
        model: as loaded.
        vllm_config: the engine's.
        kv_cache_config: vLLM's; the caches are bound to their layers.
        cuts: layers whose inputs are kept from here on.
        codec: of the second tier.
        drafter: vLLM's proposer of a draft that has KV; None: there is none.
        stages: the other pipeline stages; None: there are none.

    Raises:
        RefusedError: naming the layer or the property that could not be proven.
    """
    _check_drafter(vllm_config, drafter)
    structure = read_structure(model, vllm_config, kv_cache_config, drafter)
    try:
        parts = _build(model, structure, vllm_config, kv_cache_config, cuts, codec, stages)
        if stages is not None:
            return Runtime(*stages.proven(parts), structure.description, None, None)
        prefill = SparsePrefill(parts.layers(), parts.aligner, parts.draft_runner)
        max_deviation = prove_parts(parts, prefill)
        graphs = None
        if may_run_compiled(vllm_config) and not structure.stack.behind:
            layers = parts.layers(compiled=True)
            prefill = SparsePrefill(layers, parts.aligner, parts.draft_runner)
            prove_compiled(parts.scratch, prefill, parts.draft_scratch)
            if structure.stack.position_rows is None:  # those would be other buffers
                graphs = GraphProof(parts.scratch, prefill, layers)
        return Runtime(prefill, max_deviation, structure.description, parts, graphs)
    except (PageLayoutError, RopeError, UnsupportedModelError) as error:
        raise RefusedError(f"{error}{WITHOUT}") from error


@dataclass(frozen=True)
class PassParts:
    """What the sparse pass of a model is built of, and proven on.

    Attributes:
        structure: of the model.
        scratch: tokens in blocks of the empty cache.
        rows: builds rows of the stock backend.
        settings: how layers run until they are proven: eagerly.
        states: what enters some of the layers; None: nothing is kept.
        ropes: rotation of each layer's keys.
        kv: what is known of the attention of each layer.
        attention: how the pass's queries attend.
        aligner: for the layers of the model and its draft.
        drafted: proves the draft; None: there is none.
        handed: what the model hands to the next pipeline stage of the scratch tokens; None: there
            is none.
    """

    structure: Structure
    scratch: Scratch
    rows: RowBuilder
    settings: PassSettings
    states: BoundaryStates | None
    ropes: list[DeltaRope | None]
    kv: list[LayerKv]
    attention: PassAttention
    aligner: Aligner
    drafted: DraftProof | None
    handed: LayerState | None

    def layers(self, compiled: bool = False) -> LayerRunner:
        """What runs the model's layers."""
        return LayerRunner(
            self.structure.stack,
            self.kv,
            self.attention,
            self.settings._replace(compiled=compiled),
            self.states,
            NOTHING if self.drafted is None else self.drafted.wanted,
            self.structure.stage,
        )

    @property
    def draft_runner(self) -> DraftRunner | None:
        """Computes the draft's KV in a pass."""
        return None if self.drafted is None else self.drafted.runner

    @property
    def draft_scratch(self) -> Scratch | None:
        """The same tokens, run by the draft."""
        return None if self.drafted is None else self.drafted.scratch


def _build(
    model: nn.Module,
    structure: Structure,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    cuts: Sequence[int],
    codec: Codec,
    stages: OtherStages | None,
) -> PassParts:
    """The parts of the pass. Rotations are proven on the way: layers are known by them."""
    group, stack, layouts = structure.group, structure.stack, structure.layouts
    most_rows = most_rows_of(vllm_config, structure.kernels)
    rows = RowBuilder(
        vllm_config,
        structure.attention,
        group.specs,
        most_rows,
        BlockTables(group.num_tables, group.block_size),
        group.tables,
    )
    adapters = Adapters(model)
    most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    settings = PassSettings(FastOps(model), adapters, most_tokens)
    num_blocks, stage = kv_cache_config.num_blocks, structure.stage
    scratch = Scratch(stack, layouts, rows, settings, group, num_blocks, vllm_config, stage)
    handed = None if stages is None else stages.exchange(scratch)
    # From here on: the model's own forward leaves them, too.
    states = _boundary_states(stack, cuts, group.block_size, kv_cache_config, vllm_config)
    ropes = prove_rotations(scratch, [] if stack.takes_positions else of_transformers(model))
    max_model_len = vllm_config.model_config.max_model_len
    kv = [
        LayerKv(
            layer,
            layout,
            rope,
            structure.kernels[layout],
            kind_of(layer, max_model_len),
            group.tables.get(layer.layer_name, 0),
        )
        for layer, layout, rope in zip(stack.attention, layouts, ropes, strict=True)
    ]
    drafted = None
    if structure.draft is not None:
        drafted = DraftProof(structure.draft, scratch, group, adapters, vllm_config)
    return PassParts(
        structure=structure,
        scratch=scratch,
        rows=rows,
        settings=settings,
        states=states,
        ropes=ropes,
        kv=kv,
        attention=PassAttention(rows, kv),
        aligner=Aligner(kv + ([] if drafted is None else drafted.layers), codec),
        drafted=drafted,
        handed=handed,
    )


def prove_parts(parts: PassParts, prefill: SparsePrefill) -> float:
    """What moves tokens, what scores them, and what computes them, on text and eagerly.

    Returns:
        The largest deviation of the sparse pass.
    """
    scratch, layouts, attention = parts.scratch, parts.structure.layouts, parts.attention
    prove_moves(scratch, parts.aligner, layouts, parts.ropes)
    prove_codec(scratch, parts.aligner, layouts, parts.ropes)
    prove_scores(scratch, parts.kv)
    if parts.drafted is not None:
        parts.drafted.prove(parts.aligner)
    max_deviation = prove_passes(scratch, prefill, parts.draft_scratch)
    prove_attention(scratch, parts.kv, parts.rows, attention)
    warm_up(scratch, prefill)
    if attention.splits_keys:
        with attention.splitting_keys(2):
            prove_attention(scratch, parts.kv, parts.rows, attention)
            warm_up(scratch, prefill)
    prove_long_contexts(parts.kv, scratch.dtype)
    return max_deviation


def _check_drafter(vllm_config: VllmConfig, drafter: Any | None) -> None:
    """A draft must be at hand: its layers would be taken for the model's.

    Raises:
        RefusedError: it is not.
    """
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method in DRAFTS and drafter is None:
        raise RefusedError(
            f"the draft of speculative decoding by {speculative.method} is not where vLLM's Model "
            "Runner V1 has it; set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def _boundary_states(
    stack: DecoderStack,
    cuts: Sequence[int],
    block_size: int,
    kv_cache_config: KVCacheConfig,
    vllm_config: VllmConfig,
) -> BoundaryStates | None:
    """Those of the whole KV cache, where any are kept."""
    if not cuts:
        return None
    model = vllm_config.model_config
    slots, device = kv_cache_config.num_blocks * block_size, stack.attention[0].kv_cache.device
    return BoundaryStates(stack, cuts, slots, model.get_hidden_size(), model.dtype, device)


def most_rows_of(vllm_config: VllmConfig, kernels: Mapping[PageLayout, dispatch.Kernels]) -> int:
    """Most rows of active tokens that the stock backend is given at once."""
    scheduler = vllm_config.scheduler_config
    tokens = scheduler.max_num_batched_tokens
    if any(it.sparse_attention is None and not page.latent for page, it in kernels.items()):
        return tokens
    # Long on average, or, in the exact tier, whole blocks and one end of each plan.
    rows = tokens // dispatch.LONG_RUN + scheduler.max_num_seqs + 1
    return max(rows, MOST_DECODES) if any(page.latent for page in kernels) else rows


def may_run_compiled(vllm_config: VllmConfig) -> bool:
    """Whether there is a compiled model that takes token ids and positions, and nothing else of
    the runner's.

    Pipeline stages stop between their layers. Multimodal models take embeddings; experts count
    their calls, and take a mask of the padding; layers with adapters read the step's mapping; and
    where vLLM has fused attention with the quantisation of its output, the kernels of the pass
    would be given an output in fp8.
    """
    model = vllm_config.model_config
    compilation = vllm_config.compilation_config
    eager = compilation.mode == CompilationMode.NONE or compilation.pass_config.fuse_attn_quant
    adapted = vllm_config.lora_config is not None
    staged = vllm_config.parallel_config.pipeline_parallel_size > 1
    return not (eager or adapted or staged or model.is_multimodal_model or model.is_moe)
