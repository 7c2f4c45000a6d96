# SPDX-License-Identifier: Apache-2.0
"""Checking what requests say to segment reuse, at the API server and before tokenisation.

`admit` sees the JSON body before vLLM's own models of it do: those turn `true` into 1, and take
gigabytes to list what is wrong with a million entries. Bodies in files of vLLM's batch runner are
admitted in the same way (`serve/batch_files.py`). Endpoints it does not know and offline callers
are checked when vLLM validates their sampling parameters (`compat/input_processor.py`).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from starlette.requests import HTTPConnection, Request
from vllm.exceptions import VLLMValidationError

from vllm_segreuse.config import OPENING, SegReuseConfig
from vllm_segreuse.config.launch import names_connector
from vllm_segreuse.features import having
from vllm_segreuse.features.knowledge.naming import NamedDocument, PlaceError, check_places, shown
from vllm_segreuse.features.knowledge.origin import Origin, may_name, origin
from vllm_segreuse.features.knowledge.store import is_entry
from vllm_segreuse.options.parsing import (
    DOCUMENTS,
    EXTRA_KEYS,
    NULL,
    OPTION_PREFIX,
    RequestError,
    bind_extra_keys,
    parse_extra_keys,
    parse_request,
)
from vllm_segreuse.options.values import short_repr
from vllm_segreuse.serve.callers import api_key
from vllm_segreuse.serve.named import XARGS, name_documents

ENDPOINTS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
        "/invocations",
    }
)
"""Paths whose bodies may hold `extra_keys` and `vllm_xargs`."""

NOT_HERE = {
    "/inference/v1/generate": "put them into sampling_params.extra_args",
    **dict.fromkeys(
        (
            *("/v1/chat/completions/render", "/v1/completions/render"),
            *("/v1/messages/render", "/v1/responses/render"),
        ),
        f"put them into {XARGS}, and they will be in what is rendered",
    ),
    **dict.fromkeys(
        (
            *("/v1/chat/completions/derender", "/v1/completions/derender"),
            *("/cohere/v2/chat", "/cohere/v2/chat/render", "/v1/systemone", "/generative_scoring"),
            *("/v1/decisions", "/v1/embeddings", "/v2/embed", "/pooling", "/classify"),
            *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
        ),
        "its requests reuse nothing: leave them away",
    ),
}
"""Paths that take prompts and would ignore our keys at the top level of a body, and what to do.
Those that only count tokens (`/tokenize`, `/v1/messages/count_tokens`) take any body."""


@cache
def _server(opened: frozenset[str]) -> SegReuseConfig:
    """Options of a server with these keys of `OPENING`: no others decide what requests may ask."""
    return SegReuseConfig.from_options({key: OPENING[key] for key in opened})


_ANY_SERVER = _server(frozenset(OPENING))


class BadOptionError(VLLMValidationError, ValueError):
    """A request's option is refused: HTTP 400 at the server, a ValueError offline.

    vLLM's asynchronous engine answers 500 to errors that are not of its own classes.
    """

    def __init__(self, error: RequestError) -> None:
        VLLMValidationError.__init__(self, str(error), parameter=error.option)


class PromptError(VLLMValidationError, ValueError):
    """A prompt is not what the request says it is: HTTP 400 at the server."""

    def __init__(self, message: str) -> None:
        VLLMValidationError.__init__(self, message, parameter=DOCUMENTS)


def check_extra_args(
    extra_args: Mapping[str, Any] | None,
    *,
    opened: frozenset[str] = frozenset(),
    bound: bool = False,
    trust_programs: bool = False,
) -> None:
    """Checks our part of `SamplingParams.extra_args`.

    Args:
        opened: which keys of `config.OPENING` this engine's options have.
        bound: whether this engine binds extra keys to API keys (`SegReuseConfig.namespaces`).
        trust_programs: `SegReuseConfig.namespaces_trust_programs`.

    Raises:
        BadOptionError: names the option, its value and what is allowed.
    """
    if not extra_args:
        return
    try:
        parsed = parse_request(extra_args, _server(opened), trusted=origin.get().is_trusted)
        if bound and parsed.extra_keys is not None and not may_name(trust_programs):
            raise RequestError(
                EXTRA_KEYS,
                f"{EXTRA_KEYS}: they are bound to API keys here (namespaces), and this way in does "
                "not tell the caller's: use a checked endpoint such as /v1/completions, leave them "
                "away, or set namespaces_trust_programs in a program that runs the engine itself",
            )
        if wrong := [name for name in parsed.documents if not is_entry(name)]:
            raise RequestError(
                DOCUMENTS,
                f"{DOCUMENTS}: {short_repr(shown(wrong[0]))} is no entry of a knowledge base: "
                "names of documents are looked up at endpoints such as /v1/completions only",
            )
    except RequestError as error:
        raise BadOptionError(error) from None


def check_params(vllm_config: Any, params: Any) -> None:
    """Checks our part of the parameters of a request to an engine.

    Args:
        vllm_config: the engine's; one without our connector takes anything.
        params: vLLM's sampling parameters, or others.

    Raises:
        BadOptionError: as `check_extra_args`.
    """
    config = vllm_config.kv_transfer_config
    if not names_connector(config):
        return
    options = config.kv_connector_extra_config
    check_extra_args(
        getattr(params, "extra_args", None),
        opened=frozenset(key for key in OPENING if options.get(key) is not None),
        bound=options.get("namespaces") is not None,
        trust_programs=options.get("namespaces_trust_programs", False),
    )


@cache
def _checks() -> list[ModuleType]:
    """What features check of requests."""
    return having("checks")


def check_body(body: Mapping[str, Any], model_config: Any) -> None:
    """Checks an admitted body by what features know of the model.

    Args:
        model_config: vLLM's; None: it is not known.

    Raises:
        RequestError: says what is wrong.
    """
    for module in _checks() if model_config is not None else ():
        module.check_body(body, model_config)


def check_prompt(
    processor: Any,
    tokens: Sequence[int] | None,
    params: Any,
    unusual: str | None,
    is_apart: bool,
) -> None:
    """Checks a tokenised prompt by what features know of the model.

    Args:
        processor: vLLM's input processor.
        tokens: of the prompt; None: it consists of embeddings.
        params: vLLM's sampling parameters, or others.
        unusual: what it comes with beside text, such as images; None: nothing.
        is_apart: whether it has an adapter or a salt, and so a namespace of its own.

    Raises:
        BadOptionError: says what is wrong.
    """
    if not names_connector(processor.vllm_config.kv_transfer_config):
        return
    try:
        for module in _checks():
            module.check_prompt(processor, tokens, params, unusual, is_apart)
    except RequestError as error:
        raise BadOptionError(error) from None


def check_named(
    tokens: Sequence[int], documents: Sequence[NamedDocument], at: Sequence[int] = ()
) -> None:
    """Checks that a tokenised prompt has the documents that its request names (`check_places`).

    Raises:
        PromptError: says which one it has not.
    """
    try:
        check_places(tokens, documents, at)
    except PlaceError as error:
        raise PromptError(str(error)) from None


def refuse_unread(fields: Mapping[str, Any]) -> None:
    """Refuses our keys in a body that nobody has read."""
    refuse_keys(fields, "here, where nobody has read the body: put them into vllm_xargs")


async def admit(connection: HTTPConnection) -> None:
    """FastAPI dependency: checks a request, and moves a top-level `extra_keys` into `vllm_xargs`.

    The body is parsed once: FastAPI, this function and the endpoint share Starlette's one result,
    which is changed in place.

    Raises:
        BadOptionError: becomes HTTP 400; names the option, its value and what is allowed.
    """
    origin.set(Origin.ENDPOINT)
    if not isinstance(connection, Request):
        return
    path = connection.scope["route"].path
    if path not in ENDPOINTS and path not in NOT_HERE:
        return
    try:
        body = await connection.json()
    except (ValueError, RecursionError):  # no JSON, or too deep to be read: the endpoint says so
        return
    if not isinstance(body, dict):
        return
    if path in NOT_HERE:
        refuse_keys(body, f"for {path.strip('/').replace('/', ' ')}: {NOT_HERE[path]}")
        return
    rights = getattr(connection.app.state, "segreuse_namespaces", None)
    try:
        admit_body(body)
        check_body(body, getattr(connection.app.state, "segreuse_model", None))
        if rights is not None:
            _bind(body, connection, rights)
        state = connection.app.state
        has_admin = hasattr(state, "segreuse_service")  # None: it cannot have knowledge bases
        await name_documents(body, state.segreuse_service if has_admin else None, has_admin)
    except RequestError as error:
        raise BadOptionError(error) from None
    origin.set(Origin.CHECKED if rights is None else Origin.BOUND)


def refuse_keys(body: Mapping[str, Any], where: str) -> None:
    """Refuse keys of ours at the top level of a body, where they would be ignored.

    Args:
        where: that is, and what to do.

    Raises:
        BadOptionError: names the first of them.
    """
    if error := ignored_key(body, where):
        raise BadOptionError(error)


def ignored_key(body: Mapping[str, Any], where: str) -> RequestError | None:
    """What is wrong with the first key of ours at the top level of such a body, if it has one."""
    for key, value in body.items():
        if value is not None and (key == EXTRA_KEYS or key.startswith(OPTION_PREFIX)):
            option = short_repr(key)[1:-1]
            # Without slashes: vLLM takes what looks like a path out of messages.
            message = f"{option} has no effect at the top level of a body {where}"
            return RequestError(option, message)
    return None


def _bind(
    body: dict[str, Any], connection: HTTPConnection, rights: Mapping[str, tuple[str, ...]]
) -> None:
    """Turns the extra keys of an admitted body into the namespace that they mean to the caller."""
    xargs = body.get(XARGS)
    if not isinstance(xargs, dict) or xargs.get(EXTRA_KEYS) is None:
        return
    keys = parse_extra_keys(xargs[EXTRA_KEYS])
    assert keys is not None
    bound = bind_extra_keys(keys, api_key(connection.headers), rights)
    body[XARGS] = {**xargs, EXTRA_KEYS: list(bound)}


def admit_body(body: dict[str, Any]) -> None:
    """What `admit` does, to the JSON object that a client sent.

    The server's options are not known here: `check_extra_args` refuses what they rule out.

    Raises:
        RequestError: names the option, its value and what is allowed.
    """
    if misplaced := [key for key in body if key.startswith(OPTION_PREFIX)]:
        option = short_repr(misplaced[0])[1:-1]
        raise RequestError(
            option, f"{option} has no effect at the top level of a body: put it into {XARGS}"
        )
    xargs = body.get(XARGS)
    if xargs is not None and not isinstance(xargs, dict):
        return  # vLLM refuses it
    parse_request(xargs, _ANY_SERVER)
    if xargs:
        # vLLM carries no null: that of an option of ours becomes a text.
        nulls = {key for key, value in xargs.items() if value is None and key != DOCUMENTS}
        texts = {key: NULL for key in nulls if key.startswith(OPTION_PREFIX)}
        body[XARGS] = xargs = {**xargs, **texts}
    extra_keys = parse_extra_keys(body.pop(EXTRA_KEYS, None))
    if extra_keys is None:
        return
    if xargs and EXTRA_KEYS in xargs:
        raise RequestError(
            EXTRA_KEYS, f"{EXTRA_KEYS} is given twice, at the top level and in {XARGS}: drop one"
        )
    body[XARGS] = {**(xargs or {}), EXTRA_KEYS: list(extra_keys)}
