# SPDX-License-Identifier: Apache-2.0
"""The stream generators of `vllm.entrypoints.openai`: the report in streamed responses.

vLLM puts a connector's `kv_transfer_params` into whole responses, and into the last event of the
responses API. Version 0.32 drops them from streamed completions and chat completions, 0.33 has
them in chunks with a finish reason and not in the usage chunk.

Obsolete when the last chunk of a stream carries `kv_transfer_params`: requested in
vllm-project/vllm#36308, proposed in vllm-project/vllm#40186.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm_segreuse.compat.patching import signature_with, wrap
from vllm_segreuse.serve.report import StreamReport, has_report


def install() -> None:
    """Wrap both stream generators, once."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    wrap(OpenAIServingChat, "chat_completion_stream_generator", _reporting)
    wrap(OpenAIServingCompletion, "completion_stream_generator", _reporting)


def _reporting(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = signature_with(original, "result_generator", "request")

    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        call = signature.bind(self, *args, **kwargs)
        if not has_report(call.arguments["request"], self.model_config):
            return original(self, *args, **kwargs)
        report = StreamReport(call.arguments.get("num_prompts", 1))  # chats have one
        call.arguments["result_generator"] = report.watch(call.arguments["result_generator"])
        return report.complete(original(*call.args, **call.kwargs))

    return generate
