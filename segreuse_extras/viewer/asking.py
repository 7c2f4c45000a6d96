# SPDX-License-Identifier: Apache-2.0
"""Asks a running server to explain one request; neither vLLM nor torch is imported.

The request is sent as it is, for one token of an answer, with two options more: `segreuse_explain`,
and `segreuse_observe`, so that nothing approximate is computed for it. The answer has the prompt's
own tokens, and the server's tokenizer gives the text of each stretch.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

EXCERPT_TOKENS = 24
"""Tokens of a stretch whose text is shown."""

TIMEOUT_S = 600
"""For a long prompt on a busy server."""

CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""What no value of a header may have: httpx refuses some of these, and servers all (RFC 9110)."""

ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""Where a body goes, by what it has."""

RENDERED = (
    "model",
    "prompt",
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
)
"""What of a body vLLM's `/tokenize` makes tokens of."""

OF_TEMPLATE = ("documents", "reasoning_effort")
"""What else a chat hands to its template; `/tokenize` does so with `chat_template_kwargs` only."""


class ExplainError(RuntimeError):
    """The request cannot be explained; the text is one sentence that says why."""


class RequestBodyError(ExplainError):
    """The file of the request is wrong."""


@dataclass(frozen=True)
class EditTexts:
    """Text where a prompt departs from an earlier one, `EXCERPT_TOKENS` of each at most.

    Attributes:
        before: the end of what both have.
        new: the beginning of what is new.
        behind: the beginning of what was found again.
        gone: the beginning of what is gone; None: the earlier request is not known here.
    """

    before: str
    new: str
    behind: str
    gone: str | None = None


@dataclass(frozen=True)
class Explanation:
    """What a server says of a request.

    Attributes:
        report: of the request.
        texts: the beginning of each stretch's text; empty where the server does not tell.
        no_texts: why it does not, or why the text that is gone is not known.
        edit: the text where the prompt was edited; None: nothing is known of an edit, or no text.
    """

    report: Mapping[str, Any]
    texts: list[str]
    no_texts: str = ""
    edit: EditTexts | None = None

    @property
    def stretches(self) -> list[dict[str, Any]]:
        """Of the prompt, in order."""
        return list(self.report["explain"])


def read_request(text: str, source: str) -> dict[str, Any]:
    """The body of a request.

    Args:
        text: JSON.
        source: where it is from, for errors.

    Raises:
        RequestBodyError: it is no body of a completion or chat completion.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestBodyError(f"{source} is no JSON: {error}") from None
    if not isinstance(body, dict) or len(ROUTES.keys() & body) != 1:
        raise RequestBodyError(
            f"{source} must be the body of a request: an object with either messages (for "
            "/v1/chat/completions) or prompt (for /v1/completions)"
        )
    if not body.get("extra_keys") and not _xargs(body, source).get("extra_keys"):
        raise RequestBodyError(
            f"{source} has no extra_keys: a request without them reuses nothing; add "
            '"extra_keys": ["NAME"]'
        )
    return body


def read_file(file: Path) -> dict[str, Any]:
    """The body of a request in a file.

    Raises:
        RequestBodyError: it cannot be read, or is no such body.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors may put a byte-order mark first
    except (OSError, UnicodeDecodeError) as error:
        raise RequestBodyError(f"cannot read {file}: {error}") from None
    return read_request(text, str(file))


def root_of(url: str) -> str:
    """The root of a server; `/v1` at the end, as clients of OpenAI's API have it, does no harm.

    Raises:
        ValueError: it is no URL of HTTP.
    """
    try:
        if httpx.URL(url).scheme not in ("http", "https"):
            raise ValueError(f"the URL {url!r} must begin with http:// or https://")
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}") from error
    return url.rstrip("/").removesuffix("/v1")


def checked_key(key: str, what: str, to_do: str) -> str:
    """A key or token that a header can carry, without white space around it: files end with a line.

    Raises:
        ValueError: it has a character that no header may have; it is not shown.
    """
    key = key.strip(string.whitespace)
    if found := CONTROL.search(key):
        raise ValueError(
            f"the {what} has the control character {found[0]!r}, which no header can carry: {to_do}"
        )
    return key


def authorized(api_key: str | None) -> dict[bytes, bytes]:
    """Headers that name a key or token, as bytes, since it need not be ASCII; none without one.

    Raises:
        RequestBodyError: see `checked_key`.
    """
    try:
        key = checked_key(api_key or "", "API key", "pass the server's")
    except ValueError as error:
        raise RequestBodyError(str(error)) from None
    # Variables and arguments need be no UTF-8.
    return {b"Authorization": b"Bearer " + key.encode(errors="surrogateescape")} if key else {}


def explain(
    server: httpx.Client,
    body: Mapping[str, Any],
    reuse: bool = False,
    earlier: Mapping[str, Any] | None = None,
) -> Explanation:
    """Ask a server.

    Args:
        server: with the server's address and headers.
        body: of the request (`read_request`).
        reuse: let it reuse what is found, instead of computing all of it.
        earlier: body of the request that this one was edited from, for the text that is gone: a
            server tells no text of other requests.

    Raises:
        ExplainError: the server cannot be reached, refuses the request, or does not reuse segments.
    """
    if body.get("use_beam_search"):
        raise RequestBodyError(
            "the request has use_beam_search, and beam search passes no options on: it reuses "
            "nothing, and nothing explains it; leave it away to see what would be found"
        )
    left_out = ("stream", "stream_options", "max_completion_tokens", "min_tokens")
    options = {"segreuse_explain": True, "segreuse_observe": not reuse}
    asked = {
        **{key: value for key, value in body.items() if key not in left_out},
        "max_tokens": 1,
        "n": 1,
        "return_token_ids": True,
        "vllm_xargs": _xargs(body, "the request") | options,
    }
    route = next(path for key, path in ROUTES.items() if key in body)
    answer = _post(server, route, asked)
    params = answer.get("kv_transfer_params")  # other connectors have others, or none
    report = params.get("segreuse") if isinstance(params, dict) else None
    if not isinstance(report, dict) or not isinstance(report.get("explain"), list):
        raise ExplainError(
            f"{server.base_url} answered without an explanation: it runs without segment reuse, or "
            "with a version of it that does not explain"
        )
    try:
        tokens = _tokens(server, answer, report)
        detokenizer = _Detokenizer(server, body)
        starts = ((each["start"], each["tokens"]) for each in report["explain"])
        texts = [detokenizer.text(tokens[start:][:count]) for start, count in starts]
        edit = _edit_texts(detokenizer, tokens, report)
    except ExplainError as error:
        return Explanation(report, [], str(error))
    found = Explanation(report, texts, edit=edit)
    if edit is None or earlier is None:
        return found
    try:
        gone = _gone(server, earlier, tokens, report["edit"])
        return replace(found, edit=replace(edit, gone=detokenizer.text(gone)))
    except ExplainError as error:
        return replace(found, no_texts=str(error))


def _xargs(body: Mapping[str, Any], source: str) -> dict[str, Any]:
    xargs = body.get("vllm_xargs") or {}
    if not isinstance(xargs, dict):
        raise RequestBodyError(f"{source}: vllm_xargs must be an object")
    return dict(xargs)


def _tokens(
    server: httpx.Client, answer: Mapping[str, Any], report: Mapping[str, Any]
) -> list[int]:
    """Of the prompt.

    Raises:
        ExplainError: the server does not tell them.
    """
    tokens = _prompt_tokens(answer)
    if tokens is None or len(tokens) != report["prompt_tokens"]:
        raise ExplainError(f"{server.base_url} answered without the tokens of the prompt")
    return tokens


class _Detokenizer:
    """That of a server, for the model of a request."""

    def __init__(self, server: httpx.Client, body: Mapping[str, Any]) -> None:
        self._server = server
        self._named = {"model": body["model"]} if "model" in body else {}

    def text(self, tokens: Sequence[int]) -> str:
        """Of the first `EXCERPT_TOKENS`.

        Raises:
            ExplainError: the server has none.
        """
        asked = self._named | {"tokens": tokens[:EXCERPT_TOKENS]}
        answer = _post(self._server, "/detokenize", asked)
        if "prompt" not in answer:
            raise ExplainError(f"{self._server.base_url} answered /detokenize without a text")
        return str(answer["prompt"])


def _edit_texts(
    detokenizer: _Detokenizer, tokens: Sequence[int], report: Mapping[str, Any]
) -> EditTexts | None:
    edit = report.get("edit")
    if edit is None:
        return None
    at, end = edit["at"], edit["at"] + edit["new_tokens"]
    parts = tokens[max(0, at - EXCERPT_TOKENS) : at], tokens[at:end], tokens[end:]
    return EditTexts(*(detokenizer.text(part) if part else "" for part in parts))


def _gone(
    server: httpx.Client,
    earlier: Mapping[str, Any],
    tokens: Sequence[int],
    edit: Mapping[str, int],
) -> Sequence[int]:
    """Tokens of an earlier request that are gone.

    Raises:
        ExplainError: the prompt does not depart from that request, or the server does not tell its
            tokens.
    """
    asked = {key: earlier[key] for key in RENDERED if key in earlier}
    answer = _post(server, "/tokenize", asked | _for_template(earlier))
    there, at = answer.get("tokens"), edit["at"]
    if not isinstance(there, list):
        raise ExplainError(f"{server.base_url} answered /tokenize without tokens")
    if there[:at] != tokens[:at]:
        raise ExplainError(
            f"the prompt does not depart from the earlier request at token {at}: name the request "
            "that the text was taken out of"
        )
    gone = there[at : at + edit["gone_tokens"]]
    if edit["gone_tokens"] and not gone:
        raise ExplainError(
            "what is gone is of the answer to the earlier request: name the request that has this "
            "answer in its messages"
        )
    return gone


def _for_template(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat gives its template, as vLLM's `ChatCompletionRequest.build_chat_params`; empty:
    nothing but what `/tokenize` reads by itself."""
    given = {key: body[key] for key in OF_TEMPLATE if body.get(key) is not None}
    kwargs = body.get("chat_template_kwargs") or {}
    if "messages" not in body or not given or not isinstance(kwargs, Mapping):
        return {}
    effort = given.get("reasoning_effort")
    thinking = {} if effort is None else {"enable_thinking": effort != "none"}
    return {"chat_template_kwargs": {**thinking, **kwargs, **given}}


def _prompt_tokens(answer: Mapping[str, Any]) -> list[int] | None:
    """Of a chat's answer, or of the first prompt's."""
    choices = answer.get("choices")
    for each in (answer, *(choices if isinstance(choices, list) else ())):
        tokens = each.get("prompt_token_ids") if isinstance(each, Mapping) else None
        if isinstance(tokens, list):
            return tokens
    return None


def _post(server: httpx.Client, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = json.dumps(body, allow_nan=False).encode()
    except ValueError as error:
        raise RequestBodyError(f"the request cannot be sent as JSON: {error}") from None
    try:
        answer = server.post(route, content=content, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        raise ExplainError(f"cannot reach {server.base_url}: {error}") from None
    try:
        found = answer.json()
    except ValueError:
        found = None
    if answer.is_error or not isinstance(found, dict):
        raise ExplainError(
            f"{server.base_url} refused the request with status {answer.status_code}: "
            f"{_reason(found) or answer.text[:200]}"
        )
    return found


def _reason(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    return str(error.get("message", "")) if isinstance(error, dict) else str(error)
