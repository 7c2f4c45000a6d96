# SPDX-License-Identifier: Apache-2.0
"""What keeping all blocks of windowed layers takes: the documentation's table is the doctor's."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from segreuse_tools.doctor.windowed_kv import held_blocks
from tests.doctor import windowed

WRITTEN: dict[str, list[dict[str, Any]]] = json.loads(windowed.FILE.read_text())
SHAPE: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}


def test_the_table_has_all_models() -> None:
    assert [*WRITTEN] == [*windowed.MODELS]


@pytest.mark.parametrize("name", windowed.MODELS)
def test_the_table_is_what_the_doctor_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")  # gpt-oss is refused otherwise
    written = WRITTEN[name][-1]
    found = windowed.windowed(name, written["prompt_tokens"])
    assert found is not None
    assert asdict(found) == written


@pytest.mark.parametrize(
    ("tokens", "whole", "window"), [(1, 1, 1), (95, 3, 3), (96, 4, 4), (127, 4, 3), (900, 29, 4)]
)
def test_blocks_that_a_window_has_passed_are_not_held(tokens: int, whole: int, window: int) -> None:
    """vLLM frees whole blocks; `tests/e2e/test_hybrid_windows.py` compares it with an engine's."""
    assert held_blocks(FullAttentionSpec(block_size=32, **SHAPE), tokens) == whole
    windowed_spec = SlidingWindowSpec(block_size=32, sliding_window=96, **SHAPE)
    assert held_blocks(windowed_spec, tokens) == window


def test_of_gpt_oss_half_of_the_layers_count() -> None:
    """12 of 24 layers, 8 KV heads of 64 channels, a window of 128 tokens in blocks of 32."""
    [short, _] = WRITTEN["gpt-oss-20b"]
    block = 32 * 2 * 8 * 64 * 2
    assert short["bytes_all"] == 24 * block * 257
    assert short["bytes_windows"] == 12 * block * (257 + 5)
