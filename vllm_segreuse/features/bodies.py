# SPDX-License-Identifier: Apache-2.0
"""Bodies that no endpoint can read: what they are answered.

Python's parser raises `ValueError` for what is no JSON, and `RecursionError` for what is nested too
deeply.
"""

from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse

TOO_DEEP = "the body is nested too deeply: send fewer brackets inside of each other"


async def too_deep(request: Request, error: Any) -> JSONResponse:
    """Exception handler for `RecursionError`: HTTP 400, in the form of vLLM's own errors."""
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    answer = create_error_response(TOO_DEEP)
    return JSONResponse(answer.model_dump(), status_code=HTTPStatus.BAD_REQUEST)


async def json_or_nothing(request: Request) -> None:
    """FastAPI dependency of routes that take no body: one that is sent is JSON all the same.

    Raises:
        HTTPException: 400, it is not.
        RecursionError: it is nested too deeply; the application has a handler for that.
    """
    if not await request.body():
        return
    try:
        await request.json()
    except ValueError:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body is not JSON: send none") from None
