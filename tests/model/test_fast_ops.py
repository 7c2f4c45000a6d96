# SPDX-License-Identifier: Apache-2.0
"""Fused kernels run during the pass and compute the same; the stock path keeps what it had."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm import ir
from vllm.platforms import current_platform

from vllm_segreuse.model import fast_ops
from vllm_segreuse.model.fast_ops import FastOps

OPS = (ir.ops.rms_norm, ir.ops.fused_add_rms_norm)
OURS = "segreuse_cpu"


@pytest.fixture(autouse=True)
def _native_first() -> Iterator[None]:
    """As vLLM has it on CPUs."""
    current_platform.import_kernels()
    with ir.ops.rms_norm.set_priority(["native"]), ir.ops.fused_add_rms_norm.set_priority([]):
        yield


def priorities() -> list[list[str]]:
    return [list(op.get_priority()) for op in OPS]


def offer(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of another name, which take the same arguments as ours."""
    for op in OPS:
        kernel = copy.copy(op.impls[OURS])
        kernel.provider = provider
        monkeypatch.setitem(op.impls, provider, kernel)


def test_they_are_preferred_inside_the_block_only() -> None:
    ops, before = FastOps(nn.Identity()), priorities()
    with ops.preferred():
        assert priorities() == [[OURS, "native"]] * 2
    assert priorities() == before


def test_an_error_in_a_pass_leaves_the_stock_path_as_it_was() -> None:
    ops, before = FastOps(nn.Identity()), priorities()
    with pytest.raises(ArithmeticError), ops.preferred():
        raise ArithmeticError
    assert priorities() == before


def test_what_vllm_prefers_itself_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not take the arguments falls back as it would without the pass."""
    ops = FastOps(nn.Identity())
    offer("another", monkeypatch)
    with ir.ops.rms_norm.set_priority(["another", "native"]), ops.preferred():
        assert ir.ops.rms_norm.get_priority() == [OURS, "another", "native"]


def test_a_second_model_of_the_process_registers_nothing_anew() -> None:
    FastOps(nn.Identity())
    kernel = ir.ops.rms_norm.impls[OURS]
    FastOps(nn.Identity())
    assert ir.ops.rms_norm.impls[OURS] is kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_compute_what_the_native_ones_compute(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 5, 64).to(dtype)
    weight = torch.randn(64).to(dtype)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = (exact * weight.double()).to(dtype)
    added = residual.double() + x.double()
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    with FastOps(nn.Identity()).preferred():
        found = ir.ops.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(found, expected, **tolerance)
        _, summed = ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    torch.testing.assert_close(summed, added.to(dtype), **tolerance)


def test_norms_are_rounded_to_the_nearest() -> None:
    """vLLM's CPU kernels truncate in bf16 where there is no instruction for it."""
    x, residual = torch.randn(2, 20, 256).bfloat16()
    weight = torch.ones(256).bfloat16()
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    with FastOps(nn.Identity()).preferred():
        found = ir.ops.rms_norm(x, weight, 1e-5)
        _, summed = ir.ops.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert (found == exact.bfloat16()).double().mean() > 0.9
    assert torch.equal(summed, (x.double() + residual.double()).bfloat16())


def test_what_they_do_not_take_is_left_to_the_native_ones() -> None:
    """The kernels read rows one after the other, and weights of the same dtype."""
    FastOps(nn.Identity())
    takes = ir.ops.rms_norm.impls[OURS].supports_args
    adds = ir.ops.fused_add_rms_norm.impls[OURS].supports_args
    x, weight = torch.randn(4, 8), torch.randn(8)
    assert takes(x, weight, 1e-5)
    assert adds(x, x, weight, 1e-5)
    for wrong in (
        (x, None, 1e-5),
        (x, weight.double(), 1e-5),
        (x, weight, 1e-5, 4),
        (torch.randn(8, 4).t(), weight, 1e-5),
    ):
        assert not takes(*wrong)
        assert not adds(wrong[0], *wrong)
    strided = torch.randn(4, 16)[:, :8]
    assert takes(strided, weight, 1e-5)
    assert not adds(strided, x, weight, 1e-5)
    assert not adds(x, strided, weight, 1e-5)


class _Op(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._forward_method = self.forward_native

    def forward(self) -> str:
        return self._forward_method()

    def forward_native(self) -> str:
        return "native"

    def forward_cuda(self) -> str:
        return "kernel"


def test_on_gpus_rotations_and_activations_run_their_kernels_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FastOps(nn.Identity())
    offer("vllm_c", monkeypatch)
    op = _Op()
    gpu: Any = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False)
    monkeypatch.setattr(fast_ops, "current_platform", gpu)
    monkeypatch.setattr(fast_ops, "plain_ops", lambda model, method: [op])
    ops = FastOps(nn.Identity())
    with ops.preferred():
        assert op() == "kernel"
        assert [names[0] for names in priorities()] == ["vllm_c"] * 2
    assert op() == "native"


def test_elsewhere_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    other: Any = SimpleNamespace(is_cuda=lambda: False, is_cpu=lambda: False)
    monkeypatch.setattr(fast_ops, "current_platform", other)
    before = priorities()
    with FastOps(nn.Identity()).preferred():
        assert priorities() == before
