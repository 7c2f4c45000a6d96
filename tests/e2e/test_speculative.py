# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: ngram works beside reuse, draft models are refused (failure cases 18)."""

import numpy as np
import pytest

from bench.shapes import make_model
from tests.e2e.engine import BLOCK_SIZE, NAMESPACE, Engine, Prompts, engine
from tests.e2e.test_equality import assert_same

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
EVERYTHING = NAMESPACE | {"segreuse_recompute_ratio": 1.0, "segreuse_min_reused_tokens": 16}
SHIFT = NAMESPACE | {"segreuse_policy": "shift", "segreuse_min_reused_tokens": 16}
LONG = {"max_tokens": 3 * BLOCK_SIZE, "ignore_eos": True}


@pytest.mark.shows("drafts", family="qwen3")
def test_18_ngram_speculation_works_beside_reuse() -> None:
    with engine("qwen3", dtype="float32", max_model_len=1024, speculative_config=NGRAM) as reusing:
        text = Prompts(reusing.vocab_size, seed=51)
        documents = [text.tokens(200), text.tokens(96)]
        prompts = [text.around(*documents), documents[0][3:] + documents[1] + text.tokens(2)]
        reference = reusing.ask(*prompts, **LONG)
        reusing.reset()

        reusing.ask(*documents, options=NAMESPACE, max_tokens=1)
        ours = reusing.ask(*prompts, options=EVERYTHING, **LONG)
        for answer, expected in zip(ours, reference, strict=True):
            assert answer.report["reused_tokens"] >= 280
            assert_same(answer, expected, 2e-3)
        sequences = [
            *documents,
            *(p + a.token_ids for p, a in zip(prompts, ours, strict=True)),
        ]
        check_donors(reusing, sequences)

        generated = text.tokens(11) + ours[0].token_ids + text.tokens(3)
        report = reusing.ask(generated, options=SHIFT)[0].report
        assert report["reused_tokens"] >= 2 * BLOCK_SIZE
        reusing.check_idle()


def check_donors(running: Engine, sequences: list[list[int]]) -> None:
    """Drafts that were rejected are in no indexed block."""
    index = running.index
    assert len(index) > 20
    for block in (b.block_id for b in running.pool.blocks if b.block_id in index):
        position = int(index.nodes[block]["position"])
        content = index.tokens[block]
        assert any(
            np.array_equal(content, sequence[position : position + BLOCK_SIZE])
            for sequence in sequences
        ), f"block {block} at {position}"


def test_18_draft_models_are_refused() -> None:
    draft = {
        "method": "draft_model",
        "model": str(make_model("qwen3")),
        "num_speculative_tokens": 2,
    }
    with (
        pytest.raises(RuntimeError, match="speculative decoding by draft_model") as refusal,
        engine("qwen3", speculative_config=draft),
    ):
        pass
    assert "use ngram" in str(refusal.value)
