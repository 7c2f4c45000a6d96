# SPDX-License-Identifier: Apache-2.0
"""Composed states are those of sequential computation: proven on the loaded model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from segreuse_extras.states.layers import StateLayers
from segreuse_extras.states.messages import CaptureOrder, Placed, PlanStates
from segreuse_extras.states.prefill import StatesPrefill
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan import Pieces, Recipe, ReusePlan
from vllm_segreuse.prefill.proofs.scratch import Scratch, relative_error, tolerance

_REQUEST = "proof"
_SHORT, _BETWEEN = 24, 40
"""Tokens of segments, and of what is computed between them. So few that heads still remember what
is in front: of longer ones a wrong product would hardly show."""


def prove_states(scratch: Scratch, prefill: StatesPrefill, running: Sequence[int]) -> float:
    """Compute the scratch tokens as one sequence, and note maps of two segments; then with these
    moved and composed, and what is between them computed from the composed state.

    Args:
        scratch: random tokens.
        prefill: what is proven.
        running: a block of each group of states that nobody has.

    Returns:
        The largest deviation of a state or of KV, as a share of the norm.

    Raises:
        UnsupportedModelError: naming the layer.
    """
    first = scratch.count // 3
    stop = first + 2 * _SHORT + _BETWEEN
    if scratch.count < stop:
        raise UnsupportedModelError(
            f"{scratch.count} tokens are too few to prove states on; raise --max-model-len"
        )
    segments = (
        Placed(0, first, first + _SHORT),
        Placed(1, stop - _SHORT, stop),
    )
    layers, captures = prefill.state_layers, prefill.captures
    scratch.clear_own()
    scratch.clear_copy()
    captures.order([CaptureOrder(it.segment, _REQUEST, it.first, it.stop) for it in segments])
    _run(prefill, _plan(scratch, scratch.own, stop, ()), PlanStates((), tuple(running), ()))
    noted = captures.take()
    if noted is None or {*noted.complete} != {0, 1}:
        raise UnsupportedModelError("what segments change of states was not noted")
    expected = _states(layers, running)
    layers.begin(running, ())
    reusing = PlanStates(segments, tuple(running), ())
    _run(prefill, _plan(scratch, scratch.copy, stop, segments), reusing)
    found = _states(layers, running)
    captures.drop([0, 1])
    worst = 0.0
    for layer, (state, inputs), (wanted, last) in zip(layers.layers, found, expected, strict=True):
        errors = relative_error(state, wanted), relative_error(inputs, last)
        worst = max(worst, *errors)
        if not max(errors) <= tolerance(scratch.dtype):
            raise UnsupportedModelError(
                f"{layer.name}: a composed state is not that of the same tokens read one after the "
                f"other (off by {errors[0]:.2g} of its norm, its last inputs by {errors[1]:.2g})"
            )
    return max(worst, _kv_between(scratch, segments[0].stop, segments[1].first))


def _states(layers: StateLayers, running: Sequence[int]) -> list[tuple]:
    blocks = [(layer, running[layer.group]) for layer in layers.layers]
    return [(layer.state(block), layer.inputs(block)) for layer, block in blocks]


def _run(prefill: StatesPrefill, plan: ReusePlan, given: PlanStates) -> None:
    prefill.given = {_REQUEST: given}
    report = prefill.run([plan])
    prefill.given = {}
    if report.not_finite:
        raise UnsupportedModelError("composed states have led to NaN or infinity")


def _plan(scratch: Scratch, blocks: np.ndarray, stop: int, segments: Sequence[Placed]) -> ReusePlan:
    """Of the scratch tokens up to some position, whose segments are in the blocks of their own."""
    size = scratch.block_size
    rows = list[list[int]]()
    for segment in segments:
        at = segment.first
        while at < segment.stop:
            length = min(segment.stop, (at // size + 1) * size) - at
            rows.append([at, length, int(scratch.own[at // size]), at % size, at])
            at += length
    pieces = Pieces.from_table(rows)
    recipe = Recipe.without_choice(~pieces.reused(0, stop))
    return ReusePlan(
        request_id=_REQUEST,
        start=0,
        stop=stop,
        token_ids=scratch.token_ids[:stop],
        pieces=pieces,
        recipe=recipe,
        donor_blocks=[],
        donor_depth=0,
        block_ids=np.asarray(blocks, np.int32),
    )


def _kv_between(scratch: Scratch, first: int, stop: int) -> float:
    """How far the KV of what was computed behind a composed state is off, at the worst layer.

    Raises:
        UnsupportedModelError: further than rounding explains.
    """
    worst = 0.0
    for layer, layout in zip(scratch.stack.attention, scratch.layouts, strict=True):
        pages = typed_pages(layer)
        for part in (layout.keys, layout.values):
            both = [
                part.tokens(pages[blocks.tolist()])[first:stop]
                for blocks in (scratch.own, scratch.copy)
            ]
            error = relative_error(both[1], both[0])
            worst = max(worst, error)
            if not error <= tolerance(scratch.dtype):
                raise UnsupportedModelError(
                    f"{layer.layer_name}: keys or values behind a composed state are not those of "
                    f"the model (off by {error:.2g} of their norm)"
                )
    return worst
