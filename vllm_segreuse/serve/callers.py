# SPDX-License-Identifier: Apache-2.0
"""Which API key a request names."""

from __future__ import annotations

from starlette.datastructures import Headers

from vllm_segreuse.options.parsing import EXTRA_KEYS, RequestError


def api_key(headers: Headers) -> str:
    """The API key in `Authorization: Bearer` or `x-api-key`; "" for none.

    vLLM itself checks the first only (`entrypoints/serve/middleware/authenticate.py`). Clients of
    its Anthropic routes send the second, which a proxy in front may check. Nobody here can tell
    which of two different keys was checked, so a request that names two is refused.

    Returns:
        The key's bytes, decoded with `surrogateescape`.

    Raises:
        RequestError: there is more than one.
    """
    given = [_bearer(value) for value in headers.getlist("authorization")]
    keys = {key for key in (*given, *headers.getlist("x-api-key")) if key}
    if len(keys) > 1:
        raise RequestError(
            EXTRA_KEYS,
            f"{EXTRA_KEYS}: this server binds them to API keys, and the request's headers name "
            f"{len(keys)} different ones: send one, as Authorization: Bearer or as x-api-key",
        )
    # Starlette decodes headers as Latin-1, whatever they are.
    return keys.pop().encode("latin-1").decode(errors="surrogateescape") if keys else ""


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key if scheme.lower() == "bearer" else ""
