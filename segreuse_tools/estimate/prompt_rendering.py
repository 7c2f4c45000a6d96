# SPDX-License-Identifier: Apache-2.0
"""From logged bodies to prompts, by vLLM's own renderer: chat template and tokenizer included."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
from vllm.entrypoints.scale_out.render.serving import ServingRender
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMError
from vllm.renderers import renderer_from_config
from vllm.renderers.chat_utils import has_non_text_content, load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer

try:
    from vllm.entrypoints.launchers.cli_args import resolve_default_chat_template_kwargs
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import resolve_default_chat_template_kwargs

from segreuse_tools.estimate.request_log import LeftOut, LogError, Logged
from segreuse_tools.model_folder import InputError
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.options.parsing import EXTRA_KEYS, OPTION_PREFIX, RequestError, parse_request
from vllm_segreuse.serve.requests import admit_body

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig

_UNKNOWN_TOKEN = 1 << 30
"""Generated tokens whose text was not logged are numbers from here on, none of them twice."""


@dataclass(frozen=True)
class Asked:
    """A request as the engine gets it.

    Attributes:
        where: see `Logged`.
        token_ids: of the prompt.
        answer_ids: of what is generated, at least one.
        time_s: see `Logged`.
        extra_args: of vLLM's `SamplingParams`: extra keys and our options.
        cache_salt, priority, prompt_logprobs: as in the body.
        session_id: the same; None: nothing says which prompt it continues.
    """

    where: str
    token_ids: list[int]
    answer_ids: list[int]
    time_s: float | None
    extra_args: dict[str, Any]
    cache_salt: str | None
    priority: int
    prompt_logprobs: int | None
    session_id: str | None


class Renderer:
    """Makes prompts of bodies as a server would.

    Args:
        vllm_config: of the engine, with a tokenizer.
        args: of vLLM's server: chat template, parsers.
        extra_keys: of bodies that name none; empty: they have none.
        answer_tokens: most that an answer has whose text was not logged.
        options: of the server; None: some that allow all that a request may say.
        left_out: gets the lines that are not replayed; None: one that a server would refuse is an
            error.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        args: Namespace,
        extra_keys: Sequence[str],
        answer_tokens: int,
        options: SegReuseConfig | None = None,
        left_out: LeftOut | None = None,
    ) -> None:
        self._options = options
        self._left_out = LeftOut() if left_out is None else left_out
        self._extra_keys = list(extra_keys)
        self._answer_tokens = answer_tokens
        self._unknown = itertools.count(_UNKNOWN_TOKEN)
        self._vllm_config = vllm_config
        self._model = vllm_config.model_config.model
        self._serving, self._renderer = _serving(vllm_config, args)
        self._tokenizer = self._renderer.get_tokenizer()

    def render(self, log: Sequence[Logged]) -> list[Asked]:
        """All requests of a log that a server would take, in its order.

        Raises:
            LogError: naming the line that it would refuse, and why, where that is an error.
        """
        return asyncio.run(self._rendered(log))

    async def _rendered(self, log: Sequence[Logged]) -> list[Asked]:
        asked: list[Asked] = []
        for logged in log:
            if has_non_text_content(logged.body.get("messages")):
                self._left_out.add(logged.where, "images, audio or video")
                continue
            try:
                asked += [*self._asked(logged, await self._generate_requests(logged))]
            except LogError as error:
                self._left_out.refuse(logged.where, error)
            except (VLLMError, ValueError, TypeError) as error:  # a server would answer 400
                refused = LogError(f"{logged.where}: {_one_line(error)}")
                self._left_out.refuse(logged.where, refused)
        return asked

    async def _generate_requests(self, logged: Logged) -> list[Any]:
        body = logged.body | {"model": self._model}
        if self._extra_keys and not _has_extra_keys(body):
            body[EXTRA_KEYS] = self._extra_keys
        try:
            admit_body(body)
        except RequestError as error:
            raise LogError(f"{logged.where}: {error}") from None
        if logged.is_chat:
            chat = ChatCompletionRequest.model_validate(body)
            rendered: Any = await self._serving.render_chat_request(chat)
        else:
            completion = CompletionRequest.model_validate(body)
            rendered = await self._serving.render_completion_request(completion)
        if isinstance(rendered, ErrorResponse):
            raise LogError(f"{logged.where}: {rendered.error.message}")
        return rendered if isinstance(rendered, list) else [rendered]

    def _asked(self, logged: Logged, requests: list[Any]) -> Iterator[Asked]:
        for request in requests:
            self._check(request)
            params = request.sampling_params
            extra_args = dict(params.extra_args or {})
            self._check_options(logged, extra_args)
            extra_args.pop(f"{OPTION_PREFIX}observe", None)  # what would be is asked here
            session_id = _session_id(logged.body, extra_args)
            for _ in range(params.n):
                yield Asked(
                    logged.where,
                    request.token_ids,
                    self._answer_ids(logged.answer, params.max_tokens),
                    logged.time_s,
                    extra_args,
                    request.cache_salt,
                    request.priority,
                    params.prompt_logprobs,
                    session_id,
                )

    def _check(self, request: Any) -> None:
        """What vLLM checks on the engine's side of its server (`v1/engine/input_processor.py`)."""
        config = self._vllm_config
        request.sampling_params.verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            self._tokenizer,
        )
        self._renderer.validate_token_ids(request.token_ids)

    def _check_options(self, logged: Logged, extra_args: dict[str, Any]) -> None:
        """What depends on the server's own options; the rest `admit_body` has checked."""
        if self._options is None:
            return
        try:
            parse_request(extra_args, self._options)
        except RequestError as error:
            raise LogError(f"{logged.where}: {error}; give its options by --config") from None

    def _answer_ids(self, answer: str | None, max_tokens: int) -> list[int]:
        if answer is not None:
            found: list[int] = self._tokenizer.encode(answer, add_special_tokens=False)
            return found[:max_tokens] or [next(self._unknown)]  # such as the end of the text alone
        return list(itertools.islice(self._unknown, max(1, min(max_tokens, self._answer_tokens))))


def _serving(vllm_config: VllmConfig, args: Namespace) -> tuple[ServingRender, Any]:
    """What vLLM's server without an engine renders with (`launchers/render/app_state.py`)."""
    model = vllm_config.model_config
    try:
        renderer = renderer_from_config(vllm_config)
    except Exception as error:  # of many classes, by kind of tokenizer
        raise InputError(f"{model.model} has no tokenizer: {_one_line(error)}") from None
    try:
        online = OnlineRenderer(
            model_config=model,
            renderer=renderer,
            request_logger=None,
            chat_template=load_chat_template(args.chat_template),
            chat_template_content_format=args.chat_template_content_format,
            trust_request_chat_template=args.trust_request_chat_template,
            enable_auto_tools=args.enable_auto_tool_choice,
            exclude_tools_when_tool_choice_none=args.exclude_tools_when_tool_choice_none,
            tool_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
            default_chat_template_kwargs=resolve_default_chat_template_kwargs(args),
        )
    except Exception as error:  # of many classes: a file that is not there, or an unknown parser
        raise InputError(f"vLLM refuses options of its server: {_one_line(error)}") from None
    models = OpenAIModelRegistry(model, [BaseModelPath(name=model.model, model_path=model.model)])
    return ServingRender(models, online), renderer


def _session_id(*found_in: Mapping[str, Any]) -> str | None:
    """As a server finds it (`entrypoints/generate/base/serving.py`), but for a header, which is in
    no body."""
    found = (it.get("session_id") for it in found_in)
    return next((it for it in found if isinstance(it, str) and it), None)


def _has_extra_keys(body: dict[str, Any]) -> bool:
    xargs = body.get("vllm_xargs")
    beside = xargs.get(EXTRA_KEYS) if isinstance(xargs, dict) else None
    return body.get(EXTRA_KEYS) is not None or beside is not None


def _one_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return str(error).split("\n")[0]
