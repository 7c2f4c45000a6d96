# SPDX-License-Identifier: Apache-2.0
"""Options of a transfer connector beside ours: the block `beside` of the server's options."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from vllm_segreuse.options import values
from vllm_segreuse.options.parts import ServerPart
from vllm_segreuse.options.values import is_int, only_known, short_repr

NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Transfer connectors of vLLM whose handshake refuses an engine without segment reuse."""

NAMED = (
    *("LMCacheConnectorV1", "LMCacheMPConnector", "MooncakeStoreConnector", "HF3FSKVConnector"),
    *("OffloadingConnector", "SimpleCPUOffloadConnector", "FlexKVConnectorV1", "ExampleConnector"),
)
"""Connectors of vLLM that store KV by the hash of its tokens, for whoever has the same tokens."""

OTHERS = (
    *("MultiConnector", "HiSparseConnector", "DecodeBenchConnector"),
    *("ExampleHiddenStatesConnector", "SegReuseConnector", "SegReuseTransferConnector"),
)
"""Connectors that hand no request's KV to another engine by themselves."""


def refusal(name: str) -> str | None:
    """Why a connector of this name cannot be hosted; None: nothing is known against it."""
    if name in NAMED:
        return (
            f"{name} stores KV by the hash of its tokens: it would give reused KV, which is "
            "approximate, to other requests as exact; use the second tier (tier) instead"
        )
    if name in OTHERS:
        return f"{name} hands no KV of one request to another engine; use one of {', '.join(NIXL)}"
    return None


def _name(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise ValueError("must be the name of a connector")
    if reason := refusal(value):
        raise ValueError(f"cannot be hosted: {reason}")
    return value


def _one_of(*names: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if value is not None and value not in names:
            raise ValueError(f"must be {', '.join(names)} or null")
        return value

    return BeforeValidator(check)


def _text(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError("must be a text that is not empty, or null")
    return value


def _port(value: Any) -> Any:
    if value is not None and not (is_int(value) and 0 < value < 65_536):
        raise ValueError("must be a port from 1 to 65535, or null")
    return value


def _mapping(value: Any) -> Any:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("must be a mapping of options")
    return value


class BesideOptions(BaseModel):
    """A transfer connector that segment reuse hosts, as `--kv-transfer-config` names one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_connector: Annotated[str, BeforeValidator(_name)] = ""
    """Its class: `NixlConnector`, `NixlPullConnector`, `NixlPushConnector`, or another that is
    declared `name_free`."""

    kv_connector_module_path: Annotated[str | None, BeforeValidator(_text)] = None
    """Module of its class; None: it is one of vLLM's own."""

    kv_role: Annotated[
        Literal["kv_producer", "kv_consumer", "kv_both"] | None,
        _one_of("kv_producer", "kv_consumer", "kv_both"),
    ] = None
    """`kv_producer` on prefill engines, `kv_consumer` on decode engines; None: that of
    `--kv-transfer-config`, which is `kv_producer` with `--segreuse`."""

    kv_connector_extra_config: Annotated[dict[str, Any], BeforeValidator(_mapping)] = {}
    """Its own options."""

    kv_buffer_device: Annotated[str | None, BeforeValidator(_text)] = None
    """Where it buffers KV; None: vLLM's default."""

    kv_port: Annotated[int | None, BeforeValidator(_port)] = None
    """Its port; None: vLLM's default."""

    kv_load_failure_policy: Annotated[
        Literal["recompute", "fail"] | None, _one_of("recompute", "fail")
    ] = None
    """What becomes of a request whose KV does not arrive; None: vLLM's default."""

    name_free: Annotated[bool, BeforeValidator(values.switch)] = False
    """Declares of a connector other than NIXL's that it hands the blocks of a request that has
    ended to one request of another engine and stores nothing by content, and that all engines
    which it connects run segment reuse: nothing else refuses an engine without it."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        return only_known(data, cls.model_fields, ", or null")

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if not self.kv_connector:
            raise ValueError("needs kv_connector, the name of the connector")
        is_nixl = self.kv_connector in NIXL and self.kv_connector_module_path is None
        if not is_nixl and not self.name_free:
            raise ValueError(
                f"names {self.kv_connector}, of which it is not known how it stores KV: use one of "
                f"{', '.join(NIXL)}, or declare name_free: true if that holds"
            )
        enforced = self.kv_connector_extra_config.get("enforce_handshake_compat", True)
        if enforced is not True:
            raise ValueError(
                f"has enforce_handshake_compat={short_repr(enforced)}: engines without segment "
                "reuse would be accepted, and give approximate KV exact names; remove it"
            )
        return self


class TransferServer(ServerPart):
    """What the operator sets of disaggregated prefill."""

    beside: BesideOptions | None = None
    """A transfer connector that hands KV from prefill to decode engines (`kv_connector`, `kv_role`
    and the other keys of `--kv-transfer-config`); None: no KV leaves the engine. See the page on
    disaggregated prefill."""
