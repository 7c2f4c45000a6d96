# SPDX-License-Identifier: Apache-2.0
"""Bodies in the files of vLLM's batch runner, admitted as a server admits them (`requests.py`)."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vllm_segreuse.config import DOCUMENTS, EXTRA_KEYS, OPTION_PREFIX, RequestError
from vllm_segreuse.serve.named import XARGS, names_in
from vllm_segreuse.serve.requests import ENDPOINTS, admit_body


class Line(NamedTuple):
    """A line of a batch file.

    Attributes:
        text: for vLLM to read.
        body: that was admitted; None: it is none of ours to check.
        refusal: why its request must not run; vLLM then reads the line without what is refused.
    """

    text: str
    body: dict[str, Any] | None = None
    refusal: RequestError | None = None


def read_line(text: str) -> Line:
    """A line as it was written, its body admitted."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return Line(text)  # vLLM says so
    body = line.get("body") if isinstance(line, dict) else None
    url = line.get("url") if isinstance(line, dict) else None
    if not isinstance(body, dict) or not isinstance(url, str) or url not in ENDPOINTS:
        return Line(text)
    refusal = None
    try:
        admit_body(body)
        if names_in(body):
            raise RequestError(
                DOCUMENTS,
                f"{DOCUMENTS}: the batch runner has no knowledge bases: send the documents' text",
            )
    except RequestError as error:
        refusal = error
        ours = [key for key in body if key == EXTRA_KEYS or key.startswith(OPTION_PREFIX)]
        for key in (*ours, XARGS, "documents"):
            body.pop(key, None)
    return Line(json.dumps(line), body, refusal)
