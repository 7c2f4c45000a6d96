# SPDX-License-Identifier: Apache-2.0
"""How many tokens the proofs work on, and how far they are moved: as far as the model goes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_segreuse.model.modules import UnsupportedModelError
from vllm_segreuse.prefill.proofs.scratch import count_and_distance, relative_error, tolerance


def layer(chunk: int | None = None) -> Any:
    return SimpleNamespace(
        attention_chunk_size=chunk,
        sliding_window=None,
        impl=SimpleNamespace(get_impl_variants=list),
    )


def found(
    chunk: int | None, max_model_len: int, batched: int = 8192, block_size: int = 16
) -> tuple[int, int]:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched),
    )
    return count_and_distance([layer(), layer(chunk)], block_size, config)


@pytest.mark.parametrize(
    ("max_model_len", "batched", "block_size", "expected"),
    [
        (4096, 8192, 16, (61, 211)),  # all but three tokens of four blocks
        (4096, 8192, 32, (125, 211)),
        (4096, 50, 16, (50, 211)),
        (100, 8192, 16, (50, 50)),  # nothing leaves the model's positions
        (61 + 211, 8192, 16, (61, 211)),
        (61 + 210, 8192, 16, (61, 210)),
    ],
)
def test_four_blocks_are_moved_within_the_models_positions(
    max_model_len: int, batched: int, block_size: int, expected: tuple[int, int]
) -> None:
    assert found(None, max_model_len, batched, block_size) == expected


def test_where_tokens_would_be_moved_out_of_their_chunk_they_are_moved_by_all_of_it() -> None:
    """A chunk of the layers that have the longest; with 16 tokens per block 61 are moved by 211."""
    assert found(61 + 211, 4096) == (61, 211)
    assert found(61 + 210, 4096) == (61, 271)
    assert found(64, 4096) == (61, 64)
    assert found(256, 256 + 61) == (61, 256)
    with pytest.raises(
        UnsupportedModelError,
        match="prompts of 316 tokens are too short to prove layers that attend to chunks of 256",
    ):
        found(256, 256 + 60)


def test_two_ways_to_compute_the_same_differ_by_some_steps_of_the_type() -> None:
    assert tolerance(torch.bfloat16) == 2.0**-4
    assert tolerance(torch.float16) == 2.0**-7
    assert tolerance(torch.float32) == 1e-4
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
