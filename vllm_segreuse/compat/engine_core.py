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
    add_method(EngineCore, "segreuse_audits", segreuse_audits)
    add_method(EngineCore, "segreuse_frozen", segreuse_frozen)
    add_method(EngineCore, "segreuse_unfreeze", segreuse_unfreeze)
    add_method(EngineCore, "segreuse_set_similarity", segreuse_set_similarity)


def segreuse_set_enabled(self: Any, enabled: bool | str) -> Any:
    """Turn reuse on or off for the requests to come, or observe them; returns the state."""
    return _side(self).set_enabled(enabled)


def segreuse_status(self: Any) -> dict[str, Any]:
    """What the status route shows."""
    return dict(_side(self).status())


def segreuse_audits(self: Any) -> dict[str, Any]:
    """What the route of audits shows."""
    return dict(_side(self).call("audits"))


def segreuse_frozen(self: Any) -> dict[str, Any]:
    """What knowledge bases need to know of the frozen pool."""
    return dict(_side(self).call("frozen"))


def segreuse_unfreeze(self: Any, entries: list[str]) -> None:
    """Forget entries of the frozen pool; unknown ones are no error."""
    _side(self).call("unfreeze", entries)


def segreuse_set_similarity(self: Any, options: dict[str, Any]) -> None:
    """Search for similar segments under other options, for the requests to come."""
    _side(self).call("set_similarity", options)


def _side(core: Any) -> Any:
    connector = core.scheduler.get_kv_connector()
    side = scheduler_side(connector)
    if side is None:
        raise RuntimeError(
            f"this engine does not run segment reuse: its KV connector is {connector!r}"
        )
    return side
