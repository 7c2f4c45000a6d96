# SPDX-License-Identifier: Apache-2.0
"""`vllm.renderers.base.BaseRenderer`: compressed documents get their tokens where a prompt names
them.

The tokens of a compressed document are no text that a tokenizer would read as these tokens, so a
rendered prompt is cut at the markers, and its parts are tokenised by themselves. vLLM has no hook
between the chat template and the tokenizer.

Obsolete when prompts can mix text and token ids. None filed that we know of.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_segreuse.compat.patching import wrap


class DocumentCallbacks(NamedTuple):
    """Documents that a request names.

    Attributes:
        named: those of the request that is being handled.
        cut: a text as its parts: text, and the tokens of named documents (int32 `[n]`).
        check: raises if tokens of a prompt do not hold documents, or first where markers were.
    """

    named: Callable[[], Sequence[Any]]
    cut: Callable[[str, Sequence[Any]], Sequence[Any]]
    check: Callable[..., None]


def install(documents: DocumentCallbacks) -> None:
    """Wrap the tokenisation of one prompt, once."""
    from vllm.renderers.base import BaseRenderer

    wrap(
        BaseRenderer,
        "_tokenize_singleton_prompt_async",
        _tokenize_singleton_prompt_async,
        documents,
    )


def _tokenize_singleton_prompt_async(
    original: Callable[..., Any], documents: DocumentCallbacks
) -> Callable[..., Any]:
    async def _tokenize_singleton_prompt_async(
        self: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        named = documents.named()
        if named and "prompt_token_ids" not in prompt and isinstance(prompt.get("prompt"), str):
            parts = documents.cut(prompt["prompt"], named)
            ids, at = await _tokens(self, parts, params)
            documents.check(ids, named, at)
            prompt = {**prompt, "prompt_token_ids": ids}
        tokenised = await original(self, prompt, params, *args, **kwargs)
        if named:
            documents.check(tokenised.get("prompt_token_ids") or (), named)
        return tokenised

    return _tokenize_singleton_prompt_async


async def _tokens(renderer: Any, parts: Sequence[Any], params: Any) -> tuple[list[int], list[int]]:
    """Tokens of a prompt, of its texts and of its documents; and where these begin."""
    from dataclasses import replace

    ids, at = list[int](), list[int]()
    for part in parts:
        if isinstance(part, np.ndarray):
            at.append(len(ids))
            ids += part.tolist()
            continue
        checked = params.apply_pre_tokenization(renderer.tokenizer, {"prompt": part})
        tokenised = await renderer._tokenize_prompt_async(checked, params)
        ids += tokenised["prompt_token_ids"]
        params = replace(params, add_special_tokens=False)
    return ids, at
