# SPDX-License-Identifier: Apache-2.0
"""Composed states are those of sequential computation, also where segments are read again: proven
on the loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from segreuse_extras.states.again import ReadAgain
from segreuse_extras.states.layers import HeldStates, SegmentMap, StateLayers
from segreuse_extras.states.messages import CaptureOrder, Placed, PlanStates
from segreuse_extras.states.prefill import StatesPrefill
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.plan import BoolArray, Pieces, Recipe, ReusePlan, fates_of
from vllm_segreuse.prefill.proofs.scratch import Scratch, relative_error, tolerance

_REQUEST = "proof"
_MOST = 2
"""A state may be off by so many times as much as if the same tokens are read in other chunks, with
states rounded as maps are: in deep models rounding adds up, of which composing does no more."""
_SHORT, _BETWEEN, _QUESTION = 24, 40, 16
"""Tokens of segments, of what is computed between them, and of the question. Segments are so short
that heads still remember what is in front: of longer ones a wrong product would hardly show."""


class _Reading(NamedTuple):
    """What becomes of the two segments.

    Attributes:
        read: numbers of those that are read again; their maps and their KV are spoilt before.
        asks: whether the question is read.
        what: is wrong if states or KV are others.
    """

    read: tuple[int, ...]
    asks: bool
    what: str


_READINGS = (
    _Reading((), False, "a composed state"),
    _Reading((), True, "a state behind a question that chose nothing"),
    _Reading((0,), True, "a state composed behind a segment that was read again"),
    _Reading((1,), True, "a state of a segment that was read again behind a composed one"),
    _Reading((0, 1), True, "a state of segments that were read again"),
)


def prove_states(scratch: Scratch, prefill: StatesPrefill, running: Sequence[int]) -> float:
    """Compute the scratch tokens as one sequence, and note maps of two segments; then with these
    moved and composed, or read again, and what is between them computed from the composed state.

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
    if scratch.count < stop + _QUESTION:
        raise UnsupportedModelError(
            f"{scratch.count} tokens are too few to prove states on; raise --max-model-len"
        )
    segments = (
        Placed(0, first, first + _SHORT),
        Placed(1, stop - _SHORT, stop),
    )
    layers, captures = prefill.state_layers, prefill.captures
    scratch.clear_own()
    captures.order([CaptureOrder(it.segment, _REQUEST, it.first, it.stop) for it in segments])
    in_order = _plan(scratch, scratch.own, stop, Pieces.from_table([]))
    _run(prefill, in_order, PlanStates((), tuple(running), ()))
    noted = captures.take()
    if noted is None or {*noted.complete} != {0, 1}:
        raise UnsupportedModelError("what segments change of states was not noted")
    expected, maps, worst = layers.held(running), dict(captures.maps), 0.0
    given = PlanStates(segments, tuple(running), ())
    _read_rounded(scratch, prefill, given, stop)
    usual = _deviations(scratch, layers, layers.held(running), expected, segments)
    for reading in _READINGS:
        scratch.clear_copy()
        captures.maps.update({number: _spoilt(maps[number]) for number in reading.read})
        _run(prefill, _reusing(scratch, stop, segments, reading), given)
        captures.maps.update(maps)
        found = _deviations(scratch, layers, layers.held(running), expected, segments)
        for name, off in found.items():
            if not off <= max(tolerance(scratch.dtype), _MOST * usual[name]):
                kind = "a state, or its last inputs," if name in layers.index else "keys or values"
                raise UnsupportedModelError(
                    f"{name}: {reading.what} is not that of the same tokens read one after the "
                    f"other ({kind} off by {off:.2g} of their norm; read in other chunks, and "
                    f"rounded between them, by {usual[name]:.2g})"
                )
        worst = max(worst, *found.values())
    captures.drop([0, 1])
    return worst


@torch.inference_mode()
def _read_rounded(scratch: Scratch, prefill: StatesPrefill, given: PlanStates, stop: int) -> None:
    """Compute the same tokens into the other blocks, in chunks that end where segments do. Behind
    a segment states are rounded as its map is: the kernel may read the same bits in any chunks."""
    scratch.clear_copy()
    layers = prefill.state_layers
    layers.begin(given.running, ())
    prefill.given = {_REQUEST: given}
    plan = _plan(scratch, scratch.copy, stop, Pieces.from_table([]))
    ends = (0, *(end for it in given.segments for end in (it.first, it.stop)))
    for at, end in pairwise(ends):
        prefill.compute_stretch(plan, at, end)
        if any(end == it.stop for it in given.segments):
            layers.round(given.running)
    prefill.given = {}


def _run(prefill: StatesPrefill, plan: ReusePlan, given: PlanStates) -> None:
    prefill.given = {_REQUEST: given}
    report = prefill.run([plan])
    prefill.given = {}
    if report.not_finite:
        raise UnsupportedModelError("composed states have led to NaN or infinity")


def _spoilt(segment: SegmentMap) -> SegmentMap:
    return [it.each(torch.zeros_like) for it in segment]


def _plan(scratch: Scratch, blocks: np.ndarray, stop: int, pieces: Pieces) -> ReusePlan:
    """Of the scratch tokens up to some position; pieces are copied, the rest is computed."""
    return ReusePlan(
        request_id=_REQUEST,
        start=0,
        stop=stop,
        token_ids=scratch.token_ids[:stop],
        pieces=pieces,
        recipe=Recipe.without_choice(~pieces.reused(0, stop)),
        donor_blocks=[],
        donor_depth=0,
        block_ids=np.asarray(blocks, np.int32),
    )


def _reusing(
    scratch: Scratch, stop: int, segments: Sequence[Placed], reading: _Reading
) -> ReusePlan:
    """Whose segments are in the blocks of their own; those that are read again get the KV of other
    tokens first."""
    rows = list[list[int]]()
    for number, segment in enumerate(segments):
        behind = segment.first if number in reading.read else 0
        rows += _rows(scratch, segment, behind)
    plan = _plan(scratch, scratch.copy, stop, Pieces.from_table(rows))
    if not reading.asks:
        return plan
    read = np.zeros(stop, np.bool_)
    for number in reading.read:
        read[segments[number].first : segments[number].stop] = True
    plan.recipe = _choosing(plan.reused, read)
    plan.suffix = scratch.token_ids[stop : stop + _QUESTION]
    return plan


def _rows(scratch: Scratch, segment: Placed, behind: int) -> list[list[int]]:
    """Pieces of a segment, of the tokens that stand so many positions in front of its own."""
    rows, at, size = list[list[int]](), segment.first, scratch.block_size
    while at < segment.stop:
        source = at - behind
        length = min(segment.stop - at, size - source % size)
        rows.append([at, length, int(scratch.own[source // size]), source % size, source])
        at += length
    return rows


def _choosing(reused: BoolArray, read: BoolArray) -> Recipe:
    """That leaves no choice but to read some tokens again; or none, where nothing would fit."""
    if not read.any():
        return Recipe.of(ReadAgain(1), fates_of(~reused), 1)
    count = int(read.sum())
    return Recipe.of(ReadAgain(count), fates_of(~reused, None, reused & ~read), count)


def _deviations(
    scratch: Scratch,
    layers: StateLayers,
    found: HeldStates,
    expected: HeldStates,
    segments: Sequence[Placed],
) -> dict[str, float]:
    """By layer, how far its state and what is kept of its short convolution are off, or the KV of
    segments and of what is between them: the larger of both."""
    off = {
        layer.name: max(relative_error(*both) for both in zip(held, wanted, strict=True))
        for layer, held, wanted in zip(layers.layers, found, expected, strict=True)
    }
    part = slice(segments[0].first, segments[-1].stop)
    for layer, layout in zip(scratch.stack.attention, scratch.layouts, strict=True):
        pages = typed_pages(layer)
        own, copy = (pages[blocks.tolist()] for blocks in (scratch.own, scratch.copy))
        off[str(layer.layer_name)] = max(
            relative_error(it.tokens(copy)[part], it.tokens(own)[part])
            for it in (layout.keys, layout.values)
        )
    return off
