# SPDX-License-Identifier: Apache-2.0
"""The report of a request in streamed responses.

vLLM 0.32 puts a connector's `kv_transfer_params` into whole responses only. In a stream they go
into the last chunk before `[DONE]`: the usage chunk if the client asked for one, else the chunk
with the finish reason. That is where vLLM itself puts what belongs to the whole response. From 0.33
on vLLM puts them into each chunk with a finish reason, and the usage chunk gets them here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from vllm_segreuse.model.documents import sees_documents_alone
from vllm_segreuse.options.parsing import EXTRA_KEYS

_DONE = "data: [DONE]"
_END = "}\n\n"
_REPORT = '"kv_transfer_params":'


def has_report(request: Any, model_config: Any) -> bool:
    """Whether the answer to a request may come with a report.

    All others are left to vLLM: what is done for each token counts where many requests decode.

    Args:
        request: to vLLM's server, with its `vllm_xargs`.
        model_config: vLLM's. A model that was trained on documents computed alone reuses these
            without extra keys.
    """
    has_keys = (request.vllm_xargs or {}).get(EXTRA_KEYS) is not None
    return has_keys or sees_documents_alone(model_config)


def report_of(request: Any, model_config: Any, num_prompts: int) -> StreamReport | None:
    """What completes the stream that answers `num_prompts` prompts; None: it has no report."""
    return StreamReport(num_prompts) if has_report(request, model_config) else None


class StreamReport:
    """Watches the outputs that a stream is made of, and completes the stream's last chunk.

    Args:
        num_prompts: that the stream answers.
    """

    def __init__(self, num_prompts: int) -> None:
        self._params: dict[str, Any] | None = None
        self._num_prompts = num_prompts
        self._ended: set[int] = set()

    async def watch(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Passes `outputs` on: request outputs, or pairs of (prompt's index, request output).

        Of several prompts the report is the first one's, as in vLLM's whole responses.
        """
        async for item in outputs:
            index, output = item if isinstance(item, tuple) else (0, item)
            if output.finished:
                self._ended.add(index)
            if index == 0 and output.kv_transfer_params is not None:
                self._params = output.kv_transfer_params
            yield item

    async def complete(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Passes server-sent events on, with the report in the last one before `[DONE]`.

        Only events that follow the end of all prompts are held back, and only until the next one.
        """
        held: str | None = None
        async with aclosing(events):
            async for event in events:
                if held is not None:
                    yield self._with_report(held) if event.startswith(_DONE) else held
                    held = None
                if len(self._ended) == self._num_prompts and not event.startswith(_DONE):
                    held = event
                else:
                    yield event
        if held is not None:
            yield held

    def _with_report(self, event: str) -> str:
        # Spliced, not parsed and written anew: the rest of the chunk stays vLLM's, byte for byte.
        is_chunk = event.endswith(_END) and '"choices"' in event
        if self._params is None or not is_chunk or _REPORT in event:
            return event
        params = json.dumps(self._params, separators=(",", ":"))
        return f"{event.removesuffix(_END)},{_REPORT}{params}{_END}"
