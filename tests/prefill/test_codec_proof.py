# SPDX-License-Identifier: Apache-2.0
"""The proof of a codec passes on pages that are stored right, and finds each way to store them
wrong."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.pages import BLOCK_SIZE, HEAD_SIZE, Layer, make_layer
from vllm_segreuse.kernels import reference
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.dispatch import Kernels
from vllm_segreuse.kernels.page_tokens import write_tokens
from vllm_segreuse.kernels.pages import Moves
from vllm_segreuse.kernels.reference_codecs import encode
from vllm_segreuse.model.kv_layout import discover_layout
from vllm_segreuse.model.layer_kv import LayerKv
from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.model.rope import DeltaRope
from vllm_segreuse.plan import IntArray
from vllm_segreuse.prefill.align import Aligner
from vllm_segreuse.prefill.proofs.codecs import prove_codec

LAYOUTS = ["tiled by 32", "HND", "pairs"]
NEOX = DeltaRope(torch.logspace(0, -4, HEAD_SIZE // 2, dtype=torch.float64), HEAD_SIZE, True)
ROPES = [NEOX, None, DeltaRope(NEOX.frequencies[:4], 8, False)]
CODED = pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])


class Scratch:
    """Blocks of random tokens, and as many to write to."""

    block_size, distance = BLOCK_SIZE, 211
    count = 4 * BLOCK_SIZE - 3

    def __init__(self, dtype: torch.dtype) -> None:
        self.own = np.arange(1, 5, dtype=np.int32)
        self.copy = self.own + 4
        self.layers: list[Any] = []
        for name in LAYOUTS:
            layer = make_layer(name, 9)
            # Channels of very different sizes, as keys have them.
            pages = torch.randn(layer.pages.shape) * torch.logspace(-2, 1, layer.pages.shape[1])
            self.layers.append(replace(layer, pages=pages.to(dtype)))
        self.stack = SimpleNamespace(attention=self.layers)

    def clear_copy(self) -> None:
        for layer in self.layers:
            layer.pages[self.copy.tolist()] = 0


def subject(dtype: torch.dtype, codec: Codec, **kernels: Any) -> tuple[Any, Aligner, list[Any]]:
    scratch = Scratch(dtype)
    found = [discover_layout(make_layer(name), BLOCK_SIZE) for name in LAYOUTS]
    nothing: Any = None
    chosen = Kernels(reference.align, reference.store, nothing, None, None, "", **kernels)
    known = [
        LayerKv(layer, layout, rope, chosen)
        for layer, layout, rope in zip(scratch.layers, found, ROPES, strict=True)
    ]
    return scratch, Aligner(known, codec), found


@CODED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_stored_right_is_proven(codec: Codec, dtype: torch.dtype) -> None:
    scratch, aligner, layouts = subject(dtype, codec)
    prove_codec(scratch, aligner, layouts, ROPES)
    assert aligner.host_rows is None


def test_raw_needs_no_proof() -> None:
    nothing: Any = None
    _, aligner, _ = subject(torch.float32, Codec.RAW)
    prove_codec(nothing, aligner, [], [])


def turns_the_wrong_way(pages: Any, parts: Any, moves: Moves, cells: Any, codec: Codec) -> None:
    reference.align(pages, parts, replace(moves, sin=-moves.sin), cells, codec)


def reads_another_token(pages: Any, parts: Any, moves: Moves, cells: Any, codec: Codec) -> None:
    sources = moves.sources.roll(1)
    reference.align(pages, parts, replace(moves, sources=sources), cells, codec)


def reads_another_codec(pages: Any, parts: Any, moves: Moves, cells: Any, codec: Codec) -> None:
    other = Codec.FP8 if codec is Codec.INT8 else Codec.INT8
    reference.align(pages, parts, moves, cells, other)


def takes_scales_of_a_neighbour(
    pages: Any, parts: Any, moves: Moves, cells: Any, codec: Codec
) -> None:
    shifted = [cell.clone() for cell in cells]
    for cell in shifted:
        cell[:, :128].view(torch.float16).copy_(cell[:, :128].view(torch.float16).roll(1, 1))
    reference.align(pages, parts, moves, shifted, codec)


def rounds_twice_as_far(
    pages: list[torch.Tensor], parts: Any, codec: Codec, blocks: Any, cells: Any, rows: Any
) -> torch.Tensor:
    """As if codes had a bit less."""
    coarse = [layer.clone() for layer in pages]
    found = encode(coarse, parts, codec, blocks, cells, rows)
    for cell in cells:
        codes = cell[:, 256:]
        codes &= 0xFE if codec is Codec.INT8 else 0xFC
    return found


@CODED
@pytest.mark.parametrize(
    "wrong",
    [turns_the_wrong_way, reads_another_token, reads_another_codec, takes_scales_of_a_neighbour],
)
def test_what_is_read_wrong_is_found(codec: Codec, wrong: Callable[..., None]) -> None:
    scratch, aligner, layouts = subject(torch.bfloat16, codec, decode=wrong)
    with pytest.raises(UnsupportedModelError, match=f"codec {codec} has stored are not what"):
        prove_codec(scratch, aligner, layouts, ROPES)
    assert aligner.host_rows is None


@CODED
def test_codes_that_are_too_coarse_are_found(codec: Codec) -> None:
    scratch, aligner, layouts = subject(torch.float32, codec, encode=rounds_twice_as_far)
    with pytest.raises(UnsupportedModelError, match="are not what they should be"):
        prove_codec(scratch, aligner, layouts, ROPES)


def steps_of(codec: Codec, tokens: torch.Tensor, over: int) -> torch.Tensor:
    """Half the distance of codes of the first token's numbers; `tokens` are those of its block."""
    largest = tokens.abs().amax(over, keepdim=True)[:1]
    if codec is Codec.INT8:
        return (largest / 127 / 2).expand(1, *tokens.shape[1:])
    steps = (largest / 448 / 1024).expand(1, *tokens.shape[1:])
    return (tokens[:1].abs() / 16).maximum(steps)


@CODED
@pytest.mark.parametrize(("times", "fine"), [(0.99, True), (1.01, False)])
@pytest.mark.parametrize("what", ["values", "keys that stay", "keys that turn"])
def test_a_number_may_be_off_by_half_a_step(
    what: str, times: float, fine: bool, codec: Codec
) -> None:
    """Of a code; a turned one by the root of both squares of its pair."""
    scratch, plain, layouts = subject(torch.float32, codec)
    index = 0 if what == "keys that turn" else 1
    layout = layouts[index]
    part, over = (layout.values, 2) if what == "values" else (layout.keys, 0)
    own = part.tokens(scratch.layers[index].pages[1:2])
    half = steps_of(codec, own, over)
    wanted = own[:1].clone()
    if what == "keys that turn":
        wanted = NEOX.rotate(wanted, torch.tensor([scratch.distance]))
        squares = half.unflatten(-1, (2, -1)).square().sum(-2)
        half = squares.sqrt().repeat(1, 1, 2)

    def off(pages: Any, parts: Any, moves: Moves, cells: Any, codec: Codec) -> None:
        reference.align(pages, parts, moves, cells, codec)
        if pages[0].data_ptr() == scratch.layers[index].pages.data_ptr():
            behind = torch.tensor([int(scratch.copy[0]) * BLOCK_SIZE + 1])
            write_tokens(pages[0], part, behind, wanted + times * half)

    _, aligner, _ = subject(torch.float32, codec, decode=off)
    aligner = Aligner(
        [replace(it, kernels=aligner.layers[0].kernels) for it in plain.layers], codec
    )
    if fine:
        prove_codec(scratch, aligner, layouts, ROPES)
    else:
        with pytest.raises(UnsupportedModelError, match=r"off by 1 times what rounding allows"):
            prove_codec(scratch, aligner, layouts, ROPES)


def test_pages_that_cannot_be_stored_are_found() -> None:
    scratch, aligner, layouts = subject(torch.float32, Codec.INT8)
    scratch.layers[1].pages[2, 7] = torch.inf
    with pytest.raises(UnsupportedModelError, match="codec int8 cannot store this model's KV"):
        prove_codec(scratch, aligner, layouts, ROPES)


def test_layers_are_stored_in_their_order() -> None:
    scratch, aligner, _ = subject(torch.bfloat16, Codec.INT8)
    cells = [torch.zeros(4, page.num_bytes, dtype=torch.uint8) for page in aligner.stored_pages()]
    blocks: IntArray = np.array([3, 1], np.int32)
    encoded = aligner.copy_blocks(cells, blocks, np.array([2, 0], np.int32))
    assert encoded is not None
    assert encoded.tolist() == [True, True]
    for layer, cell in zip(scratch.layers, cells, strict=True):
        assert isinstance(layer, Layer)
        assert cell[[0, 2]].any(1).all()
        assert not cell[[1, 3]].any()
