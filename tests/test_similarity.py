# SPDX-License-Identifier: Apache-2.0
"""What tokens are compared by comes from the model's tokenizer; without one, from themselves."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.shapes import make_model
from segreuse_extras.similar import start as similarity
from segreuse_extras.similar.canonical import Vocabulary
from segreuse_extras.similar.options import SimilarityOptions
from vllm_segreuse.cache.finder import ContentFinder
from vllm_segreuse.cache.index import SegmentIndex
from vllm_segreuse.cache.namespace import NamespaceTable
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.metrics import SegReuseStats

OPTIONS = SimilarityOptions()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(make_model("qwen3"))


@pytest.fixture
def vocabulary(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Vocabulary:
    monkeypatch.setattr(similarity, "cached_tokenizer_from_config", lambda config: tokenizer)
    return similarity.vocabulary(SimpleNamespace(), OPTIONS)  # type: ignore[arg-type]


def test_texts_of_the_tokenizer_are_what_is_compared(
    tokenizer: Any, vocabulary: Vocabulary
) -> None:
    def canonical(text: str) -> list[int]:
        return vocabulary.canonical(np.array(tokenizer.encode(text), np.int32))[0].tolist()

    first = canonical('{"order": 4711, "time": "2026-11-23T14:05:00Z", "total": 12.50}')
    assert first == canonical('{"order": 8, "time": "2025-01-02T00:00:00Z", "total": 1993.07}')
    assert first != canonical('{"order": 4711, "times": "2026-11-23T14:05:00Z", "total": 12.50}')
    assert canonical("The value is 5 of 7") == canonical("the value  is\n15 of 237")
    assert canonical("5 7") != canonical("57")


def test_parts_of_characters_are_themselves(tokenizer: Any, vocabulary: Vocabulary) -> None:
    parts = np.array(tokenizer.encode("\u4f60\u597d"), np.int32)
    others = np.array(tokenizer.encode("\u5c71\u5ddd"), np.int32)
    assert set(vocabulary.canonical(parts)[0]) != set(vocabulary.canonical(others)[0])
    assert len(set(vocabulary.canonical(parts)[0])) == len(set(parts))


def test_anchors_are_found_in_text(tokenizer: Any, vocabulary: Vocabulary) -> None:
    assert len(vocabulary.anchors) == len(OPTIONS.anchors)
    text = np.array(tokenizer.encode("done.\nObservation: {}"), np.int32)
    ids = vocabulary.canonical(text)[0].tolist()
    anchor = vocabulary.anchors[-1].tolist()
    assert any(ids[i : i + len(anchor)] == anchor for i in range(len(ids)))


@pytest.mark.parametrize("fails", [False, True])
def test_without_a_tokenizer_tokens_are_compared_themselves(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(config: Any) -> None:
        if fails:
            raise OSError("no such file")

    monkeypatch.setattr(similarity, "cached_tokenizer_from_config", load)
    similarity.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger=similarity.logger.name):
            found = similarity.vocabulary(SimpleNamespace(), OPTIONS)  # type: ignore[arg-type]
    finally:
        similarity.logger.removeHandler(caplog.handler)
    assert found.classes.size == 0
    assert found.anchors == ()
    assert "token by token" in caplog.text
    assert ("cannot be loaded" in caplog.text) is fails


def test_nothing_is_kept_unless_the_server_asks_for_it() -> None:
    index, names = SegmentIndex(4, 4), NamespaceTable()
    content, stats = ContentFinder(index, 0), SegReuseStats()
    off = SegReuseConfig()
    arguments = index, names, content, stats
    assert similarity.similar_segments(SimpleNamespace(), off, *arguments) is None  # type: ignore[arg-type]
    on = SegReuseConfig.from_options({"similarity": {"max_windows": 9}})
    model_config: Any = SimpleNamespace(skip_tokenizer_init=True)
    finder = similarity.similar_segments(model_config, on, *arguments)
    assert finder is not None
    assert finder.store.windows.block.size == 9
