# SPDX-License-Identifier: Apache-2.0
"""The options of a server, and of a request, with those of all features."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_segreuse.features import having
from vllm_segreuse.options.parts import OptionsPart, RequestPart, ServerPart
from vllm_segreuse.options.request import PolicyOptions
from vllm_segreuse.options.server import ConfigError, ServerOptions

__all__ = ["OPENING", "ConfigError", "RequestOptions", "SegReuseConfig"]


def _parts(modules: list[ModuleType], kind: type[OptionsPart]) -> tuple[Any, ...]:
    """The classes of a kind that the modules define."""
    own = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    # Reversed: pydantic takes the fields of the last base first.
    return tuple(it for it in reversed(own) if issubclass(it, kind))


_MODULES = having("options")
_OF_REQUESTS = _parts(_MODULES, RequestPart)
_OF_SERVERS = _parts(_MODULES, ServerPart)

OPENING = {key: value for part in _OF_SERVERS for key, value in part.opening.items()}
"""Keys without which the server refuses some options of requests, with a value that allows them."""

if TYPE_CHECKING:

    class _AnyKeys:
        """Keys of features are checked when options are made."""

        def __getattr__(self, name: str) -> Any: ...

    class _RequestKeys(_AnyKeys, PolicyOptions): ...

    class _ServerKeys(_AnyKeys, ServerOptions): ...

else:
    _RequestKeys = type("_RequestKeys", (*_OF_REQUESTS, PolicyOptions), {"__module__": __name__})
    _ServerKeys = type(
        "_ServerKeys", (*_OF_SERVERS, *_OF_REQUESTS, ServerOptions), {"__module__": __name__}
    )


class RequestOptions(_RequestKeys):
    """How one request is reused. All values are resolved: nothing is left to default."""

    parts = _OF_REQUESTS

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...


class SegReuseConfig(_ServerKeys):
    """Options of the server: the defaults of every request, and what requests cannot change.

    Its fields are the keys of `kv_connector_extra_config` and of the file of `--segreuse-config`.
    Unknown keys, wrong types and values out of range raise pydantic's `ValidationError`; the
    classmethods raise `ConfigError`, whose text is one sentence.
    """

    request_type = RequestOptions

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...
