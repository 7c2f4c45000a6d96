# SPDX-License-Identifier: Apache-2.0
"""`vllm.entrypoints.launchers.app`: request checks, and the administrator's routes.

The checks are a dependency of the application, which FastAPI solves before it validates a body and
long before vLLM tokenises it; vLLM builds its application without a hook for them. Its plugin group
for routes, `vllm.endpoint_plugins` (vllm-project/vllm#47454), is loaded only if `VLLM_PLUGINS`
names the plugin, which disables every plugin that it does not name. Here an admin token is enough.

Bodies that are nested too deeply for Python's parser are refused by FastAPI where it parses them;
vLLM does not handle them where its endpoints, or our checks, parse them.

Obsolete when endpoint plugins can add dependencies to vLLM's own routes, and are loaded without
disabling other plugins. None filed that we know of.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap the registration of routes, once."""
    import vllm.entrypoints.launchers.app as app_module

    wrap(app_module, "register_api_routers", _register_api_routers)


def _register_api_routers(original: Callable[..., Any]) -> Callable[..., Any]:
    from fastapi import Depends
    from fastapi.routing import APIRoute

    from vllm_segreuse.serve.admin import mount
    from vllm_segreuse.serve.bodies import too_deep
    from vllm_segreuse.serve.lifecycle import serving
    from vllm_segreuse.serve.requests import ENDPOINTS, admit

    def register_api_routers(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
        app.router.dependencies.append(Depends(admit))
        app.add_exception_handler(RecursionError, too_deep)
        original(args, app, *rest, **kwargs)
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

    return register_api_routers
