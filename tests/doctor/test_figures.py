# SPDX-License-Identifier: Apache-2.0
"""Figures and notes of a diagnosis, of models that are made up."""

from __future__ import annotations

from types import SimpleNamespace as Of
from typing import Any

import pytest

from segreuse_tools.doctor import memory_use
from segreuse_tools.doctor.diagnosis import _drafted, _tight
from segreuse_tools.doctor.looking import one_line
from segreuse_tools.doctor.memory_use import Memory, memory_of
from vllm_segreuse.cache.index import bytes_per_block

GIB = 1 << 30


def engine(ranks: int = 1, stages: int = 1) -> Any:
    """An engine's configuration, as far as it is asked."""
    return Of(
        model_config=Of(max_model_len=2049, get_total_num_hidden_layers=lambda: 3),
        parallel_config=Of(
            tensor_parallel_size=ranks,
            pipeline_parallel_size=stages,
            world_size=ranks * stages,
        ),
        cache_config=Of(block_size=32),
        speculative_config=None,
    )


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_use, "pass_bytes", lambda config: 77)


def test_kv_is_counted_in_whole_blocks() -> None:
    found = memory_of(engine(), Of(kv=((8, 640), (1, 360)), weight_bytes=7001))
    blocks = GIB // 32_000
    assert found == Memory(
        weight_bytes=7001,
        kv_bytes_per_token=1000,
        kv_bytes_per_document=32 * 32_000,  # 1,000 tokens are 31 blocks and a part of one
        kv_bytes_per_longest_prompt=65 * 32_000,
        documents_per_gib=blocks // 32,
        tokens_per_gib=blocks * 32,
        index_bytes_per_block=bytes_per_block(32),
        index_bytes_per_gib=blocks * bytes_per_block(32),
        pass_bytes=77,
    )


@pytest.mark.parametrize(
    ("ranks", "per_token"), [(1, 640 + 320 + 360), (2, 320 + 160 + 360), (8, 80 + 80 + 360)]
)
def test_ranks_share_the_heads_of_each_layer_and_hold_all_latent_vectors(
    ranks: int, per_token: int
) -> None:
    """Of eight heads, of four (copies from the fifth rank on), and of one latent vector."""
    kv = ((8, 640), (4, 320), (1, 360))
    found = memory_of(engine(ranks), Of(kv=kv, weight_bytes=1600))
    assert found.kv_bytes_per_token == per_token
    assert found.weight_bytes == 1600 // ranks


def test_of_pipeline_stages_the_one_with_the_most_kv_counts() -> None:
    """Of three layers the first stage has two."""
    found = memory_of(engine(2, stages=2), Of(kv=((8, 640), (4, 320), (4, 320)), weight_bytes=1600))
    assert found.kv_bytes_per_token == (640 + 320) // 2
    assert found.weight_bytes == 400
    one = memory_of(engine(stages=2), Of(kv=((4, 320), (4, 320), (8, 800)), weight_bytes=1600))
    assert one.kv_bytes_per_token == 800


@pytest.mark.parametrize(
    ("weights", "device", "ranks", "is_said"),
    [
        (8 * GIB, "cuda", 1, True),
        (8 * GIB - 1, "cuda", 1, False),
        (8 * GIB - 1, "cuda", 2, False),
        (4 * GIB, "cpu", 2, True),
        (4 * GIB - 1, "cpu", 2, False),
    ],
)
def test_weights_that_do_not_fit_are_a_note(
    weights: int, device: str, ranks: int, is_said: bool
) -> None:
    machine = {"device": device, "memory_bytes": 8 * GIB}
    said = ("weights of 8.0 GiB do not fit into the 8.0 GiB that are here",)
    assert _tight(weights, machine, engine(ranks)) == (said if is_said else ())


def test_a_draft_with_layers_of_its_own_is_a_note() -> None:
    config = engine()
    assert _drafted(config) == ()
    config.speculative_config = Of(method="ngram")
    assert _drafted(config) == ()
    config.speculative_config = Of(method="eagle3")
    assert _drafted(config) == (
        "layers of the draft (eagle3) are checked at start-up only, and their weights and KV are "
        "not counted here",
    )


class PydanticError(Exception):
    def errors(self) -> list[dict[str, str]]:
        return [{"msg": "Value error, no such thing."}, {"msg": "another"}]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PydanticError(), "no such thing"),
        (ValueError("several\n  lines:\n"), "several lines"),
        (ValueError(), "ValueError"),
        (ValueError("no X. Supported architectures: A, B"), "no X"),
        (ValueError("ab " * 133 + "a"), "ab " * 133 + "a"),
        (ValueError("ab " * 133 + "ab."), "ab " * 132 + "..."),
    ],
)
def test_an_error_of_vllm_is_one_line_of_four_hundred_characters(
    error: Exception, text: str
) -> None:
    assert one_line(error) == text
