# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.detokenizer.FastIncrementalDetokenizer`: it reads the end of a prompt only.

The first token of an answer is decoded behind the prompt, all of which vLLM decodes for it: 3 to 9
ms at 16,384 tokens, in the API server, while all its other answers wait. Text depends on a few
tokens before it. What is read begins with a token that is text by itself, so that no character, and
no run of bytes that stand for characters, is cut. Where a prompt ends within a character vLLM
answers with all of the prompt first (vllm-project/vllm#48853); here the answer begins with the
tokens that are not complete, three at most.

Obsolete when vLLM reads the end only: vllm-project/vllm#51281 and vllm-project/vllm#57330.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from vllm_segreuse.compat.patching import wrap

MOST_TOKENS = 32
"""Of the prompt, unless no token begins there that is text by itself."""

MOST_PARTS = 3
"""Tokens of a character of four bytes that is not complete."""

_PART = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


def install() -> None:
    """Wrap the constructor, once. Answers are the same, but behind a part of a character."""
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    wrap(FastIncrementalDetokenizer, "__init__", _init)


def end_of(ids: Sequence[int], decode: Decode) -> tuple[list[int], list[int]]:
    """What is read of a prompt: text, and the tokens behind it that are not complete.

    Args:
        ids: of the prompt.
        decode: to text, with U+FFFD for what is no character.
    """
    first = max(0, len(ids) - MOST_TOKENS)
    while first and not _is_text(decode(ids[first : first + 1])):
        first -= 1
    end = list(ids[first:])
    whole = len(end)
    while whole and decode(end[:whole]).endswith(_PART):
        whole -= 1
        # More are no part of a character, and may be thousands: they are not tried one by one.
        while whole and len(end) - whole > MOST_PARTS and not _is_text(decode([end[whole - 1]])):
            whole -= 1
    return end[:whole], end[whole:]


def _is_text(text: str) -> bool:
    return bool(text) and _PART not in text


def _init(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, tokenizer: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        skips = request.sampling_params.skip_special_tokens
        incomplete: list[int] = []
        if request.prompt_token_ids:

            def decode(ids: Sequence[int]) -> str:
                return str(tokenizer._tokenizer.decode(ids, skip_special_tokens=skips))

            request = copy.copy(request)
            request.prompt_token_ids, incomplete = end_of(request.prompt_token_ids, decode)
        original(self, tokenizer, request, *args, **kwargs)
        for token in incomplete[-MOST_PARTS:]:
            self._protected_step(token)

    return init
