# SPDX-License-Identifier: Apache-2.0
"""vLLM's application with our checks of requests, and with the administrator's routes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute

from vllm_segreuse.features.bodies import too_deep
from vllm_segreuse.serve.admin import mount
from vllm_segreuse.serve.lifecycle import serving
from vllm_segreuse.serve.requests import ENDPOINTS, admit


@contextmanager
def registered(app: FastAPI) -> Iterator[None]:
    """Around the registration of vLLM's routes: what they all depend on comes before, what is
    mounted beside them behind.

    Raises:
        RuntimeError: a route that takes extra keys is not checked.
    """
    app.router.dependencies.append(Depends(admit))
    app.add_exception_handler(RecursionError, too_deep)
    yield
    for route in app.routes:
        if not isinstance(route, APIRoute) or route.path not in ENDPOINTS:
            continue
        if admit not in [dependency.call for dependency in route.dependant.dependencies]:
            raise RuntimeError(
                f"segment reuse cannot check the requests of {route.path}: this FastAPI "
                "does not pass an application's dependencies on to its routes"
            )
    admin = mount(app)
    lifespan = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan_with_ours(app: Any) -> AsyncIterator[Any]:
        async with lifespan(app) as state, serving(app, admin):
            yield state

    app.router.lifespan_context = lifespan_with_ours
