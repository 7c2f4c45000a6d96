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

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from vllm_segreuse.compat.patching import wrap

Around = Callable[[Any], AbstractContextManager[None]]
"""Around the registration of vLLM's routes with its application."""


def install(around: Around) -> None:
    """Wrap the registration of routes, once."""
    import vllm.entrypoints.launchers.app as app_module

    wrap(app_module, "register_api_routers", _register_api_routers, around)


def _register_api_routers(original: Callable[..., Any], around: Around) -> Callable[..., Any]:
    def register_api_routers(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
        with around(app):
            original(args, app, *rest, **kwargs)

    return register_api_routers
