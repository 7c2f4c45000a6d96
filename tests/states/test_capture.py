# SPDX-License-Identifier: Apache-2.0
"""Maps of segments, noted of what layers scan: against the delta rule, token by token."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from segreuse_extras.states.capture import Captures
from segreuse_extras.states.kinds import state_layer
from segreuse_extras.states.layers import StateLayers
from segreuse_extras.states.messages import CaptureOrder
from vllm_segreuse.compat.gdn_attention import Scan
from vllm_segreuse.compat.model_runner import RunningRow
from vllm_segreuse.model.modules import UnsupportedModelError

HEADS, CHANNELS, INPUTS = 2, 4, 6
NAMES = "layers.0", "layers.1"
COUNT = 40


def delta_rule(**given: Any) -> None:
    """arXiv 2412.06464, equation 10, of one sequence; the state is changed in place."""
    state = given["initial_state"][0]
    for t in range(given["key"].shape[1]):
        key, value, beta = given["key"][0, t], given["value"][0, t], given["beta"][0, t]
        state *= given["g"][0, t].exp()[:, None, None]
        change = beta[:, None] * (value - torch.einsum("hkv,hk->hv", state, key))
        state += torch.einsum("hk,hv->hkv", key, change)


def layer_like(slots: int = 5, keys: int = CHANNELS, dtype: torch.dtype = torch.float32) -> Any:
    layer = object.__new__(QwenGatedDeltaNetAttention)
    layer.__dict__["kv_cache"] = [
        torch.zeros(slots, 3, INPUTS),
        torch.zeros(slots, HEADS, CHANNELS, keys, dtype=dtype),
    ]
    return layer


def step_rows(first: int, stop: int, decoded: int) -> list[RunningRow]:
    """Rows of a step of "reader", behind tokens that others decode."""
    others = [RunningRow(f"other {i}", i, 1, 9) for i in range(decoded)]
    return [*others, RunningRow("reader", decoded, stop - first, first)]


class Model:
    """Two layers, and a text that one request has computed in steps."""

    def __init__(self) -> None:
        self.rows: list[RunningRow] = []
        loaded = [layer_like() for _ in NAMES]
        self.caches = [layer.kv_cache for layer in loaded]
        layers = [state_layer(name, it, 0) for name, it in zip(NAMES, loaded, strict=True)]
        self.layers = StateLayers(layers, 1)
        self.captures = Captures(self.layers, lambda: self.rows)
        torch.manual_seed(0)
        shape = 1, COUNT, HEADS
        unit = torch.nn.functional.normalize(torch.randn(*shape, CHANNELS), dim=-1)
        self.text = {
            "query": unit,
            "key": unit,
            "value": torch.randn(*shape, CHANNELS),
            "g": -0.02 * torch.rand(shape),
            "beta": torch.rand(shape),
        }
        self.inputs = torch.randn(COUNT, INPUTS)

    def state_behind(self, stop: int, first: int = 0, state: torch.Tensor | None = None) -> Any:
        found = torch.zeros(1, HEADS, CHANNELS, CHANNELS) if state is None else state.clone()
        part = {name: it[:, first:stop] for name, it in self.text.items()}
        delta_rule(**part, initial_state=found)
        return found

    def compute(
        self, first: int, stop: int, decoded: int = 0, names: tuple[str, ...] = NAMES
    ) -> None:
        """A step of the request, behind tokens that others decode."""
        self.rows = step_rows(first, stop, decoded)
        arguments: dict[str, Any] = {name: it[:, first:stop] for name, it in self.text.items()} | {
            "cu_seqlens": torch.zeros(2, dtype=torch.int32),
            "initial_state": torch.zeros(9),
            "initial_state_indices": torch.zeros(1, dtype=torch.int32),
        }
        inputs = torch.cat([torch.randn(decoded, INPUTS), self.inputs[first:stop]])
        for name in names:
            self.captures.observe(Scan(name, inputs, decoded, delta_rule, arguments))

    def order(self, first: int, stop: int) -> None:
        self.captures.order([CaptureOrder(0, "reader", first, stop)])


@pytest.mark.parametrize("steps", [(0, 40), (0, 8, 40), (0, 13, 17, 40), (5, 40)])
@pytest.mark.parametrize("decoded", [0, 3])
def test_a_map_composes_what_the_rule_computes(steps: tuple[int, ...], decoded: int) -> None:
    model = Model()
    model.order(8, 31)
    for first, stop in pairwise(steps):
        assert model.captures.take() is None
        model.compute(first, stop, decoded)
    found = model.captures.take()
    assert found is not None
    assert (found.complete, found.failed) == ((0,), ())
    before = torch.randn(1, HEADS, CHANNELS, CHANNELS)
    expected = model.state_behind(31, 8, before)[0]
    maps = model.captures.maps[0]
    for (_, states), layer, of_layer in zip(model.caches, model.layers.layers, maps, strict=True):
        states[2] = before[0]
        layer.compose(2, of_layer)
        inputs, state = layer.held(2)
        assert (state - expected).norm() < 0.01 * expected.norm(), "kept in bfloat16"
        assert torch.equal(inputs, model.inputs[28:31])
        assert layer.map_bytes == of_layer.num_bytes


def test_what_began_anew_is_noted_anew() -> None:
    """A request that was preempted reads its text once more."""
    model = Model()
    model.order(8, 31)
    model.compute(0, 20)
    model.compute(0, 12)
    model.compute(12, 40)
    assert model.captures.take() is not None
    expected = model.state_behind(31, 8)[0]
    assert (model.captures.maps[0][1].added - expected).norm() < 0.01 * expected.norm()


def test_missing_tokens_are_noticed() -> None:
    model = Model()
    model.order(8, 31)
    model.compute(0, 12)
    model.compute(13, 40)  # one token was decoded alone
    found = model.captures.take()
    assert found is not None
    assert (found.complete, found.failed) == ((), (0,))
    assert not model.captures.maps
    model.compute(0, 40)
    assert model.captures.take() is None, "it is forgotten"


def test_a_token_that_was_decoded_is_missing() -> None:
    """vLLM decodes a step's only token by another kernel."""
    model = Model()
    model.order(8, 31)
    model.compute(0, 12)
    model.rows = [RunningRow("reader", 0, 1, 12), RunningRow("other", 1, 40, 0)]
    arguments = dict(model.text, cu_seqlens=torch.zeros(2), initial_state_indices=torch.zeros(1))
    for name in NAMES:
        model.captures.observe(Scan(name, model.inputs, 1, delta_rule, arguments))
    model.compute(13, 40)
    found = model.captures.take()
    assert found is not None
    assert found.failed == (0,)


def test_a_layer_that_saw_less_is_noticed() -> None:
    model = Model()
    model.order(8, 31)
    model.compute(0, 40, names=NAMES[:1])
    found = model.captures.take()
    assert found is not None
    assert found.failed == (0,)


def test_what_is_no_number_is_no_map() -> None:
    model = Model()
    model.order(8, 31)
    model.text["value"][0, 20] = torch.nan
    model.compute(0, 40)
    found = model.captures.take()
    assert found is not None
    assert (found.complete, found.failed) == ((), (0,))


def test_tokens_of_others_are_not_noted() -> None:
    model = Model()
    model.order(8, 31)
    with model.captures.computing("another", 0, 40):
        model.compute(0, 40)
    assert model.captures.take() is None
    with model.captures.computing("reader", 0, 40):
        model.rows = []
        model.compute(0, 40)
    assert model.captures.take() is not None


def test_dropped_maps_are_gone() -> None:
    model = Model()
    model.order(8, 31)
    model.compute(0, 12)
    model.captures.drop([0])
    model.compute(12, 40)
    assert model.captures.take() is None
    model.order(8, 31)
    model.compute(0, 40)
    model.captures.take()
    model.captures.drop([0, 1])
    assert not model.captures.maps


def test_a_plan_begins_with_what_is_in_front_of_it() -> None:
    model = Model()
    for convolution, states in model.caches:
        convolution[1], states[1] = 4, 3
        convolution[2] = states[2] = 9
    model.layers.begin([2], [1])
    for inputs, state in model.layers.held([2]):
        assert (inputs == 4).all()
        assert (state == 3).all()
    model.layers.begin([2], [])
    assert all((part == 0).all() for held in model.layers.held([2]) for part in held)


def test_a_state_is_rounded_as_maps_are_and_last_inputs_are_not() -> None:
    model = Model()
    for convolution, states in model.caches:
        convolution[2], states[2] = torch.randn(3, INPUTS), torch.randn(HEADS, CHANNELS, CHANNELS)
    before = model.layers.held([2])
    model.layers.round([2])
    for (inputs, state), (plain, unrounded) in zip(model.layers.held([2]), before, strict=True):
        assert torch.equal(inputs, plain)
        assert torch.equal(state, unrounded.bfloat16().float())
        assert not torch.equal(state, unrounded)


def test_what_is_held_is_put_back() -> None:
    model = Model()
    for convolution, states in model.caches:
        convolution[1], states[1] = torch.randn(3, INPUTS), torch.randn(HEADS, CHANNELS, CHANNELS)
    kept = [(convolution[1].clone(), states[1].clone()) for convolution, states in model.caches]
    held = model.layers.held([1])
    for convolution, states in model.caches:
        convolution[1] = states[1] = 0
    model.layers.restore([1], held)
    for (convolution, states), (inputs, state) in zip(model.caches, kept, strict=True):
        assert torch.equal(convolution[1], inputs)
        assert torch.equal(states[1], state)


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (SimpleNamespace(), "is SimpleNamespace, and states are composed of Qwen"),
        (layer_like(keys=8), "of keys and values of as many channels"),
        (layer_like(dtype=torch.bfloat16), "states of torch.bfloat16"),
    ],
)
def test_other_layers_are_refused_by_name(layer: Any, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"layers.7 .*{why}"):
        state_layer("layers.7", layer, 0)
