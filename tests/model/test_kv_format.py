# SPDX-License-Identifier: Apache-2.0
"""What a layer stores is read as what it stands for; what cannot be read so is refused by name."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from vllm.config.cache import CacheDType
from vllm.platforms import current_platform

from vllm_segreuse.engine.supported import KV_CACHE_DTYPES
from vllm_segreuse.model.kv_format import (
    KvScales,
    check_format,
    kv_scales,
    plain_queries,
    typed_pages,
)
from vllm_segreuse.model.modules import UnsupportedModelError

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def layer(kind: str, key: float = 0.5, value: float = 0.25, **changes: Any) -> Any:
    cache = torch.zeros(3, 2, 4, 8, dtype=torch.uint8 if kind in FP8 else torch.bfloat16)
    given = {
        "layer_name": "layer 7",
        "kv_cache_dtype": kind,
        "kv_cache": cache,
        "dtype": torch.bfloat16,
        "_k_scale": torch.tensor(key),
        "_v_scale": torch.tensor(value),
        "_k_scale_float": key,
        "_v_scale_float": value,
        "_q_scale_float": 4.0,
    }
    return SimpleNamespace(**given | changes)


@pytest.mark.parametrize("kind", FP8)
def test_bytes_are_read_as_the_fp8_that_the_layer_names(kind: str) -> None:
    given = layer(kind)
    given.kv_cache[1, 1, 2, 3] = 0x45
    pages = typed_pages(given)
    assert (pages.dtype, pages.shape) == (FP8[kind], (3, 64))
    expected = torch.tensor([0x45], dtype=torch.uint8).view(FP8[kind]).float()
    assert pages.float()[1, 32 + 16 + 3] == expected
    assert pages.data_ptr() == given.kv_cache.data_ptr()
    assert kv_scales(given) == KvScales(0.5, 0.25)
    check_format([given, layer(kind, 3.0)])


@pytest.mark.parametrize("kind", sorted(set(KV_CACHE_DTYPES) - FP8.keys()))
def test_plain_caches_are_read_as_they_are(kind: str) -> None:
    """Their layers may have scales: vLLM does not apply them."""
    given = layer(kind)
    assert typed_pages(given).dtype == torch.bfloat16
    assert kv_scales(given) == KvScales(1.0, 1.0)
    check_format([given])


@pytest.mark.parametrize("kind", sorted(set(get_args(CacheDType)) - set(KV_CACHE_DTYPES)))
def test_what_is_quantised_otherwise_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^layer 7 stores keys and values as {kind}$"):
        check_format([layer("fp8"), layer(kind)])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_none_are_refused(scale: float) -> None:
    with pytest.raises(UnsupportedModelError, match=f"layer 7 has a scale of {scale} for its keys"):
        check_format([layer("fp8", key=scale)])
    with pytest.raises(UnsupportedModelError, match=f"a scale of {scale} for its values"):
        check_format([layer("fp8_e5m2", value=scale)])


def test_scales_of_each_head_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer 7 has 8 scales for its keys and values"):
        check_format([layer("fp8", _v_scale=torch.ones(8))])
    with pytest.raises(UnsupportedModelError, match="layer 7 has 2 scales for its keys and values"):
        check_format([layer("fp8", _k_scale=torch.ones(2))])
    check_format([layer("fp8", _k_scale=torch.ones(1), _v_scale=torch.ones(1))])


def test_layers_that_differ_are_refused() -> None:
    others = [layer("fp8"), layer("auto", layer_name="layer 8")]
    with pytest.raises(UnsupportedModelError, match=r"layer 7 in .*e4m3fn, layer 8 in .*bfloat16"):
        check_format(others)


def test_fp8_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", lambda *_: True)
    check_format([layer("auto")])
    with pytest.raises(UnsupportedModelError, match="fp8 of older AMD GPUs"):
        check_format([layer("fp8")])


def test_quantised_queries_are_made_plain_ones() -> None:
    query = torch.tensor([[0.5, -3.0]])
    quantised = query.to(torch.float8_e4m3fn)
    assert torch.equal(plain_queries(layer("fp8"), quantised), (4 * query).bfloat16())
    plain = query.bfloat16()
    assert plain_queries(layer("fp8"), plain) is plain
