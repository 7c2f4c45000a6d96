# SPDX-License-Identifier: Apache-2.0
"""Maps of Mamba-2, noted of what vLLM's mixer scans: against its own kernels for CPUs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from segreuse_extras.states.capture import Captures
from segreuse_extras.states.kinds import state_layer
from segreuse_extras.states.layers import StateLayer, StateLayers
from segreuse_extras.states.messages import CaptureOrder
from segreuse_extras.states.recurrent import AffineMap
from tests.states.test_capture import step_rows
from vllm_segreuse.compat import gdn_attention
from vllm_segreuse.compat import mamba_mixer2 as patch
from vllm_segreuse.compat.model_runner import RunningRow
from vllm_segreuse.model.modules import UnsupportedModelError

HEADS, CHANNELS, STATE, GROUPS, WINDOW = 4, 8, 16, 2, 4
INNER, MIXED = HEADS * CHANNELS, HEADS * CHANNELS + 2 * GROUPS * STATE
NAME = "layers.0.mixer"
COUNT, FIRST, STOP = 40, 8, 31
"""Tokens of a text, and of the segment in it that is noted."""
BLOCKS, RUNNING, OTHER = 6, 2, 4


class Mixer:
    """One of vLLM's, as far as it computes from a cache; its projections are the test's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        layer: Any = object.__new__(MambaMixer2)
        torch.nn.Module.__init__(layer)
        layer.prefix, layer.activation, layer.num_spec = NAME, "silu", 0
        layer.tp_size, layer.num_heads, layer.head_dim = 1, HEADS, CHANNELS
        layer.n_groups, layer.ssm_state_size, layer.conv_kernel_size = GROUPS, STATE, WINDOW
        layer.tped_intermediate_size, layer.tped_conv_size = INNER, MIXED
        layer.tped_dt_size = HEADS
        layer.cache_config, layer.use_replayssm, layer.is_blackwell = object(), False, False
        layer.split_hidden_states_B_C_fn = lambda it: torch.split(
            it, [INNER, GROUPS * STATE, GROUPS * STATE], dim=-1
        )
        layer.conv_weights = torch.randn(MIXED, WINDOW)
        layer.conv1d = SimpleNamespace(bias=torch.randn(MIXED))
        layer.A = -torch.rand(HEADS) / 8
        layer.D, layer.dt_bias = torch.rand(HEADS), torch.randn(HEADS)
        layer.kv_cache = (
            torch.zeros(BLOCKS, WINDOW - 1, MIXED),
            torch.zeros(BLOCKS, HEADS, CHANNELS, STATE, dtype=dtype),
        )
        self.layer = layer
        self.projected = torch.randn(COUNT, 2 * INNER + 2 * GROUPS * STATE + HEADS)
        """What the text is projected to: a gate, what enters the convolution, and `dt`."""

    @property
    def inputs(self) -> torch.Tensor:
        return self.projected[:, INNER : INNER + MIXED]

    def read(self, first: int, stop: int, block: int = RUNNING, decoded: int = 0) -> torch.Tensor:
        """A step computes some of the text, behind tokens that others decode; its outputs."""
        others = torch.randn(decoded, self.projected.shape[1])
        projected = torch.cat((others, self.projected[first:stop]))
        bounds = torch.tensor([0, stop - first], dtype=torch.int32)
        metadata = Mamba2AttentionMetadata(
            num_prefills=1,
            num_prefill_tokens=stop - first,
            num_decodes=decoded,
            num_decode_tokens=decoded,
            num_reqs=1 + decoded,
            has_initial_states_p=torch.tensor([first > 0]),
            query_start_loc_p=bounds,
            state_indices_tensor_p=torch.tensor([block], dtype=torch.int32),
            state_indices_tensor_d=torch.full((decoded, 1), OTHER, dtype=torch.int32),
            query_start_loc_d=None,
            num_accepted_tokens=None,
            seq_lens=torch.tensor([stop]),
            cu_chunk_seqlen_p=bounds,
            last_chunk_indices_p=torch.zeros(1, dtype=torch.int32),
            prep_initial_states=first > 0,
            chunk_size=256,
            seq_idx_p=torch.zeros(1, dtype=torch.int32),
        )
        context: Any = SimpleNamespace(attn_metadata={NAME: metadata})
        output = torch.zeros(len(projected), INNER)
        with override_forward_context(context):
            self.layer.conv_ssm_forward(projected, output)
        return output[decoded:]


class World(NamedTuple):
    """A mixer whose scans are observed."""

    mixer: Mixer
    captures: Captures
    layer: StateLayer
    rows: list[RunningRow]

    def read(self, first: int, stop: int, decoded: int = 0) -> None:
        self.rows[:] = step_rows(first, stop, decoded)
        self.mixer.read(first, stop, decoded=decoded)

    def noted(self, first: int = FIRST, stop: int = STOP) -> AffineMap:
        """The map of a part of the text, which is read for it."""
        self.captures.order([CaptureOrder(0, "reader", first, stop)])
        self.read(0, COUNT)
        found = self.captures.take()
        assert found is not None
        assert found.complete == (0,)
        [of_layer] = self.captures.maps[0]
        assert isinstance(of_layer, AffineMap)
        return of_layer


def world_of(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32) -> World:
    # What is patched here is put back, so that other tests of this process see vLLM's own.
    for name in ("conv_ssm_forward", "get_kv_cache_spec"):
        monkeypatch.setattr(MambaMixer2, name, getattr(MambaMixer2, name))
    scan = mamba_mixer2.mamba_chunk_scan_combined_varlen
    monkeypatch.setattr(mamba_mixer2, "mamba_chunk_scan_combined_varlen", scan)
    # The backend of decodes is chosen when an engine starts.
    monkeypatch.setattr(mamba_mixer2, "selective_state_update", selective_state_update)
    patch.install()
    mixer, rows = Mixer(dtype), list[RunningRow]()
    layer = state_layer(NAME, mixer.layer, 0)
    captures = Captures(StateLayers([layer], 1), lambda: rows)
    monkeypatch.setattr(gdn_attention, "_observer", captures.observe)
    return World(mixer, captures, layer, rows)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return world_of(monkeypatch)


def off(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize("steps", [(0, 40), (0, 8, 40), (0, 13, 17, 40), (5, 40)])
@pytest.mark.parametrize("decoded", [0, 3])
def test_a_map_composes_what_the_kernel_computes(
    steps: tuple[int, ...], decoded: int, world: World
) -> None:
    """Noted in one piece and in several; composed behind a state that it was not noted behind."""
    world.captures.order([CaptureOrder(0, "reader", FIRST, STOP)])
    for first, stop in pairwise(steps):
        assert world.captures.take() is None
        world.read(first, stop, decoded)
    found = world.captures.take()
    assert found is not None
    assert (found.complete, found.failed) == ((0,), ())
    convolution, states = world.mixer.layer.kv_cache
    states[RUNNING] = torch.randn(HEADS, CHANNELS, STATE)
    convolution[RUNNING] = world.mixer.inputs[FIRST - 3 : FIRST]
    world.layer.copy(RUNNING, OTHER)
    world.mixer.read(FIRST, STOP, OTHER)
    inputs, state = world.layer.held(OTHER)
    [of_layer] = world.captures.maps[0]
    world.layer.compose(RUNNING, of_layer)
    composed_inputs, composed = world.layer.held(RUNNING)
    assert off(composed, state) < 0.005, "kept in bfloat16"
    assert torch.equal(composed_inputs, inputs)
    assert world.layer.map_bytes == of_layer.num_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_numbers_by_which_heads_fade(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, however states are kept."""
    world = world_of(monkeypatch, dtype)
    found = world.noted()
    dt = world.mixer.projected[FIRST:STOP, -HEADS:] + world.mixer.layer.dt_bias
    expected = (torch.nn.functional.softplus(dt) * world.mixer.layer.A).sum(0).exp()
    assert found.product.dtype == torch.float32
    torch.testing.assert_close(found.product.flatten(), expected)


@pytest.mark.parametrize(("rate", "product"), [(0.0, 1.0), (-1000.0, 0.0)])
def test_heads_that_forget_nothing_or_all(rate: float, product: float, world: World) -> None:
    world.mixer.layer.A[:] = rate
    found = world.noted()
    assert (found.product == product).all()
    _, states = world.mixer.layer.kv_cache
    states[RUNNING] = before = torch.randn(HEADS, CHANNELS, STATE)
    world.layer.compose(RUNNING, found)
    torch.testing.assert_close(states[RUNNING], found.added.float() + product * before)


def scanned(world: World, monkeypatch: pytest.MonkeyPatch) -> gdn_attention.Scan:
    """The scan of all of the text."""
    scans = list[gdn_attention.Scan]()
    monkeypatch.setattr(gdn_attention, "_observer", scans.append)
    world.mixer.read(0, COUNT)
    [scan] = scans
    return scan


def test_noting_changes_nothing_of_what_the_mixer_computes(world: World) -> None:
    plain = world.mixer.read(0, COUNT, OTHER)
    world.noted()
    assert torch.equal(world.mixer.read(0, COUNT, OTHER), plain)
    for held, expected in zip(world.layer.held(RUNNING), world.layer.held(OTHER), strict=True):
        assert torch.equal(held, expected)


def test_a_kernel_that_writes_into_the_cache_does_not_while_a_map_is_noted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of vLLM 0.33."""
    scan = scanned(world, monkeypatch)
    _, before = world.layer.held(RUNNING)

    def kernel(
        final_states_out: torch.Tensor | None = None, final_state_indices: Any = None, **given: Any
    ) -> torch.Tensor | None:
        found: torch.Tensor = scan.original(**given)
        if final_states_out is None:
            return found
        final_states_out[final_state_indices] = found
        return None

    _, states = world.mixer.layer.kv_cache
    into_cache = {"final_states_out": states, "final_state_indices": torch.tensor([RUNNING])}
    writing = replace(scan, original=kernel, arguments=scan.arguments | into_cache)
    found = world.layer.note(world.layer.nothing(), writing, FIRST, STOP)
    assert found.added.norm() > 0
    assert torch.equal(world.layer.held(RUNNING)[1], before)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5])
def test_segments_shorter_than_the_window_leave_what_was_in_front(
    length: int, world: World
) -> None:
    stop = FIRST + length
    found = world.layer.nothing() if not length else world.noted(FIRST, stop)
    assert len(found.tail) == min(length, WINDOW - 1)
    world.mixer.read(0, FIRST)
    world.layer.compose(RUNNING, found)
    inputs, _ = world.layer.held(RUNNING)
    assert torch.equal(inputs, world.mixer.inputs[stop - 3 : stop])


def test_states_in_bfloat16_are_composed_within_their_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM keeps them so on CPUs without AVX-512 BF16, unless a model says otherwise."""
    world = world_of(monkeypatch, torch.bfloat16)
    found = world.noted()
    world.mixer.read(0, FIRST)
    world.layer.copy(RUNNING, OTHER)
    world.mixer.read(FIRST, STOP, OTHER)
    world.layer.compose(RUNNING, found)
    both = world.layer.held(RUNNING)[1], world.layer.held(OTHER)[1]
    assert both[0].dtype == torch.bfloat16
    assert off(*both) < 0.01


def test_a_token_that_is_decoded_alone_is_missed(world: World) -> None:
    """It goes by another kernel, which is not observed."""
    world.captures.order([CaptureOrder(0, "reader", FIRST, STOP)])
    world.read(0, 12)
    world.read(13, COUNT)
    found = world.captures.take()
    assert found is not None
    assert found.failed == (0,)


def test_other_states_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers.0.mixer has states of torch.float16;"):
        state_layer(NAME, Mixer(torch.float16).layer, 0)
    with pytest.raises(UnsupportedModelError, match="is MambaMixer, and states are composed of"):
        state_layer(NAME, object.__new__(MambaMixer), 0)
    replaying = Mixer().layer
    replaying.kv_cache = (*replaying.kv_cache, *[torch.zeros(1)] * 3)
    with pytest.raises(
        UnsupportedModelError,
        match=r"keeps 5 tensors .*--use-replayssm.* last inputs",
    ):
        state_layer(NAME, replaying, 0)


def test_the_kernel_of_cpus_gives_no_state_from_within_a_scan(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So vLLM's mixer must want none: it looks for one of each chunk."""
    scan = scanned(world, monkeypatch)
    chunks = {
        "cu_chunk_seqlens": torch.tensor([0, 16, 32, COUNT], dtype=torch.int32),
        "last_chunk_indices": torch.tensor([2], dtype=torch.int32),
        "seq_idx": torch.zeros(3, dtype=torch.int32),
    }
    within = {"return_intermediate_states": True, "final_states_out": None}
    given = scan.arguments | chunks | within
    if "final_states_out" not in scan.arguments:  # vLLM 0.32
        del given["final_states_out"]
    assert len(scan.original(**given)) == 1


def test_states_within_a_scan_are_wanted_on_gpus_only(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    layer: Any = world.mixer.layer
    layer.model_config = SimpleNamespace(dtype=torch.bfloat16)
    layer.cache_config = SimpleNamespace(
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="float32",
        mamba_block_size=64,
        mamba_page_size_padded=None,
        mamba_cache_mode="align",
        use_replayssm=False,
    )
    layer.intermediate_size = INNER
    config: Any = SimpleNamespace(cache_config=layer.cache_config, num_speculative_tokens=0)
    monkeypatch.setattr(mamba_mixer2, "get_tensor_model_parallel_world_size", lambda: 1)
    found = layer.get_kv_cache_spec(config)
    assert (found.num_prefill_checkpoint_blocks, found.prefill_checkpoint_alignment) == (0, None)
    assert found.shapes[1] == (HEADS, CHANNELS, STATE)
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert layer.get_kv_cache_spec(config).num_prefill_checkpoint_blocks == 1
