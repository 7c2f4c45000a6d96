# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 (Granite 4 H, Nemotron-H, Falcon-H1): its states are composed as those of
Qwen3-Next are, whose tests run once more on shapes of these, in processes of their own."""

from __future__ import annotations

import pytest

from bench.shapes import STATES_OF_MAMBA2
from tests.e2e.engine import NAMESPACE, engine
from tests.e2e.test_composed_states import LENGTHS, NOISE, World, check, texts
from tests.e2e.test_equality import assert_same
from tests.e2e.test_qwen3_5_states import run_tests

pytestmark = pytest.mark.patches("mamba_mixer2")


@pytest.mark.slow("other shapes, and all tests of each", instead="e2e/test_composed_kinds")
@pytest.mark.timeout(1800)
@pytest.mark.shows("states")
@pytest.mark.parametrize("shape", STATES_OF_MAMBA2)
def test_what_holds_of_qwen3_next_holds_of_mamba_2(shape: str) -> None:
    run_tests(shape)


@pytest.mark.slow("states in bfloat16, which units show, too", instead="e2e/test_composed_kinds")
def test_states_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM keeps them on lesser CPUs: start-up proves them, too."""
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    asked = {"mamba_ssm_cache_dtype": "bfloat16"}
    with engine("granite_4_h", segreuse=False, enable_prefix_caching=False, **asked) as plain:
        _, _, prompt, _ = texts(plain.vocab_size)
        full = plain.ask(prompt)
    with engine("granite_4_h", segreuse={"policy": "shift"}, **asked) as running:
        world = World(full, running)
        world.read()
        world.forget_prefix(len(prompt))
        [found] = running.ask(prompt, options=NAMESPACE)
        assert found.report["reused_tokens"] == sum(LENGTHS)
        assert_same(found, full[0], NOISE)
        check(running)
