# SPDX-License-Identifier: Apache-2.0
"""The proofs of start-up with the kernels of every instruction set that this machine has: ours, and
those of vLLM's attention with and without AMX."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.prefill.loaded import Loaded, loaded, prove, refusal
from vllm_segreuse.kernels import cpu
from vllm_segreuse.model.kv_format import typed_pages


@pytest.fixture(scope="module", params=["as it is", "without AMX"])
def machine(request: pytest.FixtureRequest, widest: str) -> Iterator[None]:
    """Where there is AMX, vLLM's attention in bf16 is another kernel, and lays pages out for it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "without AMX":
            if widest != "amx":
                pytest.skip("this machine has no amx that vLLM could do without")
            patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(
    scope="module",
    params=[
        "bfloat16",
        pytest.param("bfloat16 fp8_e4m3", marks=pytest.mark.needs("fp8_cache")),
    ],
)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, machine: None
) -> Iterator[Loaded]:
    """By dtype, and that of its KV cache."""
    with loaded(tmp_path_factory.mktemp("model"), *request.param.split()) as made:
        yield made


def test_a_sound_model_is_proven_by_every_library(model: Loaded, built: str) -> None:
    runtime = prove(model)
    assert f"attention and scores by C++ ({built})" in runtime.kernels
    eps = torch.finfo(model.vllm_config.model_config.dtype).eps
    stored = typed_pages(model.first).dtype
    near_ties = (eps * torch.finfo(stored).eps) ** 0.5 if stored.itemsize == 1 else 0.0
    assert runtime.max_deviation < eps * 16 + 2 * near_ties


@pytest.mark.usefixtures("built")
def test_a_mistake_is_found_beside_every_library(
    model: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof's own comparison may not be blind where kernels round otherwise."""
    attend = cpu.sparse_attention

    def unscaled(*given: Any, **more: Any) -> None:
        *others, scale = given
        attend(*others, 1.25 * scale, **more)

    monkeypatch.setattr(cpu, "sparse_attention", unscaled)
    why = refusal(model)
    assert "the sparse pass does not reproduce" in why or "attention of the pass is not" in why
