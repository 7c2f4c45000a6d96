# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.async_llm.AsyncLLM`: the API server's requests and their reports, for the viewer.

Requests reach the engine by many endpoints, and their reports come back with the outputs. vLLM has
no hook that sees the outputs of all of them in the API server.

Obsolete when plugins can observe the request outputs of an API server. None filed that we know of.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm_segreuse.compat.patching import wrap
from vllm_segreuse.viewer.recent import watched

CHECKED = ("0.32", "0.33")


def install() -> None:
    """Wrap the generation of outputs, once."""
    from vllm.v1.engine.async_llm import AsyncLLM

    wrap(AsyncLLM, "generate", _generate)


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        outputs = original(self, prompt, sampling_params, request_id, *args, **kwargs)
        return watched(request_id, sampling_params, outputs)

    return generate
