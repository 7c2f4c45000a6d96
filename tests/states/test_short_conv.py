# SPDX-License-Identifier: Apache-2.0
"""Maps of short convolutions, noted of what vLLM's layer reads: against its kernels for CPUs."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadata

from segreuse_extras.states.capture import Captures
from segreuse_extras.states.kinds import state_layer
from segreuse_extras.states.layers import StateLayer, StateLayers, StateMap
from segreuse_extras.states.messages import CaptureOrder
from tests.states.test_capture import step_rows
from vllm_segreuse.compat.model_runner import RunningRow
from vllm_segreuse.model.modules import UnsupportedModelError

CHANNELS, WINDOW = 32, 3
NAME = "layers.0.short_conv"
COUNT, FIRST, STOP = 40, 8, 31
"""Tokens of a text, and of the segment in it that is noted."""
BLOCKS, RUNNING, OTHER = 6, 2, 4


class Projection(torch.nn.Module):
    """As vLLM's, which leave a bias beside what they have made."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden @ self.weight, None


class Layer:
    """One of vLLM's, with projections of the test's, and a text."""

    def __init__(self, kept: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        layer: Any = object.__new__(ShortConv)
        torch.nn.Module.__init__(layer)
        layer.prefix = NAME
        layer.in_proj = Projection(torch.randn(CHANNELS, 3 * CHANNELS) / CHANNELS**0.5)
        layer.out_proj = Projection(torch.eye(CHANNELS))
        layer.conv = SimpleNamespace(weight=torch.randn(CHANNELS, 1, WINDOW), bias=None)
        layer.kv_cache = (torch.zeros(BLOCKS, WINDOW - 1, CHANNELS, dtype=kept),)
        self.layer = layer
        self.hidden = torch.randn(COUNT, CHANNELS)

    @property
    def inputs(self) -> torch.Tensor:
        """What is convolved."""
        gate, _, entering = (self.hidden @ self.layer.in_proj.weight).chunk(3, dim=-1)
        return gate * entering

    def read(self, first: int, stop: int, block: int = RUNNING, decoded: int = 0) -> torch.Tensor:
        """A step computes some of the text, behind tokens that others decode; its outputs."""
        hidden = torch.cat((torch.randn(decoded, CHANNELS), self.hidden[first:stop]))
        return self._step(hidden, first, block, decoded)[decoded:]

    def decode(self, position: int, block: int = RUNNING) -> torch.Tensor:
        """A step's only token of the text, as vLLM reads it."""
        return self._step(self.hidden[position : position + 1], position, block, 1)

    def _step(self, hidden: torch.Tensor, first: int, block: int, decoded: int) -> torch.Tensor:
        count = len(hidden) - decoded
        metadata = ShortConvAttentionMetadata(
            num_prefills=int(count > 0),
            num_prefill_tokens=count,
            num_decodes=decoded,
            num_decode_tokens=decoded,
            num_reqs=decoded + int(count > 0),
            has_initial_states_p=torch.tensor([first > 0]),
            query_start_loc_p=torch.tensor([0, count], dtype=torch.int32),
            state_indices_tensor_p=torch.tensor([block], dtype=torch.int32),
            state_indices_tensor_d=torch.full(
                (decoded, 1), OTHER if count else block, dtype=torch.int32
            ),
            query_start_loc_d=None,
            num_accepted_tokens=None,
            seq_lens=torch.tensor([first + count]),
        )
        context: Any = SimpleNamespace(attn_metadata={NAME: metadata})
        output = torch.zeros(len(hidden), CHANNELS)
        with override_forward_context(context):
            self.layer.forward_native(hidden, output)
        return output


class World(NamedTuple):
    """A layer that is observed."""

    model: Layer
    captures: Captures
    layer: StateLayer
    rows: list[RunningRow]

    def read(self, first: int, stop: int, decoded: int = 0) -> None:
        self.rows[:] = step_rows(first, stop, decoded)
        self.model.read(first, stop, decoded=decoded)

    def order(self, stop: int = STOP) -> None:
        self.captures.order([CaptureOrder(0, "reader", FIRST, stop)])

    def taken(self) -> StateMap:
        found = self.captures.take()
        assert found is not None
        assert (found.complete, found.failed) == ((0,), ())
        return self.captures.maps[0][0]


@pytest.fixture
def world() -> World:
    return world_of(torch.float32)


def world_of(kept: torch.dtype) -> World:
    model, rows = Layer(kept), list[RunningRow]()
    layer = state_layer(NAME, model.layer, 0)
    captures = Captures(StateLayers([layer], 1), lambda: rows)
    layer.observed_by(captures.observe)
    return World(model, captures, layer, rows)


@pytest.mark.parametrize("steps", [(0, 40), (0, 8, 40), (0, 13, 17, 40), (5, 30, 40)])
@pytest.mark.parametrize("decoded", [0, 3])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_behind_a_map_the_layer_reads_on_as_behind_the_segment(
    steps: tuple[int, ...], decoded: int, kept: torch.dtype
) -> None:
    """Noted in one piece and in several; composed behind a state that it was not noted behind."""
    world = world_of(kept)
    world.order()
    for first, stop in pairwise(steps):
        assert world.captures.take() is None
        world.read(first, stop, decoded)
    of_layer = world.taken()
    [convolution] = world.model.layer.kv_cache
    convolution[RUNNING] = convolution[OTHER] = torch.randn(WINDOW - 1, CHANNELS)
    world.model.read(FIRST, STOP, OTHER)
    world.layer.compose(RUNNING, of_layer)
    assert torch.equal(convolution[RUNNING], convolution[OTHER])
    behind = world.model.read(STOP, COUNT, RUNNING), world.model.read(STOP, COUNT, OTHER)
    assert torch.equal(*behind)
    assert behind[0].norm() > 0


@pytest.mark.parametrize("length", [0, 1, 2, 5])
def test_segments_shorter_than_the_window_leave_what_was_in_front(
    length: int, world: World
) -> None:
    stop = FIRST + length
    found = world.layer.nothing()
    if length:
        world.order(stop)
        world.read(0, COUNT)
        found = world.taken()
    assert len(found.tail) == min(length, WINDOW - 1)
    world.model.read(0, FIRST)
    world.layer.compose(RUNNING, found)
    [inputs] = world.layer.held(RUNNING)
    assert torch.equal(inputs, world.model.inputs[stop - 2 : stop])


def test_a_token_that_is_decoded_alone_is_noted_as_well(world: World) -> None:
    """It goes by another kernel, behind the same projection."""
    world.order()
    world.read(0, STOP - 1)
    world.rows[:] = [RunningRow("reader", 0, 1, STOP - 1)]
    world.model.decode(STOP - 1)
    [inputs] = world.layer.held(RUNNING)
    assert torch.equal(world.taken().tail, inputs)
    torch.testing.assert_close(inputs, world.model.inputs[STOP - 2 : STOP])


def test_a_map_takes_what_vllm_keeps_of_a_prompt(world: World) -> None:
    world.order()
    world.read(0, COUNT)
    of_layer = world.taken()
    assert world.layer.map_bytes == of_layer.num_bytes == (WINDOW - 1) * CHANNELS * 4
    assert of_layer.tail.untyped_storage().nbytes() == of_layer.num_bytes, "no view of the step"


def test_noting_changes_nothing_of_what_the_layer_computes(world: World) -> None:
    plain = world.model.read(0, COUNT, OTHER)
    world.order()
    world.read(0, COUNT)
    world.taken()
    assert torch.equal(world.model.read(0, COUNT), plain)


def test_once_nobody_observes_nothing_is_noted(world: World) -> None:
    world.layer.observed_by(None)
    world.order()
    world.read(0, COUNT)
    assert world.captures.take() is None
    world.layer.observed_by(world.captures.observe)
    world.layer.observed_by(world.captures.observe)
    world.read(0, COUNT)
    assert len(world.taken().tail) == WINDOW - 1


def test_a_block_is_cleared_copied_and_put_back(world: World) -> None:
    """And nothing of it is rounded."""
    [convolution] = world.model.layer.kv_cache
    convolution[RUNNING] = before = torch.randn(WINDOW - 1, CHANNELS)
    world.layer.copy(RUNNING, OTHER)
    world.layer.round(RUNNING)
    held = world.layer.held(RUNNING)
    world.layer.clear(RUNNING)
    assert not convolution[RUNNING].any()
    world.layer.restore(RUNNING, held)
    assert torch.equal(convolution[RUNNING], before)
    assert torch.equal(convolution[OTHER], before)


def test_a_layer_that_keeps_more_is_refused_by_name() -> None:
    layer = Layer().layer
    layer.kv_cache = (*layer.kv_cache, torch.zeros(1))
    with pytest.raises(UnsupportedModelError, match=rf"{NAME} keeps 2 tensors .* its last inputs$"):
        state_layer(NAME, layer, 0)
