# SPDX-License-Identifier: Apache-2.0
"""From logged bodies to prompts without vLLM: the tokenizer's own chat template, by `jinja2` and
`tokenizers`.

What vLLM adds is missing: its parsers, its checks of parameters, and templates that a server is
given. Bodies that no server would take are left out all the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from segreuse_tools.estimate.prompts import PromptTokens
from segreuse_tools.estimate.request_log import LeftOut, LogError, Logged, logged
from segreuse_tools.estimate.traces.lines import LogLines, files_of
from segreuse_tools.model_folder import InputError, find_model
from vllm_segreuse.options.parsing import EXTRA_KEYS, RequestError, parse_extra_keys
from vllm_segreuse.options.values import short_repr

MOST_SEQUENCES = 16_384
"""Answers to a prompt that a server of vLLM gives, unless its environment says another number."""

COMPLETION_TOKENS = 16
"""Of the answer to a completion that does not say how many (`CompletionRequest.max_tokens`)."""

_MOST_SEQUENCES_ENV = "VLLM_MAX_N_SEQUENCES"

_OTHER_SESSIONS = ("prompt_cache_key", "safety_identifier", "user")
"""Fields of a body that name who asks where vLLM's own do not, the best first."""

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Kinds of parts of a content that are text, and the field that has it, as in vLLM."""


class BodyPrompts:
    """Reads bodies.

    Args:
        path: of the log.
        model: folder, or cached name, of a model with a tokenizer.
        extra_keys: of bodies that name none.
        left_out: gets the lines that no server would take.

    Attributes:
        lines: of the log.
        answer_tokens: most that an answer has whose text was not logged.

    Raises:
        InputError: the model has no tokenizer that can be read.
    """

    answer_tokens = 128

    def __init__(
        self, path: Path, model: str | None, extra_keys: Sequence[str], left_out: LeftOut
    ) -> None:
        if model is None:
            raise InputError(f"{path} is no trace of ids: name a model for its texts (--model)")
        self._tokenizer = ChatTokenizer(find_model(model))
        self._extra_keys = tuple(extra_keys)
        self._left_out = left_out
        self._namespaces: dict[tuple[str, ...], int] = {}  # by salt and extra keys
        self.lines = LogLines(files_of(path))

    def prompts(self) -> Iterator[PromptTokens]:
        """Those of all lines, in their order."""
        for where, value in self.lines.parsed(self._left_out):
            try:
                found = [*self._of_line(logged(where, value))]
            except LogError as error:
                self._left_out.refuse(where, error)
                continue
            yield from found

    def _of_line(self, line: Logged) -> Iterator[PromptTokens]:
        body, where = line.body, line.where
        if line.is_chat:
            texts = [*_texts(where, body["messages"])]
            prompts = [self._tokenizer.chat(where, body)]
        else:
            given = body["prompt"]
            several = isinstance(given, list) and given and isinstance(given[0], str | list)
            texts = [it for it in (given if several else [given]) if isinstance(it, str)]
            prompts = [
                self._tokenizer.completion(where, it) for it in (given if several else [given])
            ]
        salt, session = _salt(where, body), _session(body)
        namespace = self._namespace(where, body, salt)
        documents = [part for text in texts for part in text.split("\n\n")]
        count = self._answer(where, line)
        for tokens in prompts:
            if not len(tokens):
                raise LogError(f"{where} has no tokens")
            for _ in range(_sequences(where, body)):
                yield PromptTokens(
                    *(tokens, count, session, documents, namespace),
                    is_alone=len(prompts) == 1,
                    salt=salt,
                )

    def _namespace(self, where: str, body: Mapping[str, Any], salt: str) -> int | None:
        if body.get("prompt_logprobs") is not None:
            return None  # such a request neither reuses nor donates
        xargs = body.get("vllm_xargs")
        beside = xargs.get(EXTRA_KEYS) if isinstance(xargs, dict) else None
        try:  # both, as a server does
            given = parse_extra_keys(body.get(EXTRA_KEYS)), parse_extra_keys(beside)
        except RequestError as error:
            raise LogError(f"{where}: {error}") from None
        if None not in given:
            raise LogError(f"{where}: {EXTRA_KEYS} is given twice")
        keys = given[0] or given[1] or self._extra_keys
        return self._namespaces.setdefault((salt, *keys), len(self._namespaces)) if keys else None

    def _answer(self, where: str, line: Logged) -> int:
        if line.answer is not None:
            return max(1, len(self._tokenizer.completion(where, line.answer)))
        if line.is_chat:
            usual = _number(where, line.body, "max_tokens", self.answer_tokens)
            most = _number(where, line.body, "max_completion_tokens", usual)
        elif "max_tokens" in line.body:  # with null it is as long as fits
            most = _number(where, line.body, "max_tokens", self.answer_tokens)
        else:
            most = COMPLETION_TOKENS
        return min(most, self.answer_tokens)


class ChatTokenizer:
    """A tokenizer, and the chat template that its folder has.

    Args:
        folder: of the model.

    Raises:
        InputError: there is no tokenizer, or its template is none.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # of no class of its own
            raise InputError(f"cannot read {file}: {error}") from None
        # Training leaves both in the file, and transformers turns them off for each call.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _json(folder / "tokenizer_config.json")
        self._special = {
            name: token.get("content", "") if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        self._template = _template(folder, config)

    def completion(self, where: str, prompt: Any) -> np.ndarray:
        """Tokens of a prompt, int32 `[tokens]`: a text, or tokens already."""
        if isinstance(prompt, str):
            return np.array(self._tokenizer.encode(prompt).ids, np.int32)
        most = self._tokenizer.get_vocab_size()
        is_tokens = isinstance(prompt, list) and all(type(it) is int for it in prompt)
        if not is_tokens or not all(0 <= it < most for it in prompt):
            raise LogError(f"{where}: prompt must be a text, or ids of tokens below {most:,}")
        return np.array(prompt, np.int32)

    def chat(self, where: str, body: Mapping[str, Any]) -> np.ndarray:
        """Tokens of a conversation, int32 `[tokens]`."""
        if self._template is None:
            raise LogError(f"{where}: the tokenizer has no chat template, which messages need")
        kwargs = body.get("chat_template_kwargs")
        kwargs = kwargs if isinstance(kwargs, dict) else {}
        documents = body.get("documents")
        variables = {
            **self._special,
            **kwargs,
            "messages": [_plain(message) for message in body["messages"]],
            "tools": body.get("tools"),
            "documents": kwargs.get("documents") if documents is None else documents,
            "add_generation_prompt": body.get("add_generation_prompt", True),
        }
        try:
            text = self._template.render(**variables)
        except Exception as error:  # templates compute, and raise whatever they trip over
            raise LogError(f"{where}: the chat template refuses it: {error}") from None
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def _template(folder: Path, config: Mapping[str, Any]) -> Any:
    """The template of a tokenizer; None: it has none."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    file = folder / "chat_template.jinja"
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {file}: {error}") from None
    if isinstance(text, list):
        named = {it.get("name"): it.get("template") for it in text if isinstance(it, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        return None

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation()]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise InputError(f"the chat template of {folder} is none: {error}") from None


def _generation() -> type[Any]:
    """A tag of `transformers`: around what training counts, which is rendered as it is."""
    from jinja2.ext import Extension

    class Generation(Extension):
        """`{% generation %}` to `{% endgeneration %}`."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As `transformers` has it: jinja2's own escapes what HTML would misread."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _texts(where: str, messages: Any) -> Iterator[str]:
    """All texts of a conversation.

    Raises:
        LogError: it is none, or has anything else.
    """
    if not isinstance(messages, list) or not messages:
        raise LogError(f"{where}: messages must be a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise LogError(f"{where}: each message must be an object with a role")
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            part = _text_of(part)
            if isinstance(part, dict):
                raise LogError(f"{where}: images, audio or video")
            if isinstance(part, str):
                yield part
            elif content is not None or message["role"] != "assistant":
                raise LogError(f"{where}: content must be a text, or a list of parts")


def _text_of(part: Any) -> Any:
    """The text of a part of a content; the part itself: it has none."""
    field = _TEXT_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
    return part if field is None else part.get(field)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is one text, which may be empty, and whose calls of tools have their
    arguments as an object, as templates expect (vLLM's `renderers/chat_utils.py`)."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        content = "\n".join(map(_text_of, content))
    plain = {**message, "content": content or ""}
    if message["role"] == "assistant" and isinstance(calls, list):
        plain["tool_calls"] = [_called(call) for call in calls]
    if not calls:
        plain.pop("tool_calls", None)
    return plain


def _called(call: Any) -> Any:
    """A call of a tool; bodies have its arguments as JSON in a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    known = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**function, "arguments": known}}


def _session(body: Mapping[str, Any]) -> str | None:
    xargs = body.get("vllm_xargs")
    own = xargs.get("session_id") if isinstance(xargs, dict) else None
    found = (body.get("session_id"), own, *(body.get(name) for name in _OTHER_SESSIONS))
    return next((it for it in found if isinstance(it, str) and it), None)  # "" names nobody


def _salt(where: str, body: Mapping[str, Any]) -> str:
    """Of vLLM's prefix cache; "": none."""
    found = body.get("cache_salt")
    if found is not None and not (isinstance(found, str) and found):
        raise LogError(f"{where}: cache_salt must be a text that is not empty, or be omitted")
    return found or ""


def _sequences(where: str, body: Mapping[str, Any]) -> int:
    """Answers that a body asks for, as many as vLLM gives (`SamplingParams.n`)."""
    found, most = _number(where, body, "n", 1), os.environ.get(_MOST_SEQUENCES_ENV, "")
    limit = int(most) if most.isdecimal() else MOST_SEQUENCES
    if found > limit:
        raise LogError(
            f"{where}: n must be at most {limit} ({_MOST_SEQUENCES_ENV}), got {short_repr(found)}"
        )
    if found > 1 and body.get("temperature") == 0:  # all of them would be the same
        raise LogError(f"{where}: n must be 1 with temperature=0, got {found}")
    return found


def _number(where: str, body: Mapping[str, Any], name: str, usual: int) -> int:
    found = body.get(name)
    if found is None:
        return usual
    if type(found) is not int or found < 1:
        raise LogError(f"{where}: {name} must be at least 1, got {short_repr(found)}")
    return found
