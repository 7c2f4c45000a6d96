# SPDX-License-Identifier: Apache-2.0
"""Attention layers compute by our function inside the block, and by their own behind it."""

import pytest

from vllm_segreuse.compat.attention_impl import replaced_forward


class Impl:
    def forward(self) -> str:
        return "vLLM's"


def ours() -> str:
    return "ours"


def test_all_layers_are_replaced_and_restored() -> None:
    impls = [Impl(), Impl()]
    with replaced_forward(impls, ours):
        assert [impl.forward() for impl in impls] == ["ours", "ours"]
        assert Impl().forward() == "vLLM's", "layers of other models"
    assert [impl.forward() for impl in impls] == ["vLLM's", "vLLM's"]


def test_an_error_in_a_pass_restores_them_too() -> None:
    impl = Impl()
    with pytest.raises(ArithmeticError), replaced_forward([impl], ours):
        raise ArithmeticError
    assert vars(impl) == {}


def test_layers_without_a_forward_fail_loudly() -> None:
    with (
        pytest.raises(RuntimeError, match=r"object\.forward, which this vLLM does not have"),
        replaced_forward([object()], ours),
    ):
        pass


def test_vllms_layers_look_their_forward_up_when_they_run() -> None:
    """An attribute of the instance hides the class's own."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    impl = CPUAttentionBackendImpl.__new__(CPUAttentionBackendImpl)
    original = impl.forward
    with replaced_forward([impl], ours):
        assert impl.forward() == "ours"
    assert impl.forward == original
