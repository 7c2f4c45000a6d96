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
from typing import Any, NamedTuple, Protocol

from vllm_segreuse.compat.patching import signature_with, wrap

_MODULE = "vllm.entrypoints.launchers.run_batch"


class Line(Protocol):
    """What was read of a line."""

    @property
    def text(self) -> str:
        """For vLLM to read."""


class Lines(NamedTuple):
    """How lines are read and checked.

    Attributes:
        read: what is made of a line.
        check: raises if the request of a line must not run, by the `ModelConfig` if it is known.
    """

    read: Callable[[str], Line]
    check: Callable[[Any, Any], None]


def install(lines: Lines) -> None:
    """Wrap the reading and the running of requests, once."""
    import vllm.entrypoints.launchers.run_batch as run_batch

    install_in(run_batch, lines)
    main = sys.modules.get("__main__")
    if main is not None and getattr(getattr(main, "__spec__", None), "name", None) == _MODULE:
        install_in(main, lines)  # `python -m` runs a copy of it


def install_in(module: ModuleType, lines: Lines) -> None:
    """The same in one copy of the module."""
    if not hasattr(module, "BatchRequestInput"):
        raise RuntimeError(
            f"segment reuse has to see {module.__name__}.BatchRequestInput, which this vLLM does "
            "not have; install a supported vLLM, or start without segment reuse"
        )
    wrap(module, "run_request", _run_request, lines)
    if not hasattr(module.BatchRequestInput, "_segreuse_line"):
        admitted = _admitted(module.BatchRequestInput, lines)
        module.BatchRequestInput = admitted  # type: ignore[attr-defined]


def _admitted(input_type: Any, lines: Lines) -> Any:
    """Requests of batch files that know what was admitted of them."""
    from pydantic import PrivateAttr

    class AdmittedBatchRequestInput(input_type):
        _segreuse_line: Any = PrivateAttr(None)

        @classmethod
        def model_validate_json(cls, json_data: Any, **kwargs: Any) -> Any:
            line = lines.read(json_data)
            request = super().model_validate_json(line.text, **kwargs)
            request._segreuse_line = line
            return request

    return AdmittedBatchRequestInput


def _run_request(original: Callable[..., Any], lines: Lines) -> Callable[..., Any]:
    signature = signature_with(original, "serving_engine_func", "request")

    def run_request(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        call = signature.bind(*args, **kwargs)
        line = getattr(call.arguments["request"], "_segreuse_line", None)
        if line is None:
            return original(*args, **kwargs)
        serve = call.arguments["serving_engine_func"]

        async def checked(body: Any) -> Any:
            serving = getattr(serve, "__self__", None)
            lines.check(line, None if serving is None else serving.model_config)
            return await serve(body)

        call.arguments["serving_engine_func"] = checked
        return original(*call.args, **call.kwargs)

    return run_request
