# SPDX-License-Identifier: Apache-2.0
"""`vllm.renderers.base.BaseRenderer`: compressed documents get their tokens where a prompt names
them.

The tokens of a compressed document are no text that a tokenizer would read as these tokens, so a
rendered prompt is cut at the markers, and its parts are tokenised by themselves. vLLM has no hook
between the chat template and the tokenizer.

Obsolete when prompts can mix text and token ids. None filed that we know of.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap the tokenisation of one prompt, once."""
    from vllm.renderers.base import BaseRenderer

    wrap(BaseRenderer, "_tokenize_singleton_prompt_async", _tokenize_singleton_prompt_async)


def _tokenize_singleton_prompt_async(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_segreuse.knowledge.naming import PlaceError, check_places, named
    from vllm_segreuse.serve.requests import PromptError

    async def _tokenize_singleton_prompt_async(
        self: Any, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        documents = named.get()
        if documents and "prompt_token_ids" not in prompt and isinstance(prompt.get("prompt"), str):
            ids = await _tokens(self, prompt["prompt"], params, documents)
            prompt = {**prompt, "prompt_token_ids": ids}
        tokenised = await original(self, prompt, params, *args, **kwargs)
        if documents:
            try:
                check_places(tokenised.get("prompt_token_ids") or (), documents)
            except PlaceError as error:
                raise PromptError(str(error)) from None
        return tokenised

    return _tokenize_singleton_prompt_async


async def _tokens(renderer: Any, text: str, params: Any, documents: Sequence[Any]) -> list[int]:
    """Tokens of a text, with those of the documents for their markers."""
    from dataclasses import replace

    from vllm_segreuse.knowledge.naming import cut

    ids: list[int] = []
    for part in cut(text, documents):
        if isinstance(part, np.ndarray):
            ids += part.tolist()
            continue
        checked = params.apply_pre_tokenization(renderer.tokenizer, {"prompt": part})
        tokenised = await renderer._tokenize_prompt_async(checked, params)
        ids += tokenised["prompt_token_ids"]
        params = replace(params, add_special_tokens=False)
    return ids
