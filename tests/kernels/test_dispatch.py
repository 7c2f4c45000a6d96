# SPDX-License-Identifier: Apache-2.0
"""The fastest kernels that work are chosen, and what is chosen is said."""

from dataclasses import replace

import pytest
import torch

from vllm_segreuse.kernels import (
    cpu,
    cpu_store,
    cuda,
    dispatch,
    flash_attention,
    reference,
    reference_codecs,
)
from vllm_segreuse.kernels.codecs import Codec
from vllm_segreuse.kernels.pages import PageLayout, TiledStrides

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def layout(head_size: int) -> PageLayout:
    strides = TiledStrides((1, 32, head_size), 0, 0, 32, 0, head_size, head_size, 0, 1)
    return PageLayout(strides, strides)


def test_a_cpu_runs_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    chosen = dispatch.choose(CPU, torch.bfloat16, layout(64))
    assert (chosen.align, chosen.sparse_attention, chosen.token_scores) == (
        cpu.align,
        cpu.sparse_attention,
        cpu.token_scores,
    )
    assert chosen.store is cpu_store.store
    assert chosen.description == "alignment, attention and scores by C++ (avx2)"


@pytest.mark.parametrize(("size", "dtype"), [(24, torch.float32), (64, torch.float8_e5m2)])
def test_what_the_library_cannot_do_is_left_to_others(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    chosen = dispatch.choose(CPU, dtype, layout(size))
    assert (chosen.align, chosen.sparse_attention) == (cpu.align, None)
    assert chosen.store is cpu_store.store
    assert f"head size {size} in {dtype}" in chosen.description


@pytest.mark.parametrize(
    ("queries", "why"),
    [
        (None, "head size 24 in torch.bfloat16"),
        (torch.bfloat16, "head size 24 in torch.bfloat16"),
        (torch.float32, "head size 24 in torch.bfloat16, queries in torch.float32"),
    ],
)
def test_it_is_said_which_pages_a_kernel_does_not_take(
    queries: torch.dtype | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    chosen = dispatch.choose(CPU, torch.bfloat16, layout(24), queries)
    assert chosen.description == (
        f"alignment by C++ (avx2), attention by rows of vLLM's kernel and scores by torch ({why})"
    )


def test_queries_may_be_of_another_type_than_fp8_pages_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    for pages, queries, taken in (
        (torch.bfloat16, None, True),
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float8_e4m3fn, None, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float64, None, False),
    ):
        chosen = dispatch.choose(CPU, pages, layout(16), queries)
        assert (chosen.sparse_attention is not None) == taken
        assert cpu.supports_attention(layout(16).keys, pages, queries) == taken


def test_runs_of_16_tokens_are_rows_but_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the library is as fast for long runs; without it, long runs are rows, too."""
    pytest.importorskip("triton")
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    for missing, long_run in ((None, None), ("no compiler", 16)):
        monkeypatch.setattr(cpu, "unavailable", lambda missing=missing: missing)
        assert dispatch.choose(CPU, torch.bfloat16, layout(64)).long_run == long_run
    assert dispatch.choose(GPU, torch.bfloat16, layout(64)).long_run == 16


def test_without_the_library_torch_does_it_and_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: "it was not built")
    chosen = dispatch.choose(CPU, torch.bfloat16, layout(64))
    assert (chosen.align, chosen.sparse_attention) == (reference.align, None)
    assert chosen.store is reference.store
    assert chosen.description.endswith("(it was not built)")


@pytest.mark.parametrize("missing", [None, "built without nvcc"])
def test_a_gpu_runs_cuda_or_triton(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_align = pytest.importorskip("vllm_segreuse.kernels.triton_align", exc_type=ImportError)
    from vllm_segreuse.kernels import triton_attention, triton_schedule, triton_scores

    monkeypatch.setattr(cuda, "unavailable", lambda: missing)
    chosen = dispatch.choose(GPU, torch.bfloat16, layout(128))
    assert chosen.align is (triton_align.align if missing else cuda.align)
    assert chosen.sparse_attention is triton_attention.sparse_attention
    assert chosen.plan_attention is triton_schedule.plan
    assert chosen.token_scores is triton_scores.token_scores
    assert (missing or "CUDA C++") in chosen.description
    assert "FlashAttention" not in chosen.description


def test_flash_attention_has_common_keys_where_it_takes_the_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from vllm_segreuse.kernels import triton_schedule

    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(flash_attention, "find_varlen_attention", lambda: print)
    chosen = dispatch.choose(GPU, torch.bfloat16, layout(128))
    assert chosen.plan_attention is triton_schedule.plan_with_flash
    assert chosen.description.endswith("common keys by FlashAttention 3")
    assert chosen == dispatch.choose(GPU, torch.bfloat16, layout(128))


@pytest.mark.parametrize(
    ("size", "dtype", "served"),
    [
        (16, torch.float32, True),
        (256, torch.float16, True),
        (8, torch.bfloat16, False),
        (257, torch.bfloat16, False),
        (128, torch.float8_e4m3fn, False),  # queries, too
    ],
)
def test_a_gpu_attends_by_triton_where_triton_can(
    size: int, dtype: torch.dtype, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    chosen = dispatch.choose(GPU, dtype, layout(size))
    assert (chosen.sparse_attention is not None) == served
    assert (chosen.plan_attention is not None) == served
    assert (chosen.token_scores is not reference.token_scores) == served
    assert chosen.align is cuda.align
    assert (f"head size {size} in {dtype}" in chosen.description) != served


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_latent_pages_are_moved_and_left_to_the_stock_backend_otherwise(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys are of a size that attention kernels take, and are not all that is attended to."""
    if device == GPU:
        pytest.importorskip("triton")
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    both = TiledStrides((1, 32, 576), 0, 0, 32, 0, 576, 576, 0, 1)
    chosen = dispatch.choose(device, torch.bfloat16, PageLayout(both, both, both))
    narrow = replace(both, shape=(1, 32, 64), channel_tile=64)
    assert chosen == dispatch.choose(device, torch.bfloat16, PageLayout(narrow, narrow, both))
    assert chosen.align is (cpu.align if device == CPU else cuda.align)
    assert (chosen.sparse_attention, chosen.plan_attention) == (None, None)
    assert chosen.token_scores is reference.token_scores
    assert "(latent KV of 576 channels)" in chosen.description


def test_other_devices_than_a_cpu_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(cuda, "unavailable", lambda: "no CUDA")
    chosen = dispatch.choose(torch.device("xpu"), torch.bfloat16, layout(128))
    assert "Triton" in chosen.description


def test_a_gpu_without_triton_runs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no module {name}")

    monkeypatch.setattr(dispatch.importlib, "import_module", fail)
    chosen = dispatch.choose(GPU, torch.bfloat16, layout(128))
    assert (chosen.align, chosen.sparse_attention) == (reference.align, None)
    assert chosen.carry is None
    assert "no Triton" in chosen.description


@pytest.mark.parametrize("missing", [None, "built without nvcc"])
def test_a_gpu_whose_kernels_do_not_move_a_dtype_runs_torch(
    missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(cuda, "unavailable", lambda: missing)
    chosen = dispatch.choose(GPU, torch.float64, layout(128))
    assert (chosen.align, chosen.token_scores) == (reference.align, reference.token_scores)
    assert "does not move torch.float64" in chosen.description


def test_codecs_are_refused_by_name() -> None:
    refused = dispatch.codec_refused
    assert refused(Codec.RAW, torch.float8_e4m3fn) is None
    assert refused(Codec.INT8, torch.bfloat16) is None
    assert refused(Codec.FP8, torch.float8_e5m2) == (
        "KV in torch.float8_e5m2 is stored by codec raw only, not fp8"
    )


@pytest.mark.parametrize("head_size", [64, 72])
def test_on_a_cpu_the_library_encodes_and_decodes(
    head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    chosen = dispatch.choose(CPU, torch.bfloat16, layout(head_size))
    assert (chosen.encode, chosen.decode) == (cpu_store.encode, cpu.align)


def test_elsewhere_torch_encodes_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: "it was not built")
    for device in (CPU, GPU):
        chosen = dispatch.choose(device, torch.bfloat16, layout(64))
        assert (chosen.encode, chosen.decode) == (reference_codecs.encode, reference.align)


def test_changes_are_carried_by_a_kernel_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs the reference is one, too; on GPUs it would take too long, and nothing is carried."""
    triton_carry = pytest.importorskip("vllm_segreuse.kernels.triton_carry", exc_type=ImportError)
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    monkeypatch.setattr(cpu, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    for size, dtype in ((64, torch.bfloat16), (24, torch.bfloat16), (64, torch.float8_e5m2)):
        assert dispatch.choose(CPU, dtype, layout(size)).carry is cpu.carry
        assert dispatch.choose(GPU, dtype, layout(size)).carry is triton_carry.carry
    assert dispatch.choose(GPU, torch.float64, layout(64)).carry is None
    uneven = replace(layout(64), values=replace(layout(64).values, shape=(2, 32, 64)))
    assert dispatch.choose(GPU, torch.bfloat16, uneven).carry is None
    monkeypatch.setattr(cpu, "unavailable", lambda: "it was not built")
    assert dispatch.choose(CPU, torch.bfloat16, layout(64)).carry is reference.carry
