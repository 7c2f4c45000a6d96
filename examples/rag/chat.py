# SPDX-License-Identifier: Apache-2.0
"""One streamed chat completion, its time to the first token, and the report about reuse."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class EmptyStreamError(RuntimeError):
    """The server ended a stream without sending anything."""


class Answer(NamedTuple):
    """One streamed chat completion; `report` is None for a request without extra keys."""

    ttft_s: float
    prompt_tokens: int
    text: str
    report: dict[str, Any] | None


def ask(
    client: Any,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    extra_body: Mapping[str, Any] | None = None,
) -> Answer:
    """Sends `messages`, waits for the whole answer.

    Args:
        client: an `openai.OpenAI`.
        model: name of the model at the server.
        messages: of the chat.
        max_tokens: longest answer.
        extra_body: what is particular to the server: `extra_keys`, `vllm_xargs`, `cache_salt`.

    Raises:
        EmptyStreamError: the stream ended before anything was sent.
        openai.OpenAIError: the request failed.
    """
    started = time.perf_counter()
    stream = client.chat.completions.create(
        model=model,
        messages=list(messages),
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=dict(extra_body) if extra_body else None,
    )
    ttft_s, tokens, text, report = None, 0, "", None
    for chunk in stream:
        # The server sends the first chunk when the first token is there.
        ttft_s = ttft_s or time.perf_counter() - started
        if chunk.usage is not None:
            tokens = chunk.usage.prompt_tokens
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        report = ((chunk.model_extra or {}).get("kv_transfer_params") or {}).get("segreuse", report)
    if ttft_s is None:
        raise EmptyStreamError("the server ended a stream without sending anything")
    return Answer(ttft_s, tokens, text, report)
