# SPDX-License-Identifier: Apache-2.0
"""`vllm.v1.engine.core.EngineCore`: calls into the scheduler's process, between two steps.

API servers call methods of `EngineCore` by name between two steps (`call_utility_async`,
vllm-project/vllm#13060); plugins have no other way to the scheduler: `collective_rpc` reaches
workers only.

Obsolete when methods of the scheduler's connector can be called from the API server. None filed
that we know of; endpoint plugins (vllm-project/vllm#46565) leave the engine's side to patches.
"""

from typing import Any

from vllm_segreuse.compat.patching import add_method
from vllm_segreuse.compat.scheduler import scheduler_side


def install() -> None:
    """Give `EngineCore` the methods, once."""
    from vllm.v1.engine.core import EngineCore

    add_method(EngineCore, "segreuse_set_enabled", segreuse_set_enabled)
    add_method(EngineCore, "segreuse_status", segreuse_status)
    add_method(EngineCore, "segreuse_call", segreuse_call)


def segreuse_set_enabled(self: Any, enabled: bool | str) -> Any:
    """Turn reuse on or off for the requests to come, or observe them; returns the state."""
    return _side(self).set_enabled(enabled)


def segreuse_status(self: Any) -> dict[str, Any]:
    """What the status route shows."""
    return dict(_side(self).status())


def segreuse_call(self: Any, name: str, *args: Any) -> Any:
    """Ask a feature what it offers by this name."""
    return _side(self).call(name, *args)


def _side(core: Any) -> Any:
    connector = core.scheduler.get_kv_connector()
    side = scheduler_side(connector)
    if side is None:
        raise RuntimeError(
            f"this engine does not run segment reuse: its KV connector is {connector!r}"
        )
    return side
