# SPDX-License-Identifier: Apache-2.0
"""What a feature may add to an API server: `features/*/front.py` has a `FRONT`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.features import having


class Front:
    """A feature's half in an API server. A feature overrides what it needs."""

    def routes(self, admin: FastAPI, token: str) -> Sequence[BaseRoute]:
        """Routes of vLLM's application that come before the administrator's.

        Args:
            admin: the administrator's application (`admin.py`), with the state of the server.
            token: the administrator's.
        """
        return ()

    def serving(self, admin: FastAPI, config: SegReuseConfig) -> AbstractContextManager[None]:
        """Around the time in which a server with an administrator serves."""
        return nullcontext()

    def watched(
        self, request_id: str, params: Any, outputs: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """The outputs of a request, passed on as they are.

        Args:
            params: vLLM's, of the request.
        """
        return outputs


@cache
def fronts() -> list[Front]:
    """Those of all features, in order."""
    return [module.FRONT for module in having("front")]


def watched(
    request_id: str, params: Any, outputs: AsyncGenerator[Any, None]
) -> AsyncGenerator[Any, None]:
    """The outputs of a request, seen by all features."""
    for front in fronts():
        outputs = front.watched(request_id, params, outputs)
    return outputs
