# SPDX-License-Identifier: Apache-2.0
"""Prompts are laid out as a model was trained, or refused with the reason."""

import dataclasses
from typing import Any

import pytest

from segreuse_extras.trained.layout import Layout, LayoutError, Names, Span, padded

CONFIG = {
    "isolated_documents": True,
    "link_tokens": 2,
    "max_documents": 3,
    "document_start": "<s>",
    "document_end": "</s>",
    "link_token": "<{document}_{index}>",
}
LAYOUT = Layout(100, 101, ((110, 111), (120, 121), (130, 131)))


def ids(text: str) -> int | None:
    given = ["<s>", "</s>", *(f"<{d}_{i}>" for d in (1, 2, 3) for i in (1, 2))]
    at = [100, 101, 110, 111, 120, 121, 130, 131]
    return dict(zip(given, at, strict=True)).get(text)


def names(**changes: Any) -> Names | None:
    return Names.of_config(CONFIG | changes)


def test_the_config_names_the_tokens() -> None:
    found = names()
    assert found is not None
    assert found.layout(ids) == LAYOUT
    assert LAYOUT.special == {100, 101, 110, 111, 120, 121, 130, 131}
    assert Names.of_config(None) is None


def test_without_link_tokens_documents_may_follow_each_other() -> None:
    found = names(link_tokens=0)
    assert found is not None
    layout = found.layout(ids)
    assert layout.links == ((), (), ())
    assert layout.spans([100, 1, 101, 100, 101, 7]) == (Span(0, 3), Span(3, 5))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("yes", "must be a mapping"),
        ({**CONFIG, "color": 1}, "unknown key 'color'"),
        ({k: v for k, v in CONFIG.items() if k != "link_token"}, "lacks 'link_token'"),
        ({**CONFIG, "isolated_documents": False}, "isolated_documents"),
        ({**CONFIG, "link_tokens": -1}, "link_tokens=-1"),
        ({**CONFIG, "link_tokens": True}, "link_tokens=True"),
        ({**CONFIG, "max_documents": 0}, "max_documents=0"),
        ({**CONFIG, "max_documents": 65536}, "more than 65536 link tokens"),
        ({**CONFIG, "max_documents": 32769}, "wants more than 65536 link tokens"),
        ({**CONFIG, "max_documents": True}, "max_documents=True .* an integer from 1 to 65536"),
        ({**CONFIG, "max_documents": 65537, "link_tokens": 0}, "max_documents=65537"),
        ({**CONFIG, "link_tokens": 65537}, "link_tokens=65537 .* an integer from 0 to 65536"),
        ({**CONFIG, "document_end": ""}, "document_end=''"),
        ({**CONFIG, "document_start": 7}, "document_start=7 in config.json must be a text"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        Names.of_config(value)


@pytest.mark.parametrize(
    ("link_tokens", "max_documents"), [(0, 1), (0, 65536), (65536, 1), (2, 32768), (256, 256)]
)
def test_a_vocabulary_of_65536_link_tokens_is_the_most(
    link_tokens: int, max_documents: int
) -> None:
    found = names(link_tokens=link_tokens, max_documents=max_documents)
    assert found is not None
    assert len(found.texts) == 2 + link_tokens * max_documents


def test_a_token_that_the_tokenizer_lacks_is_named() -> None:
    found = names(max_documents=4)
    assert found is not None
    with pytest.raises(LayoutError, match="promises the token '<4_1>'"):
        found.layout(ids)
    same = dataclasses.replace(found, max_documents=2, link_token="<1_1>")
    with pytest.raises(LayoutError, match="'<1_1>' and '<1_1>' are one token"):
        same.layout(ids)


def test_documents_are_found_between_text() -> None:
    prompt = [1, 2, 100, 5, 6, 101, 110, 111, 3, 100, 7, 101, 120, 121, 4]
    assert LAYOUT.spans(prompt) == (Span(2, 6), Span(9, 12))
    assert LAYOUT.spans([1, 2, 3]) == ()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([101, 1], "token 0 of the prompt is an end token outside of a document"),
        ([1, 110, 1], "token 1 of the prompt is a link token outside of a document"),
        ([100, 5, 100, 101, 1], "token 2 of the prompt is a start token inside document 1"),
        ([100, 120, 101, 1], "token 1 of the prompt is a link token inside document 1"),
        ([100, 5], "document 1 has no end token"),
        ([100, 5, 101, 1], "behind document 1, from token 3 .* 2 link tokens"),
        ([100, 5, 101, 110], "behind document 1"),
        ([100, 5, 101, 111, 110, 1], "behind document 1"),
        ([100, 5, 101, 120, 121, 1], "behind document 1"),
        ([100, 5, 101, 110, 111, 111, 1], "a link token outside of a document"),
        ([100, 101, 110, 111, 100, 101, 120, 121, 100, 101, 130, 131, 100, 101, 1], "more than 3"),
    ],
)
def test_other_prompts_are_refused(prompt: list[int], reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        LAYOUT.spans(prompt)


def test_a_prompt_must_not_end_with_a_document() -> None:
    with pytest.raises(LayoutError, match="ends with a document"):
        dataclasses.replace(LAYOUT, links=((),)).spans([1, 100, 5, 101])
    assert LAYOUT.spans([100, 5, 101, 110, 111]) == (Span(0, 3),)


def test_documents_are_padded_to_whole_blocks_and_a_token() -> None:
    assert padded([1, 2, 9], 4) == (1, 2, 9, 9, 9)
    assert padded([1, 2, 3, 9], 4) == (1, 2, 3, 9, 9)
