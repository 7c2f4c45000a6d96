# SPDX-License-Identifier: Apache-2.0
"""The stream generators of `vllm.entrypoints.openai`: the report in streamed responses.

vLLM puts a connector's `kv_transfer_params` into whole responses, and into the last event of the
responses API. Version 0.32 drops them from streamed completions and chat completions, 0.33 has
them in chunks with a finish reason and not in the usage chunk.

Obsolete when the last chunk of a stream carries `kv_transfer_params`: requested in
vllm-project/vllm#36308, proposed in vllm-project/vllm#40186.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

from vllm_segreuse.compat.patching import signature_with, wrap


class StreamCompleter(Protocol):
    """Completes a stream."""

    def watch(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Passes the outputs on that the stream is made of."""

    def complete(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Passes the stream's events on."""


ReportOf = Callable[[Any, Any, int], StreamCompleter | None]
"""For a request, the `ModelConfig`, and the number of its prompts; None: leave the stream alone."""


def install(report_of: ReportOf) -> None:
    """Wrap both stream generators, once."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    wrap(OpenAIServingChat, "chat_completion_stream_generator", _reporting, report_of)
    wrap(OpenAIServingCompletion, "completion_stream_generator", _reporting, report_of)


def _reporting(original: Callable[..., Any], report_of: ReportOf) -> Callable[..., Any]:
    signature = signature_with(original, "result_generator", "request")

    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[str, None]:
        call = signature.bind(self, *args, **kwargs)
        num_prompts = call.arguments.get("num_prompts", 1)  # chats have one
        report = report_of(call.arguments["request"], self.model_config, num_prompts)
        if report is None:
            return original(self, *args, **kwargs)
        call.arguments["result_generator"] = report.watch(call.arguments["result_generator"])
        return report.complete(original(*call.args, **call.kwargs))

    return generate
