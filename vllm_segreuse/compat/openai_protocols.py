# SPDX-License-Identifier: Apache-2.0
"""The requests of `vllm.entrypoints`: our keys where nobody has read them are refused.

vLLM's models of bodies keep fields that they do not know, and say nothing. What a server or the
batch runner has admitted has none of ours left at its top level. Programs that hand bodies to
vLLM's serving classes themselves (Ray Serve is one) admit nothing, and the extra keys would be
ignored.

Obsolete when vLLM refuses fields that it does not know. None filed that we know of.
"""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_segreuse.compat.patching import wrap

Refuse = Callable[[Mapping[str, Any]], None]
"""Raises if any of the given fields of a body is ours."""


def install(refuse: Refuse) -> None:
    """Wrap what makes sampling parameters of each kind of request, once."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

    texts = ChatCompletionRequest, CompletionRequest, ResponsesRequest
    for request in (*texts, TranscriptionRequest, TranslationRequest):
        wrap(request, "to_sampling_params", _to_sampling_params, refuse)


def _to_sampling_params(original: Callable[..., Any], refuse: Refuse) -> Callable[..., Any]:
    def to_sampling_params(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.model_extra:
            refuse(self.model_extra)
        return original(self, *args, **kwargs)

    return to_sampling_params
