# SPDX-License-Identifier: Apache-2.0
"""What cannot be proven is refused at start-up, in one sentence (failure case 10)."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.engine import NAMESPACE, Prompts, engine

REFUSED = {
    "mistral_window": "every layer of the model attends to a sliding window",
    "jamba": "hand on a state in place of keys and values",
    "minicpm3": "rotates 16 of a key's 32 channels apart from the others",
    "deepseek_v2": "vLLM has no prefix cache on CPUs without AMX",
}


@pytest.mark.parametrize("shape", REFUSED)
def test_10_models_that_cannot_be_proven_are_refused_by_name(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape == "deepseek_v2":
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with pytest.raises(RuntimeError, match=REFUSED[shape]) as refusal, engine(shape):
        pass
    assert str(refusal.value).startswith("segment reuse cannot start: ")
    assert "serve this model without --segreuse" in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        (
            {"kv_cache_dtype": "fp8_per_token_head"},
            "kv_cache_dtype=fp8_per_token_head is quantised in a way that reuse does not handle",
        ),
    ],
)
def test_10_configurations_that_cannot_be_proven_are_refused(
    arguments: dict[str, Any], why: str
) -> None:
    with pytest.raises(RuntimeError, match=why), engine("qwen3", **arguments):
        pass


def test_10_a_wrong_rotation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_segreuse.model.rope import DeltaRope

    monkeypatch.setattr(DeltaRope, "tables", lambda self, deltas: _tables(self, deltas + 1))
    with pytest.raises(RuntimeError, match="not a rotation"), engine("llama"):
        pass


def _tables(rope: Any, deltas: Any) -> Any:
    angles = deltas.double()[:, None] * rope.frequencies[None]
    return angles.cos().float(), angles.sin().float()


def test_10_a_pass_that_sees_the_future_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row for all scattered queries: the mistake that most "recompute top-k" code makes."""
    from vllm_segreuse.prefill import rows

    def one_row_per_request(tokens: Any) -> Any:
        starts = np.zeros(len(tokens), dtype=np.bool_)
        starts[0] = True
        return starts

    monkeypatch.setattr(rows, "row_starts", one_row_per_request)
    with pytest.raises(RuntimeError, match="does not reproduce"), engine("llama"):
        pass


def test_10_a_kernel_that_turns_the_wrong_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_segreuse.kernels import cpu

    align = cpu.align
    monkeypatch.setattr(
        cpu,
        "align",
        lambda pages, parts, moves: align(pages, parts, dataclasses.replace(moves, sin=-moves.sin)),
    )
    with pytest.raises(RuntimeError, match="moved keys or values are not"), engine("llama"):
        pass


def test_10_a_kernel_that_sees_the_future_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_segreuse.kernels import cpu

    attend = cpu.sparse_attention
    monkeypatch.setattr(
        cpu,
        "sparse_attention",
        lambda *args, **more: attend(*args[:-2], args[-2] + 1, args[-1], **more),
    )
    with pytest.raises(RuntimeError, match="does not reproduce"), engine("llama"):
        pass


def test_the_proof_fits_a_model_with_few_positions() -> None:
    with engine("llama", max_model_len=96, max_num_batched_tokens=96) as running:
        text = Prompts(running.vocab_size)
        document = text.tokens(64)
        options = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}
        running.ask(document, options=options, max_tokens=1)
        answer = running.ask(text.tokens(9) + document, options=options, max_tokens=2)[0]
        assert answer.report["reused_tokens"] == 63  # the last token is always computed
