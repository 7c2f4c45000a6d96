# SPDX-License-Identifier: Apache-2.0
"""Every way of packing a page is found by writing to it; what cannot be told is refused."""

import pytest
import torch

from tests.prefill.pages import BLOCK_SIZE, HALF, HEAD_SIZE, HEADS, LAYOUTS, Layer, make_layer
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.model.kv_format import typed_pages
from vllm_segreuse.model.kv_layout import PageLayoutError, discover_layout

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_backend_writes_is_read_back(layout: str, dtype: torch.dtype) -> None:
    layer = make_layer(layout, num_blocks=4, dtype=dtype)
    before = layer.pages.clone()
    found = discover_layout(layer, BLOCK_SIZE)
    assert torch.equal(layer.pages, before), "the scratch block was not restored"

    slots = torch.arange(4 * BLOCK_SIZE)
    keys, values = torch.randn(2, len(slots), HEADS, HEAD_SIZE).to(dtype)
    layer.write(layer, keys, values, layer.kv_cache, slots)
    assert torch.equal(found.keys.tokens(layer.pages), keys)
    assert torch.equal(found.values.tokens(layer.pages), values)
    some = torch.tensor([3, 0])
    expected = keys.view(4, BLOCK_SIZE, HEADS, HEAD_SIZE)[some].flatten(0, 1)
    assert torch.equal(found.keys.tokens(layer.pages[some]), expected)


class Fp8Layer(Layer):
    """Whose backend rounds to nearest, as vLLM's kernels on GPUs do, or cuts off, as on CPUs."""

    cuts = False

    def stored(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
        kind = FP8[self.kv_cache_dtype]
        divided = (numbers.float() / scale).clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
        codes = divided.to(kind)
        if self.cuts:
            away = codes.float().abs() > divided.abs()
            codes = (codes.view(torch.uint8) - away.to(torch.uint8)).view(kind)
        return codes.view(torch.uint8)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.37, 0.0123), (0.99, 260.0)])
@pytest.mark.parametrize("cuts", [False, True], ids=["rounds", "cuts"])
@pytest.mark.parametrize("kind", FP8)
@pytest.mark.parametrize("layout", ["NHD", "tiled by 32", "pairs"])
def test_fp8_is_found_by_its_digits(
    layout: str, kind: str, cuts: bool, scales: tuple[float, float]
) -> None:
    plain = make_layer(layout)
    bytes_ = torch.randint(0, 256, (3, 2 * HALF), dtype=torch.uint8)
    layer = Fp8Layer(bytes_, plain.key_at, plain.value_at, kv_cache_dtype=kind)
    layer.cuts = cuts
    layer.set_scales(*scales)
    before = layer.pages.clone()
    assert discover_layout(layer, BLOCK_SIZE) == discover_layout(plain, BLOCK_SIZE)
    assert torch.equal(layer.pages, before), "the scratch block was not restored"


@pytest.mark.parametrize("off", [0.8, 1.25])
@pytest.mark.parametrize("kind", FP8)
def test_scales_that_the_backend_does_not_apply_are_refused(kind: str, off: float) -> None:
    plain = make_layer("HND")
    pages = torch.zeros(3, 2 * HALF, dtype=torch.uint8)

    class Other(Fp8Layer):
        def stored(self, numbers: torch.Tensor, scale: float) -> torch.Tensor:
            return super().stored(numbers, scale * off)

    layer = Other(pages, plain.key_at, plain.value_at, kv_cache_dtype=kind)
    with pytest.raises(PageLayoutError, match="not in its page"):
        discover_layout(layer, BLOCK_SIZE)


@pytest.mark.needs("fp8_cache")
@pytest.mark.parametrize("kind", FP8)
def test_the_cpu_backend_of_vllm_in_fp8(kind: str) -> None:
    """It cuts off; should it round one day, nothing here changes."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, HEAD_SIZE, kind)
    scales = {"k_scale": 0.37, "v_scale": 2.1}

    class CpuLayer(Layer):
        def write(self, layer, key, value, kv_cache, slots):
            halves = kv_cache.view(len(kv_cache), HEADS, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                key, value, *halves, slots, isa, **scales, kv_cache_dtype=kind
            )

    nothing = torch.empty(0)
    layer = CpuLayer(
        torch.zeros(4, 2 * HALF, dtype=torch.uint8), nothing, nothing, kv_cache_dtype=kind
    )
    layer.set_scales(*scales.values())
    found = discover_layout(layer, BLOCK_SIZE)
    slots = torch.randperm(4 * BLOCK_SIZE)
    given = torch.randn(2, len(slots), HEADS, HEAD_SIZE).bfloat16()
    layer.write(layer, *given, layer.kv_cache, slots)
    step = torch.finfo(FP8[kind]).eps
    for new, half, scale in zip(given, (found.keys, found.values), scales.values(), strict=True):
        stored = half.tokens(typed_pages(layer))[slots].float() * scale
        torch.testing.assert_close(stored, new.float(), rtol=step, atol=scale * 2.0**-9)


def test_the_cpu_backend_of_vllm() -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype = torch.bfloat16
    isa = _get_attn_isa(dtype, BLOCK_SIZE, HEAD_SIZE)

    class CpuLayer(Layer):
        def write(self, layer, key, value, kv_cache, slots):
            halves = kv_cache.view(len(kv_cache), HEADS, 2 * BLOCK_SIZE, -1).chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa)

    nothing = torch.empty(0)
    layer = CpuLayer(torch.randn(4, 2 * HALF).to(dtype), nothing, nothing)
    found = discover_layout(layer, BLOCK_SIZE)
    slots = torch.randperm(4 * BLOCK_SIZE)
    keys, values = torch.randn(2, len(slots), HEADS, HEAD_SIZE).to(dtype)
    layer.write(layer, keys, values, layer.kv_cache, slots)
    assert torch.equal(found.keys.tokens(layer.pages)[slots], keys)
    assert torch.equal(found.values.tokens(layer.pages)[slots], values)


@pytest.mark.parametrize("half", ["key_at", "value_at"])
def test_a_scrambled_page_is_refused(half: str) -> None:
    layer = make_layer("HND")
    at = getattr(layer, half)
    a, b = at[5, 1, 7].clone(), at[9, 1, 7].clone()
    at[5, 1, 7], at[9, 1, 7] = b, a
    before = layer.pages.clone()
    with pytest.raises(PageLayoutError, match=r"^model\.layers\.3\.attn: .* not a tiling"):
        discover_layout(layer, BLOCK_SIZE)
    assert torch.equal(layer.pages, before)


def lost(layer: Layer) -> None:
    layer.value_at[3, 0, 0] = layer.value_at[3, 0, 1]


def elsewhere(layer: Layer) -> None:
    write = layer.write

    def one_block_on(self_, key, value, kv_cache, slots):
        write(self_, key, value, kv_cache, slots + BLOCK_SIZE)

    layer.write = one_block_on  # type: ignore[method-assign]


def scaled(layer: Layer) -> None:
    write = layer.write

    def quantised(self_, key, value, kv_cache, slots):
        write(self_, key * 2, value, kv_cache, slots)

    layer.write = quantised  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [lost, elsewhere, scaled])
def test_values_that_are_not_found_are_refused(fault) -> None:
    layer = make_layer("NHD")
    fault(layer)
    with pytest.raises(PageLayoutError, match="not in its page"):
        discover_layout(layer, BLOCK_SIZE)


def test_pages_may_be_views_but_must_be_dense() -> None:
    cache = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    assert torch.equal(flat_pages(cache), cache.view(2, -1))
    assert torch.equal(flat_pages(cache.permute(0, 2, 1, 3)), cache.view(2, -1))
    every_other = cache[:, 0]  # two layers in one allocation: pages lie apart, each is dense
    assert torch.equal(flat_pages(every_other), every_other.reshape(2, -1))
    one_head = cache.as_strided((2, 1, 4, 5), (60, 999, 5, 1), 20)  # whose stride says nothing
    assert torch.equal(flat_pages(one_head), cache[:, 1].reshape(2, -1))
    assert torch.equal(flat_pages(cache[1:]), cache[1:].view(1, -1))
    for gaps in (cache[..., :4], cache[:, :, :3], cache[..., ::5]):
        with pytest.raises(
            ValueError, match=r"not dense in memory \(shape \(2, .*, strides \(60, "
        ):
            flat_pages(gaps)
