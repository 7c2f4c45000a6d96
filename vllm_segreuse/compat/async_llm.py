# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.async_llm.AsyncLLM`: the API server's requests and their reports, for the viewer.

Requests reach the engine by many endpoints, and their reports come back with the outputs. vLLM has
no hook that sees the outputs of all of them in the API server. It processes a request when its
first output is asked for, and by then a stream has begun with status 200: a prompt that the model's
layout of documents rules out is refused here already.

Obsolete when plugins can validate tokenised prompts and observe the request outputs of an API
server. None filed that we know of.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm_segreuse.compat.input_processor import IMAGES, CheckPrompt
from vllm_segreuse.compat.patching import wrap

Watch = Callable[[str, Any, AsyncGenerator[Any, None]], AsyncGenerator[Any, None]]
"""Passes the outputs of a request on, given its id and sampling parameters."""


def install(check_prompt: CheckPrompt, watch: Watch) -> None:
    """Wrap the generation of outputs, once."""
    from vllm.v1.engine.async_llm import AsyncLLM

    wrap(AsyncLLM, "generate", _generate, check_prompt, watch)


def _generate(
    original: Callable[..., Any], check_prompt: CheckPrompt, watch: Watch
) -> Callable[..., Any]:
    def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        kind = prompt.get("type") if isinstance(prompt, dict) else None
        if kind is not None:  # it is tokenised
            tokens = None if kind == "embeds" else prompt.get("prompt_token_ids")
            unusual = IMAGES if kind == "multimodal" else None
            check_prompt(self.input_processor, tokens, sampling_params, unusual, False)
        outputs = original(self, prompt, sampling_params, request_id, *args, **kwargs)
        return watch(request_id, sampling_params, outputs)

    return generate
