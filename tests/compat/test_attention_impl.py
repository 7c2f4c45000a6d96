# SPDX-License-Identifier: Apache-2.0
"""Attention layers compute by our function inside the block, and by their own behind it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_segreuse.compat.attention_impl import (
    absorbed_queries,
    replaced_forward,
    stock_forward,
)


class Impl:
    def forward(self, *given: Any) -> tuple[Any, ...]:
        return "vLLM's", *given


class Plain:
    """vLLM's `Attention`: its backend is given the layer."""

    def __init__(self) -> None:
        self.impl = Impl()

    def attend(self, *given: Any) -> Any:
        return self.impl.forward(self, *given)


class Latent:
    """vLLM's `MLAAttention`: computes in a method of its own."""

    num_heads, head_size, v_head_dim, kv_cache = 2, 7, 3, "cache"

    def __init__(self) -> None:
        self.impl: Any = SimpleNamespace()

    def forward_impl(self, *given: Any) -> Any:
        return "vLLM's", *given

    def attend(self, *given: Any) -> Any:
        return self.forward_impl(*given)


LAYERS = [Plain, Latent]


def ours(layer: Any, query: Any, *rest: Any) -> tuple[Any, ...]:
    return "ours", layer, query, *rest


def test_all_layers_are_replaced_and_restored() -> None:
    layers = [Plain(), Latent(), Plain()]
    with replaced_forward(layers, ours):
        for layer in layers:
            assert layer.attend("query", "key") == ("ours", layer, "query", "key")
        assert Plain().attend()[0] == Latent().attend()[0] == "vLLM's", "layers of other models"
    assert all(layer.attend()[0] == "vLLM's" for layer in layers)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_stock_one_is_called_with_the_same(kind: type[Plain | Latent]) -> None:
    layer = kind()
    expected = layer.attend("query", "key")
    with replaced_forward([layer], stock_forward):
        assert layer.attend("query", "key") == expected


@pytest.mark.parametrize("kind", LAYERS)
def test_an_error_in_a_pass_restores_them_too(kind: type[Plain | Latent]) -> None:
    layer = kind()
    with pytest.raises(ArithmeticError), replaced_forward([layer], ours):
        raise ArithmeticError
    assert (vars(layer.impl), list(vars(layer))) == ({}, ["impl"])


def test_layers_without_a_forward_fail_loudly() -> None:
    whole, broken = Plain(), SimpleNamespace(impl=object())
    with (
        pytest.raises(RuntimeError, match=r"object\.forward, which this vLLM does not have"),
        replaced_forward([whole, broken], ours),
    ):
        pass
    assert whole.attend()[0] == "vLLM's"


def test_vllms_layers_look_their_forward_up_when_they_run() -> None:
    """An attribute of the instance hides the class's own."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    original, layer = impl.forward, SimpleNamespace(impl=impl)
    with replaced_forward([layer], ours):
        assert impl.forward(layer, "query") == ("ours", layer, "query")
    assert impl.forward == original


class Absorbing(Latent):
    """Hands its backend queries as vLLM does: decodes first, in one tensor or in two."""

    whole = False

    def forward_impl(self, query: Any, *rest: Any, output: Any) -> Any:
        _, _, kv_cache, metadata = rest
        assert len(query) == metadata.num_decode_tokens == metadata.num_actual_tokens
        assert (metadata.num_prefills, kv_cache) == (0, "cache")
        assert output.shape == (len(query), self.num_heads * self.v_head_dim)
        both = (2 * query[..., :2], query[..., 2:])
        self.impl.forward_mqa(torch.cat(both, -1) if self.whole else both, kv_cache, metadata, self)


@pytest.mark.parametrize("whole", [False, True])
def test_queries_are_absorbed_as_the_layer_does_it(whole: bool) -> None:
    layer = Absorbing()
    layer.whole = whole
    query = torch.randn(5, 2, 4)
    found = absorbed_queries(layer, query)
    assert torch.equal(found, torch.cat([2 * query[..., :2], query[..., 2:]], -1))
    assert vars(layer.impl) == {}, "the backend has its own function again"
    assert absorbed_queries(layer, query[:0]).shape == (0, 2, 7)


def test_a_layer_that_attends_otherwise_fails_loudly() -> None:
    class Other(Absorbing):
        def forward_impl(self, *_: Any, **__: Any) -> Any:
            return None

    layer = Other()
    with pytest.raises(RuntimeError, match=r"Other\.forward_impl of this vLLM does not attend by"):
        absorbed_queries(layer, torch.randn(5, 2, 4))
    assert vars(layer.impl) == {}
