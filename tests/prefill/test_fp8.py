# SPDX-License-Identifier: Apache-2.0
"""What a pass reads of fp8 caches are keys and values, not the numbers that stand for them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.test_programs import (
    CHANNELS,
    HEADS,
    SIZE,
    TOKENS,
    Known,
    batch_of,
    plan,
)
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.plan import Deviation, Gather
from vllm_segreuse.prefill import programs, selection
from vllm_segreuse.prefill.attention import Queries
from vllm_segreuse.prefill.chunks import finish
from vllm_segreuse.prefill.drift import PER_TOKENS, MovedValues
from vllm_segreuse.prefill.layer_runner import LayerRunner

KINDS = pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "get_tp_group", lambda: SimpleNamespace(world_size=1))


def quantised(kind: str, key: float = 0.5, value: float = 0.125) -> Any:
    """`Known` in fp8: every layer has one cache of small numbers, and scales."""
    layers = Known()
    numbers = torch.randn(2 * TOKENS // SIZE, 2, HEADS, SIZE, CHANNELS)
    dtype = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
    cache = numbers.to(dtype).view(torch.uint8)
    for layer in layers.stack.attention:
        layer.kv_cache, layer.kv_cache_dtype = cache, kind
        layer.set_scales(key, value, 4.0)
        layer.dtype = torch.bfloat16
        layer.impl = SimpleNamespace(scale=0.7)
    return layers


@KINDS
def test_cacheblend_compares_keys_and_values(kind: str) -> None:
    layers = quantised(kind)
    pages, layout = typed_pages(layers.stack.attention[1]), layers.layouts[1]
    keys = layout.keys.tokens(pages).float()[:TOKENS] * 0.5
    values = layout.values.tokens(pages).float()[:TOKENS] * 0.125
    keys[5, 1, 3] += 0.01
    values[20, 0, 2] -= 0.01
    layers.computed = keys, values
    active, _ = finish(programs.run(layers, batch_of(plan(Deviation(1), [46, 47], 2))))
    assert active.tolist() == [5, 20, 46, 47]


@KINDS
def test_attention_is_paid_to_keys(kind: str) -> None:
    layers, scales = quantised(kind), []

    def scores(query: Any, positions: Any, pages: torch.Tensor, *given: Any) -> torch.Tensor:
        assert pages.dtype == typed_pages(layers.stack.attention[0]).dtype
        *_, num_tokens, scale, _ = given
        scales.append(scale)
        return torch.zeros(num_tokens)

    kernels: Any = SimpleNamespace(token_scores=scores)
    known = [
        LayerKv(attention, layout, None, kernels)
        for attention, layout in zip(layers.stack.attention, layers.layouts, strict=True)
    ]
    runner = LayerRunner(layers.stack, known, None, None)  # type: ignore[arg-type]
    batch = batch_of(plan(Deviation(1), [46, 47], 2))
    query = torch.randn(2, HEADS, CHANNELS)
    runner.attention_scores(batch, 1, slice(0, 2), query, Gather.SUM)
    assert scales == [0.7 * 0.5]


def test_queries_are_kept_as_they_were_before_a_backend_quantised_them() -> None:
    layers = quantised("fp8_e4m3").stack.attention[:1]
    given = torch.randn(3, HEADS * CHANNELS).to(torch.float8_e4m3fn)
    asked: list[torch.Tensor] = []
    queries = Queries(layers, np.arange(3), lambda number, part, query: asked.append(query))
    with queries.of(layers[0], given):
        pass
    assert torch.equal(asked[0], (given.float() * 4).bfloat16().view(3, HEADS, CHANNELS))


@KINDS
def test_drift_is_of_the_numbers_that_are_stored(kind: str) -> None:
    """Its scale is the same before and after."""
    layers = quantised(kind)
    batch = batch_of(plan(Deviation(1), [46, 47], 2))
    chosen = torch.tensor([3, 9])
    for layer in layers.stack.attention:
        layer.kv_cache[:] = torch.tensor(1.0).to(typed_pages(layer).dtype).view(torch.uint8)
    choice: Any = SimpleNamespace(chosen=chosen, counts=[2])
    moved = MovedValues(layers, batch, choice)
    for layer in layers.stack.attention:
        layer.kv_cache[:] = torch.tensor(2.0).to(typed_pages(layer).dtype).view(torch.uint8)
    expected = 0.5 * batch.plans[0].num_segments_to_choose_of * PER_TOKENS / 2
    assert moved.drift().tolist() == pytest.approx([expected])
