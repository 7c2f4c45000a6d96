# SPDX-License-Identifier: Apache-2.0
"""Layers run their kernels inside the block, and only there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from vllm_segreuse.compat import custom_op


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A norm, and a rotary embedding and an activation in plain torch, as under torch.compile."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    plain = VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))
    with set_current_vllm_config(plain):
        yield nn.ModuleDict(
            {
                "rotary": RotaryEmbedding(32, 32, 128, 10000.0, True, torch.float32),
                "activation": SiluAndMul(compile_native=False),
                "norm": RMSNorm(32),
            }
        )


def test_rotations_and_activations_have_kernels_that_do_not_run(model: nn.ModuleDict) -> None:
    found = custom_op.plain_ops(model, "forward_cuda")
    assert found == [model["rotary"], model["activation"]]
    with custom_op.running("forward_cuda", found):
        assert custom_op.plain_ops(model, "forward_cuda") == []


def test_the_kernel_runs_inside_the_block_only(model: nn.ModuleDict) -> None:
    rotary = model["rotary"]
    given = torch.arange(3), torch.zeros(3, 32), torch.zeros(3, 32)
    calls: list[str] = []
    rotary.forward_cuda = lambda *args: calls.append("kernel")
    rotary.forward_native = lambda *args: calls.append("another method than before")
    with custom_op.running("forward_cuda", [rotary]):
        rotary(*given)
    assert calls == ["kernel"]
    rotary(*given)
    assert calls == ["kernel"]


def test_an_error_in_a_pass_restores_what_ran_before(model: nn.ModuleDict) -> None:
    ops = [model["rotary"], model["activation"]]
    inputs: list[Any] = [(torch.arange(3), *torch.randn(2, 3, 32)), (torch.randn(3, 8),)]
    expected = [op(*map(torch.clone, given)) for op, given in zip(ops, inputs, strict=True)]
    with pytest.raises(ArithmeticError), custom_op.running("forward_cuda", ops):
        raise ArithmeticError
    assert custom_op.plain_ops(model, "forward_cuda") == ops, "none runs its kernel"
    found = [op(*map(torch.clone, given)) for op, given in zip(ops, inputs, strict=True)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_kernel_rotates_as_plain_torch_does(model: nn.ModuleDict) -> None:
    """vLLM's rotary kernel has a version for CPUs."""
    positions = torch.tensor([0, 5, 99])
    query, key = torch.randn(3, 64), torch.randn(3, 32)
    expected = model["rotary"](positions, query.clone(), key.clone())
    with custom_op.running("forward_cuda", [model["rotary"]]):
        found = model["rotary"](positions, query.clone(), key.clone())
    torch.testing.assert_close(found, expected)


def test_an_op_that_dispatches_otherwise_fails_loudly(model: nn.ModuleDict) -> None:
    bare = type(model["rotary"])
    model["rotary"] = bare.__new__(bare)
    nn.Module.__init__(model["rotary"])
    with pytest.raises(RuntimeError, match=r"RotaryEmbedding._forward_method, which this vLLM"):
        custom_op.plain_ops(model, "forward_cuda")
