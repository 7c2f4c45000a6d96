# SPDX-License-Identifier: Apache-2.0
"""Engines whose states cannot be composed as they should be do not start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.shapes import STATES_OF_CONVOLUTIONS
from tests.e2e.engine import engine
from tests.e2e.test_composed_states import SHAPE, SHIFT
from vllm_segreuse.engine.supported import RefusedError

pytestmark = pytest.mark.patches("gdn_attention")


def shapes(another: str) -> pytest.MarkDecorator:
    """And a shape of another kind, unless one was named."""
    return pytest.mark.parametrize("shape", [SHAPE, another] if SHAPE == "qwen3_next" else [SHAPE])


@pytest.mark.skipif(SHAPE in STATES_OF_CONVOLUTIONS, reason="nothing is multiplied")
@shapes("granite_4_h")
def test_start_up_refuses_a_wrong_product(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in front of a segment goes on through it."""
    from segreuse_extras.states.recurrent import AffineMap, RecurrentLayer

    compose = RecurrentLayer.compose

    def without(layer: RecurrentLayer, block: int, segment: AffineMap) -> None:
        compose(layer, block, replace(segment, product=segment.product * 0))

    monkeypatch.setattr(RecurrentLayer, "compose", without)
    with (
        pytest.raises(RefusedError, match="a composed state is not that of the same tokens"),
        engine(shape, segreuse=SHIFT),
    ):
        pass


@pytest.mark.parametrize("what", ["others", "in front"])
@shapes("lfm2")
def test_start_up_refuses_wrong_last_inputs(
    shape: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a segment, the convolution behind it sees the last inputs: not the first ones, nor those
    in front of it."""
    from segreuse_extras.states.layers import StateLayer, StateMap

    compose = StateLayer.compose

    def wrongly(layer: StateLayer, block: int, segment: StateMap) -> None:
        tail = segment.tail[:0] if what == "in front" else segment.tail.flip(0)
        compose(layer, block, replace(segment, tail=tail))

    monkeypatch.setattr(StateLayer, "compose", wrongly)
    with (
        pytest.raises(RefusedError, match="a composed state is not that of the same tokens"),
        engine(shape, segreuse=SHIFT),
    ):
        pass


def test_start_up_refuses_the_state_of_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left must not be gone on from."""
    from segreuse_extras.states.layers import StateLayers

    monkeypatch.setattr(StateLayers, "restore", lambda *_: None)
    with (
        pytest.raises(RefusedError, match="a state behind a question that chose nothing is not"),
        engine(SHAPE),
    ):
        pass


def test_start_up_refuses_a_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind a segment that is read again is composed behind it."""
    from segreuse_extras.states.prefill import StatesPrefill

    go_on = StatesPrefill.go_on

    def composed_first(
        prefill: StatesPrefill, plan: Any, at: int, composed: Any, fronts: Any = None
    ) -> bool:
        if fronts is not None:
            return go_on(prefill, plan, at, composed, fronts)
        for it in composed:
            running = prefill.given[plan.request_id].running
            prefill.state_layers.compose(running, prefill.captures.maps[it.segment])
        with monkeypatch.context() as patch:
            patch.setattr(prefill.state_layers, "compose", lambda *_: None)
            return go_on(prefill, plan, at, composed)

    monkeypatch.setattr(StatesPrefill, "go_on", composed_first)
    with (
        pytest.raises(RefusedError, match="a state composed behind a segment that was read again"),
        engine(SHAPE),
    ):
        pass


def test_start_up_refuses_a_question_whose_attention_is_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from segreuse_extras.states.question import Question

    monkeypatch.setattr(Question, "chunk_of", lambda *_: None)
    with pytest.raises(RefusedError, match="NaN or infinity"), engine(SHAPE):
        pass


def test_start_up_refuses_a_budget_below_one_map() -> None:
    with (
        pytest.raises(RefusedError, match=r"state_bytes=1000 holds nothing: what one segment"),
        engine(SHAPE, segreuse=SHIFT | {"state_bytes": 1000}),
    ):
        pass


def test_start_up_allows_what_rounding_is_off_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds up over layers: states of a random model of 32 layers are off by more than two
    kernels differ by, composed ones no more than others. As if this one were as deep."""
    monkeypatch.setattr("segreuse_extras.states.proof.tolerance", lambda dtype: 1e-4)
    with engine(SHAPE, segreuse=SHIFT):
        pass
