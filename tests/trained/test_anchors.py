# SPDX-License-Identifier: Apache-2.0
"""Documents that anchors stand for: what config.json says, and what stands for how much."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from segreuse_extras.trained import refusals
from segreuse_extras.trained.anchors import AnchorNames, Anchors
from segreuse_extras.trained.layout import Layout, LayoutError, Names, Span
from tests.trained.test_layout import CONFIG
from tests.trained.test_layout import ids as ids_without
from vllm_segreuse import features
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.engine.supported import RefusedError

SAID = {"chunk_tokens": 4, "anchor_tokens": 2, "anchor_token": "<a{index}>"}
ANCHORS = Anchors(4, (140, 141))
LAYOUT = Layout(100, 101, ((110, 111), (120, 121), (130, 131)), ANCHORS)


def ids(text: str) -> int | None:
    return {"<a1>": 140, "<a2>": 141}.get(text, ids_without(text))


def names(said: Any) -> Names:
    found = Names.of_config(CONFIG | {"anchors": said})
    assert found is not None
    return found


def test_the_config_names_the_anchors() -> None:
    found = names(SAID)
    assert found.anchors == AnchorNames(4, 2, "<a{index}>")
    assert found.layout(ids) == LAYOUT
    assert found.texts[-2:] == ("<a1>", "<a2>")
    assert Names.of_config(found.block()) == found
    assert LAYOUT.special >= {100, 101, 110, 140, 141}


def test_without_anchors_the_config_says_nothing_of_them() -> None:
    found = Names.of_config(CONFIG)
    assert found is not None
    assert found.layout(ids).anchors is None
    assert found.block() == CONFIG


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (8, "must be a mapping with chunk_tokens, anchor_tokens, anchor_token, not 8"),
        ({"chunk_tokens": 4}, "must be a mapping with"),
        (SAID | {"chunk_tokens": 0}, r"\(0, 2\) tokens of a chunk and anchors"),
        (SAID | {"anchor_tokens": 0}, r"\(4, 0\) tokens of a chunk and anchors: both must be pos"),
        (SAID | {"anchor_tokens": True}, "must be positive"),
        (SAID | {"anchor_tokens": 5}, "more anchors than tokens of a chunk: 5, 4"),
        (SAID | {"anchor_token": "<a>"}, "lacks {index}"),
        (SAID | {"anchor_token": 7}, "lacks {index}"),
    ],
)
def test_anchors_that_are_none_are_refused(said: Any, reason: str) -> None:
    with pytest.raises(LayoutError, match=f"segreuse.anchors in config.json .*{reason}"):
        names(said)


def test_a_tokenizer_without_them_is_refused() -> None:
    with pytest.raises(LayoutError, match="promises the token '<a1>'"):
        names(SAID).layout(ids_without)


def test_a_shorter_chunk_has_fewer_anchors_and_at_least_one() -> None:
    assert [*Anchors(4, (1, 2)).chunks([*range(9)])] == [
        ([0, 1, 2, 3], (1, 2)),
        ([4, 5, 6, 7], (1, 2)),
        ([8], (1,)),
    ]
    assert Anchors(4, (1, 2)).standing_for(9) == [1, 2, 1, 2, 1]
    assert Anchors(4, (1, 2)).standing_for(7) == [1, 2, 1, 2]
    assert Anchors(8, (1, 2)).behind(4) == (1,)
    assert Anchors(8, (1, 2)).behind(5) == (1, 2)


def test_documents_consist_of_anchors() -> None:
    prompt = [1, 100, 140, 141, 140, 101, 110, 111, 3]
    assert LAYOUT.spans(prompt) == (Span(1, 6),)
    assert LAYOUT.spans([1, 2, 3]) == ()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([1, 100, 140, 5, 101, 110, 111, 3], "document 1 is a text, and the model reads compr"),
        ([140, 100, 140, 101, 110, 111, 3], "token 0 of the prompt is an anchor token outside"),
        ([100, 140, 101, 110, 111, 141], "token 5 of the prompt is an anchor token outside"),
        ([100, 140, 110, 101, 3], "token 2 of the prompt is a link token inside document 1"),
    ],
)
def test_text_is_none_and_anchors_are_nothing_else(prompt: list[int], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        LAYOUT.spans(prompt)


@pytest.mark.parametrize("anchors", [ANCHORS, None])
@pytest.mark.parametrize("is_listed", [True, False])
def test_without_the_feature_that_keeps_anchors_a_model_with_them_is_refused(
    anchors: Anchors | None, is_listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = replace(LAYOUT, anchors=anchors)
    monkeypatch.setattr(refusals, "layout_of", lambda model_config: layout)
    if not is_listed:
        others = (name for name in features.FEATURES if name != "segreuse_extras.compressed")
        monkeypatch.setattr(features, "FEATURES", tuple(others))
    if is_listed or anchors is None:
        refusals.check(Mock(), SegReuseConfig())
        return
    with pytest.raises(RefusedError, match=r"list segreuse_extras\.compressed in"):
        refusals.check(Mock(), SegReuseConfig())
