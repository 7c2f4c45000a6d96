# SPDX-License-Identifier: Apache-2.0
"""What a request says to segment reuse, checked."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from vllm_segreuse.options.keys import MAX_EXTRA_KEY_BYTES, MAX_EXTRA_KEYS, key_fault
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.options.server import ServerOptions
from vllm_segreuse.options.values import first_error, short_repr, unknown_text

EXTRA_KEYS = "extra_keys"
"""Name of the request's namespace in the body and in `SamplingParams.extra_args`."""

OPTION_PREFIX = "segreuse_"
"""Prefix that sets our per-request options apart from those of others in `extra_args`."""

ORDERS = FREEZE, SCORE, COPY, ANCHORS = tuple(
    OPTION_PREFIX + it for it in ("freeze", "score", "copy", "anchors")
)
"""Set by the server itself while it ingests documents; clients may not."""

DOCUMENTS = OPTION_PREFIX + "documents"
"""Compressed documents that a request names."""

NULL = "null"
"""Value of a request's option that means None: `vllm_xargs` of vLLM holds no null."""

MAX_NAMED, MAX_NAME_BYTES = 64, 1024
"""Of one request, and of each name."""

# Begins the extra keys that are bound to a caller. Clients cannot write it: no control characters.
_BOUND = "\x01"


class RequestError(ValueError):
    """An option or extra key of one request is unknown or out of range.

    Attributes:
        option: name of the offending option as the client wrote it.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


class ParsedRequest(NamedTuple):
    """What `SamplingParams.extra_args` says to segment reuse.

    Attributes:
        extra_keys: the request's namespace, or None: it neither reuses nor donates.
        options: resolved options of the request.
        freeze: the server's own order to freeze its blocks (`plan.FreezeOrder.encode`).
        score, copy, anchors: its orders to compress a document, encoded
            (`segreuse_extras/compressed/orders.py`).
        documents: compressed documents that the request names, in the order of its prompt.
    """

    extra_keys: tuple[str, ...] | None
    options: PolicyOptions
    freeze: str | None = None
    score: object = None
    copy: object = None
    anchors: object = None
    documents: tuple[str, ...] = ()

    @property
    def compresses(self) -> bool:
        """Whether it is a request that compresses a document."""
        return any(order is not None for order in (self.score, self.copy, self.anchors))


def parse_request(
    extra_args: Mapping[str, Any] | None, config: ServerOptions, *, trusted: bool = False
) -> ParsedRequest:
    """Reads and checks what a request says to segment reuse.

    Keys of `extra_args` that neither are `extra_keys` nor start with `segreuse_` belong to others
    and are left alone. The cost is bounded whatever the values' size.

    Args:
        trusted: whether this process has written them, not a client: then an order to freeze, and
            extra keys that are bound to a caller, are accepted as well.

    Raises:
        RequestError: names the option, its value and what is allowed.
    """
    if not extra_args:
        return ParsedRequest(None, config.request_defaults())
    own = {key: value for key, value in extra_args.items() if str(key).startswith(OPTION_PREFIX)}
    freeze, score, copy, anchors = (own.pop(key, None) if trusted else None for key in ORDERS)
    documents = parse_documents(own.pop(DOCUMENTS, None))
    extra_keys = parse_extra_keys(extra_args.get(EXTRA_KEYS), trusted=trusted)
    orders = (freeze, score, copy, anchors, documents)
    if not own:
        return ParsedRequest(extra_keys, config.request_defaults(), *orders)
    fields, kind = config.request_values(), config.request_type
    for key, value in own.items():
        name = key.removeprefix(OPTION_PREFIX)
        if name not in fields:
            allowed = [DOCUMENTS, *(OPTION_PREFIX + field for field in kind.model_fields)]
            raise RequestError(short_repr(key)[1:-1], unknown_text(key, allowed))
        fields[name] = None if isinstance(value, str) and value == NULL else value
    try:
        options = kind.model_validate(fields)
    except ValidationError as error:
        option, message = first_error(error)
        raise RequestError(OPTION_PREFIX + option, OPTION_PREFIX + message) from None
    for part in kind.parts:
        if refusal := part.refused(options, config):
            raise RequestError(OPTION_PREFIX + refusal.option, OPTION_PREFIX + refusal.text)
    return ParsedRequest(extra_keys, options, *orders)


def parse_documents(value: object) -> tuple[str, ...]:
    """Checks the compressed documents that a request names.

    Raises:
        RequestError: wrong type, too many, or a name that is empty, too long or not text.
    """
    if value is None:
        return ()
    wanted = f"a list of 1 to {MAX_NAMED}"
    return _strings(DOCUMENTS, value, "name", wanted, MAX_NAMED, MAX_NAME_BYTES)


def bind_extra_keys(
    extra_keys: tuple[str, ...], api_key: str, rights: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """The namespace that a caller's extra keys stand for, where names are bound to API keys.

    A name that the caller may not share means a namespace of its own, whether or not the name is
    in use elsewhere: there is no hit, and nothing that tells one from the other.

    Args:
        api_key: of the caller; "" for none.
        rights: `ServerOptions.namespaces`.
    """
    digest = hashlib.sha256(api_key.encode(errors="surrogateescape")).hexdigest()
    shared = rights.get(digest, ())
    if extra_keys[0] in shared or "*" in shared:
        return extra_keys
    return (_BOUND + digest, *extra_keys)


def parse_extra_keys(value: object, *, trusted: bool = False) -> tuple[str, ...] | None:
    """Checks a request's namespace: a string s means `[s]`, a list is ordered and composite.

    Strings are taken as they are: NFC and NFD spellings of one text are two namespaces.

    Returns:
        The keys, or None for None (no namespace).

    Raises:
        RequestError: wrong type, no key or too many, or a key that is empty, too long or not text.
    """
    if value is None:
        return None
    if trusted and isinstance(value, list | tuple) and value and str(value[0]).startswith(_BOUND):
        return (value[0], *(parse_extra_keys(value[1:]) or ()))
    wanted = f"a string or a list of 1 to {MAX_EXTRA_KEYS}"
    return _strings(EXTRA_KEYS, value, "key", wanted, MAX_EXTRA_KEYS)


def _strings(
    option: str,
    value: object,
    noun: str,
    wanted: str,
    most: int,
    max_bytes: int = MAX_EXTRA_KEY_BYTES,
) -> tuple[str, ...]:
    """One string, or several."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not 1 <= len(found) <= most:
        held = f" ({len(found)} {noun}s)" if isinstance(found, list | tuple) else ""
        raise RequestError(option, f"{option}={short_repr(value)}{held} must be {wanted} strings")
    for each in found:
        if fault := key_fault(each, max_bytes):
            raise RequestError(option, f"{option}: the {noun} {short_repr(each)} {fault}")
    return tuple(found)
