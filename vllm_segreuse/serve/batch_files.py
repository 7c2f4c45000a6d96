# SPDX-License-Identifier: Apache-2.0
"""Bodies in the files of vLLM's batch runner, admitted as a server admits them (`requests.py`)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vllm_segreuse.options.parsing import DOCUMENTS, EXTRA_KEYS, OPTION_PREFIX, RequestError
from vllm_segreuse.serve.named import XARGS, names_in
from vllm_segreuse.serve.requests import (
    ENDPOINTS,
    BadOptionError,
    admit_body,
    check_body,
    ignored_key,
)


class BatchLine(NamedTuple):
    """A line of a batch file.

    Attributes:
        text: for vLLM to read.
        body: that was read; None: it is none of ours to check.
        refusal: why its request must not run; vLLM then reads the line without what is refused.
    """

    text: str
    body: dict[str, Any] | None = None
    refusal: RequestError | None = None


def read_line(text: str) -> BatchLine:
    """A line as it was written, its body admitted."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return BatchLine(text)  # vLLM says so
    body = line.get("body") if isinstance(line, dict) else None
    url = line.get("url") if isinstance(line, dict) else None
    if not isinstance(body, dict) or not isinstance(url, str):
        return BatchLine(text)
    refusal = _admitted(body) if url in ENDPOINTS else _unread(body, url)
    if refusal is not None:
        ours = [key for key in body if key == EXTRA_KEYS or key.startswith(OPTION_PREFIX)]
        for key in (*ours, XARGS, "documents") if url in ENDPOINTS else ours:
            body.pop(key, None)
    elif url not in ENDPOINTS:
        return BatchLine(text)
    return BatchLine(json.dumps(line), body, refusal)


def check_line(line: BatchLine, model_config: Any) -> None:
    """What a line's request must not run for.

    Args:
        model_config: vLLM's, of the engine that would run it; None: it is not known.

    Raises:
        BadOptionError: says what is wrong.
    """
    if line.body is None:
        return
    try:
        if line.refusal is not None:
            raise line.refusal
        check_body(line.body, model_config)
    except RequestError as error:
        raise BadOptionError(error) from None


def _admitted(body: dict[str, Any]) -> RequestError | None:
    """Admit a body; why it is refused, if it is."""
    try:
        admit_body(body)
        if not names_in(body):
            return None
    except RequestError as error:
        return error
    no_bases = "the batch runner has no knowledge bases: send the documents' text"
    return RequestError(DOCUMENTS, f"{DOCUMENTS}: {no_bases}")


def _unread(body: dict[str, Any], url: str) -> RequestError | None:
    """What is wrong with the body of a line that no endpoint of ours is for."""
    takes_xargs = url.startswith("/v1/audio/")
    what_to_do = f"put them into {XARGS}" if takes_xargs else "its requests reuse nothing"
    return ignored_key(body, f"for {url.strip('/').replace('/', ' ')}: {what_to_do}")
