# SPDX-License-Identifier: Apache-2.0
"""Engines whose states cannot be composed as they should be do not start."""

from __future__ import annotations

import pytest

from tests.e2e.engine import engine
from tests.e2e.test_composed_states import SHAPE, SHIFT
from vllm_segreuse.engine.supported import RefusedError

pytestmark = pytest.mark.patches("gdn_attention")


def test_start_up_refuses_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in front of a segment goes on through it."""
    from segreuse_extras.states.layers import StateLayer, StateMap

    compose = StateLayer.compose

    def without(layer: StateLayer, block: int, segment: StateMap) -> None:
        compose(layer, block, StateMap(segment.product * 0, segment.added, segment.tail))

    monkeypatch.setattr(StateLayer, "compose", without)
    with (
        pytest.raises(RefusedError, match="a composed state is not that of the same tokens"),
        engine(SHAPE, segreuse=SHIFT),
    ):
        pass


def test_start_up_refuses_a_budget_below_one_map() -> None:
    with (
        pytest.raises(RefusedError, match=r"state_bytes=1000 holds nothing: what one segment"),
        engine(SHAPE, segreuse=SHIFT | {"state_bytes": 1000}),
    ):
        pass
