# SPDX-License-Identifier: Apache-2.0
"""Every program reproduces the KV of the model's own forward."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from vllm_segreuse.engine.stage import Stage
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.model.kv_format import is_fp8, stored_dtype, typed_pages
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan import (
    BoolArray,
    Boundary,
    Fixed,
    ModelLayers,
    OtherTable,
    Pieces,
    Program,
    Recipe,
    ReusePlan,
    fates_of,
    staged,
)
from vllm_segreuse.prefill import programs
from vllm_segreuse.prefill.executor import SparsePrefill
from vllm_segreuse.prefill.programs.base import SHORT_STRETCH, ProofCase
from vllm_segreuse.prefill.proofs.scratch import Scratch, relative_error, tolerance

_MOST = 0.5
"""What is not rounded but wrong is off by more."""
_TIMES_ROUNDING = 2
_TIMES_ROUNDING_FP8 = 4
"""The worst of all passes may be so much further off than one forward that is rounded otherwise. In
bf16 passes were 0.6 to 1.3 times as far off on eleven models, of which three are pretrained; in fp8
at most 2.8 times (values of Qwen2.5-Coder 0.5B in e4m3: 0.29 and 0.10)."""


@torch.inference_mode()
def prove_passes(scratch: Scratch, prefill: SparsePrefill, drafted: Scratch | None = None) -> float:
    """Plans that reuse every other stretch unmoved must reproduce the KV of the full forward.

    Covers copying, rows, slot mapping, the layer loop, the boundary, the selection, and what enters
    from boundary states. Also warms up everything the first request would otherwise wait for.

    Args:
        drafted: that of the draft, whose KV a pass computes, too, and compared with its own.

    Returns:
        The largest deviation of a layer's keys or values, relative to their norm.
    """
    plans = [_plan_of(scratch, case) for case in _cases(scratch.stage)]
    reused = (np.arange(scratch.count) // SHORT_STRETCH) % 2 == 1
    for cut in () if prefill.states is None else prefill.states.cuts:
        plan = plan_of(scratch, reused, Fixed(), 0)
        enters = np.where(reused, cut, -1).astype(np.int32)
        plans.append(replace(plan, recipe=staged(plan.recipe, enters)))
    return _prove("the sparse pass", plans, scratch, prefill, drafted)


@torch.inference_mode()
def prove_compiled(scratch: Scratch, prefill: SparsePrefill, drafted: Scratch | None) -> None:
    """Passes through all layers reproduce that KV also as vLLM has compiled the model, whose own
    forward is eager here.

    Args:
        drafted: see `prove_passes`.

    Raises:
        RefusedError: they do not.
    """
    cases = [
        case
        for case in programs.proof_cases(len(scratch.stack))
        if not (case.program.dense_layers or case.program.cuts)
    ]
    plans = [_plan_of(scratch, case) for case in cases]
    try:
        _prove("the compiled sparse pass", plans, scratch, prefill, drafted)
    except UnsupportedModelError as error:
        raise RefusedError(f"{error}; start without compiled code: --enforce-eager") from error


def _cases(stage: Stage) -> list[ProofCase]:
    """Of what this stage runs: a program on the first, what that hands on on the others."""
    cases = programs.proof_cases(stage.num_layers)
    if stage.num_stages == 1:
        return cases
    layers = ModelLayers.of_full_attention(stage.num_layers)
    most = stage.stop if stage.is_first else 0
    return [case for case in cases if case.program.layers_before_choice(layers) <= most]


def _plan_of(scratch: Scratch, case: ProofCase) -> ReusePlan:
    reused = (np.arange(scratch.count) // case.stretch) % 2 == 1
    return plan_of(scratch, reused, case.program, case.top_k)


def _prove(
    what: str,
    plans: list[ReusePlan],
    scratch: Scratch,
    prefill: SparsePrefill,
    drafted: Scratch | None,
) -> float:
    """Run plans, one after the other; the largest deviation."""
    allowed, worst = allowed_deviation(scratch), 0.0
    both = [scratch] if drafted is None else [scratch, drafted]
    for plan in plans:
        for each in both:
            each.clear_copy()
        if prefill.run([plan]).not_finite:
            raise UnsupportedModelError(f"{what} meets NaN or infinity ({plan.recipe.program})")
        worst = max(worst, *map(deviation, both))
    require_equal(what, worst, allowed)
    return worst


def require_equal(what: str, found: float, allowed: float) -> None:
    """Raises UnsupportedModelError if the deviation of what computed the KV is not allowed."""
    if not found <= allowed:
        raise UnsupportedModelError(
            f"{what} does not reproduce this model's own forward (off by {found:.2g} of its norm, "
            f"allowed {allowed:.2g})"
        )


def warm_up(scratch: Scratch, prefill: SparsePrefill) -> None:
    """Passes of few active tokens, for which Triton compiles programs of other sizes."""
    for few in (1, 2, 4, 8, 16):
        reused = np.ones(scratch.count, dtype=np.bool_)
        reused[: 3 * few : 3] = False
        prefill.run([plan_of(scratch, reused, Boundary(), top_k=1)])


def plan_of(scratch: Scratch, reused: BoolArray, program: Program, top_k: int) -> ReusePlan:
    """A plan that takes some of the scratch tokens as they are, and computes the others."""
    size, where = scratch.block_size, np.flatnonzero(reused)
    pieces = np.stack(
        [where, np.ones_like(where), scratch.own[where // size], where % size, where], 1
    )
    return ReusePlan(
        "start-up proof",
        0,
        scratch.count,
        scratch.token_ids,
        Pieces.from_table(pieces),
        Recipe.of(program, fates_of(~reused, probes=~reused), top_k),
        scratch.own.tolist(),
        0,
        scratch.copy,
        token_at_stop=int(scratch.token_ids[0]),
        mrope_positions=scratch.mrope_positions,
        others=tuple(
            OtherTable(scratch.copy_in(table), scratch.own_in(table)[where // size])
            for table in range(1, scratch.num_tables)
        ),
    )


def allowed_deviation(scratch: Scratch) -> float:
    """How far KV may be from that of the model's own forward.

    Where two experts are nearly equal, rounding decides which of them computes a token; and fp8
    rounds numbers that are nearly equal to others that are far apart. Each layer attends to what
    the layers before made of that. So what rounding does to this model is measured.
    """
    scratch.clear_copy()
    scratch.forward_rounded_otherwise()
    stored = stored_dtype(scratch.stack.attention[0])
    least, times = tolerance(stored), _TIMES_ROUNDING
    if is_fp8(stored):
        # Numbers apart by e are stored a step apart in e / step of all cases.
        least = math.sqrt(tolerance(scratch.dtype) * torch.finfo(stored).eps)
        times = _TIMES_ROUNDING_FP8
    return min(max(least, times * deviation(scratch)), _MOST)


def deviation(scratch: Scratch) -> float:
    """How far the copy's keys or values are from the tokens' own, at the worst layer.

    Each by its own norm: keys with a large bias would hide values.
    """
    worst = 0.0
    layers = zip(scratch.stack.attention, scratch.layouts, scratch.tables, strict=True)
    for layer, layout, table in layers:
        pages = typed_pages(layer)
        for part in (layout.keys, layout.values):
            found, expected = (
                part.tokens(pages[blocks.tolist()])[: scratch.count]
                for blocks in (scratch.copy_in(table), scratch.own_in(table))
            )
            error = relative_error(found, expected)
            worst = max(worst, math.inf if math.isnan(error) else error)
    return worst
