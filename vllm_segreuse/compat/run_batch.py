# SPDX-License-Identifier: Apache-2.0
"""`vllm.entrypoints.launchers.run_batch`: bodies in batch files, admitted as a server admits them.

The batch runner calls what serves chat completions itself, behind the routes of an application, so
that checks of requests see nothing of it: extra keys at the top level of a body would be ignored.
vLLM has no hook for what it reads.

Obsolete when the batch runner sends its requests through the application. None filed that we know
of.
"""

import sys
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from vllm_segreuse.compat.patching import signature_with, wrap

_MODULE = "vllm.entrypoints.launchers.run_batch"


def install() -> None:
    """Wrap the reading and the running of requests, once."""
    import vllm.entrypoints.launchers.run_batch as run_batch

    install_in(run_batch)
    main = sys.modules.get("__main__")
    if main is not None and getattr(getattr(main, "__spec__", None), "name", None) == _MODULE:
        install_in(main)  # `python -m` runs a copy of it


def install_in(module: ModuleType) -> None:
    """The same in one copy of the module."""
    if not hasattr(module, "BatchRequestInput"):
        raise RuntimeError(
            f"segment reuse has to see {module.__name__}.BatchRequestInput, which this vLLM does "
            "not have; install a supported vLLM, or start without segment reuse"
        )
    wrap(module, "run_request", _run_request)
    if not hasattr(module.BatchRequestInput, "_segreuse_line"):
        module.BatchRequestInput = _admitted(module.BatchRequestInput)  # type: ignore[attr-defined]


def _admitted(input_type: Any) -> Any:
    """Requests of batch files that know what was admitted of them."""
    from pydantic import PrivateAttr

    from vllm_segreuse.serve.batch_files import read_line

    class AdmittedBatchRequestInput(input_type):
        _segreuse_line: Any = PrivateAttr(None)

        @classmethod
        def model_validate_json(cls, json_data: Any, **kwargs: Any) -> Any:
            line = read_line(json_data)
            request = super().model_validate_json(line.text, **kwargs)
            request._segreuse_line = line
            return request

    return AdmittedBatchRequestInput


def _run_request(original: Callable[..., Any]) -> Callable[..., Any]:
    from vllm_segreuse.config import RequestError
    from vllm_segreuse.documents.model import names_of
    from vllm_segreuse.serve.documents import check_body
    from vllm_segreuse.serve.requests import BadOptionError

    signature = signature_with(original, "serving_engine_func", "request")

    def run_request(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        call = signature.bind(*args, **kwargs)
        line = getattr(call.arguments["request"], "_segreuse_line", None)
        if line is None or line.body is None:
            return original(*args, **kwargs)
        serve = call.arguments["serving_engine_func"]

        async def checked(body: Any) -> Any:
            try:
                if line.refusal is not None:
                    raise line.refusal
                serving = getattr(serve, "__self__", None)
                names = names_of(serving.model_config) if serving is not None else None
                if names is not None:
                    check_body(line.body, names)
            except RequestError as error:
                raise BadOptionError(error) from None
            return await serve(body)

        call.arguments["serving_engine_func"] = checked
        return original(*call.args, **call.kwargs)

    return run_request
