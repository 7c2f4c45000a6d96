# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.input_processor.InputProcessor`: a request's own options, checked by its caller.

Every request passes `_validate_params` in the process that submits it: offline callers, and the
endpoints whose bodies nobody checks earlier. vLLM has no hook for checking
`extra_args`; unchecked, a bad value would be found in the scheduler and end the engine. What
`process_inputs` makes of a prompt is checked, too.

Obsolete when plugins can validate `extra_args` and tokenised prompts, as discussed in
vllm-project/vllm#17191.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_segreuse.compat.patching import wrap

CheckParams = Callable[[Any, Any], None]
"""Raises a `VLLMValidationError` for sampling (or other) parameters that an engine with this
`VllmConfig` refuses."""

CheckPrompt = Callable[[Any, Sequence[int] | None, Any, str | None, bool], None]
"""Raises a `VLLMValidationError` for a prompt that an engine refuses. Takes vLLM's input processor;
the prompt's tokens, None for embeddings; its parameters; what it comes with beside text, None for
nothing; and whether it has an adapter or a salt."""

IMAGES = "images, audio or video"
"""What a prompt may come with."""


def install(check_params: CheckParams, check_prompt: CheckPrompt) -> None:
    """Wrap the validation of sampling parameters and the processing of prompts, once."""
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "_validate_params", _validate_params, check_params)
    wrap(InputProcessor, "process_inputs", _process_inputs, check_prompt)


def _validate_params(original: Callable[..., Any], check_params: CheckParams) -> Callable[..., Any]:
    def _validate_params(self: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        check_params(self.vllm_config, params)
        return original(self, params, *args, **kwargs)

    return _validate_params


def _process_inputs(original: Callable[..., Any], check_prompt: CheckPrompt) -> Callable[..., Any]:
    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        embeds = request.prompt_embeds is not None
        check_prompt(
            self,
            None if embeds else request.prompt_token_ids,
            request.sampling_params,
            IMAGES if request.mm_features else "parts to come" if request.resumable else None,
            request.lora_request is not None or request.cache_salt is not None,
        )
        return request

    return process_inputs
