# SPDX-License-Identifier: Apache-2.0
"""Prompts get the tokens of compressed documents where they name them."""

import asyncio
from typing import Any

import numpy as np
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams

from vllm_segreuse.compat.renderer import DocumentCallbacks, _tokenize_singleton_prompt_async
from vllm_segreuse.features.knowledge.naming import NamedDocument, cut, named
from vllm_segreuse.serve.requests import PromptError, check_named

DOCUMENTS = DocumentCallbacks(named.get, cut, check_named)

TRAVEL = NamedDocument("b/x", "entry", np.array([500, 501], np.int32))


class Renderer:
    """A token for each character, and 1 in front of all where special tokens are wanted."""

    tokenizer = None

    async def _tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
        start = [1] if params.add_special_tokens else []
        return {"prompt_token_ids": start + [ord(char) for char in prompt["prompt"]]}


async def _original(self: Any, prompt: Any, params: Any) -> Any:
    """As vLLM's."""
    if "prompt_token_ids" in prompt or "prompt_embeds" in prompt:
        return prompt
    return {**prompt, **(await self._tokenize_prompt_async(prompt, params))}


def tokenised(prompt: dict[str, Any], *documents: NamedDocument, length: int = 100) -> Any:
    async def main() -> Any:
        named.set(documents)
        params = TokenizeParams(max_total_tokens=length)
        return await _tokenize_singleton_prompt_async(_original, DOCUMENTS)(
            Renderer(), prompt, params
        )

    return asyncio.run(main())


def test_a_marker_becomes_the_documents_tokens() -> None:
    found = tokenised({"prompt": "a[[b/x]]c"}, TRAVEL)
    assert found["prompt_token_ids"] == [1, ord("a"), 500, 501, ord("c")]
    assert found["prompt"] == "a[[b/x]]c"


def test_special_tokens_stand_in_front_of_a_document_that_comes_first() -> None:
    found = tokenised({"prompt": "[[b/x]]c[[b/x]]"}, TRAVEL)
    assert found["prompt_token_ids"] == [1, 500, 501, ord("c"), 500, 501]


def test_without_names_a_marker_is_text() -> None:
    found = tokenised({"prompt": "[[b/x]]"})
    assert found["prompt_token_ids"] == [1, *map(ord, "[[b/x]]")]


@pytest.mark.parametrize(
    "prompt", [{"prompt": "a"}, {"prompt_token_ids": [500]}, {"prompt_embeds": 0}]
)
def test_a_document_that_does_not_stand_there_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=r"'b/x' does not stand in the prompt"):
        tokenised(prompt, TRAVEL)


@pytest.mark.parametrize(
    ("text", "stands_first"),
    [
        ("[[b/x]] and [[b/y]]", True),
        ("[[b/x]][[b/y]] xy, x", True),
        ("say x: [[b/x]][[b/y]]", False),
        ("[[b/x]] say y: [[b/y]]", False),
        ("[[b/x]]xy[[b/y]]", False),
    ],
)
def test_a_text_in_front_that_reads_as_a_document_would_be_taken_for_it(
    text: str, stands_first: bool
) -> None:
    """Of a short document one token may be kept, which any text may have."""
    x, y = (NamedDocument(f"b/{c}", c, np.array([ord(c)], np.int32)) for c in "xy")
    if stands_first:
        assert tokenised({"prompt": text}, x, y)["prompt_token_ids"][:2] == [1, ord("x")]
        return
    with pytest.raises(PromptError, match="kept tokens stand in the text in front of it, too"):
        tokenised({"prompt": text}, x, y)


def test_token_ids_are_left_as_they_are() -> None:
    prompt = {"prompt_token_ids": [7, 500, 501, 8]}
    assert tokenised(prompt, TRAVEL) is prompt


def test_a_text_that_is_too_long_is_refused_before_it_is_tokenised() -> None:
    class Tokenizer:
        max_chars_per_token = 1
        truncation_side = "left"

    renderer: Any = Renderer
    renderer.tokenizer = Tokenizer()
    try:
        with pytest.raises(VLLMValidationError, match="maximum context length"):
            tokenised({"prompt": "[[b/x]]" + "a" * 10_000}, TRAVEL)
    finally:
        renderer.tokenizer = None
