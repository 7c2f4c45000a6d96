# SPDX-License-Identifier: Apache-2.0
"""Which connectors may stand beside ours, and with what; all else is refused with the way out."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from segreuse_extras.transfer import refusals
from segreuse_extras.transfer.hosted import is_hosted, transfer_config
from segreuse_extras.transfer.options import NAMED, NIXL, OTHERS, TransferServer
from vllm_segreuse import kv_transfer_config
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.launch import check_config, names_connector, runs_alone
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.options.server import ConfigError

NIXL_BESIDE = {"kv_connector": "NixlConnector"}
STAND_IN = {
    "kv_connector": "FolderConnector",
    "kv_connector_module_path": "tests.e2e.folder_connector",
    "name_free": True,
}


def refused(beside: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        SegReuseConfig.from_options({"beside": beside})
    return str(caught.value)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("declared", [False, True])
def test_stores_by_content_are_refused_by_name(name: str, declared: bool) -> None:
    text = refused({"kv_connector": name, "name_free": declared})
    assert f"{name} stores KV by the hash of its tokens" in text
    assert "second tier" in text


@pytest.mark.parametrize("name", OTHERS)
def test_what_hands_no_request_over_is_refused(name: str) -> None:
    assert f"{name} hands no KV" in refused({"kv_connector": name, "name_free": True})


def test_every_connector_of_vllms_is_known_or_has_to_be_declared() -> None:
    """A new store of vLLM's would have to be declared first; this shows which there are."""
    known = {*NAMED, *NIXL, *OTHERS}
    ours = {name for name in OTHERS if name.startswith("SegReuse")}
    registered = set(KVConnectorFactory._registry)
    assert known - ours <= registered
    assert registered - known == {"MooncakeConnector", "MoRIIOConnector"}
    for name in registered - known:
        assert "declare name_free: true" in refused({"kv_connector": name})
        SegReuseConfig.from_options({"beside": {"kv_connector": name, "name_free": True}})


@pytest.mark.parametrize("name", NIXL)
def test_nixl_needs_no_declaration(name: str) -> None:
    config = SegReuseConfig.from_options({"beside": {"kv_connector": name}})
    assert TransferServer.of(config).beside is not None


def test_a_class_of_that_name_from_elsewhere_does() -> None:
    text = refused({"kv_connector": "NixlConnector", "kv_connector_module_path": "elsewhere"})
    assert "declare name_free: true" in text


@pytest.mark.parametrize("enforced", [False, 0, "false", None])
def test_a_handshake_with_engines_without_reuse_is_refused(enforced: Any) -> None:
    extra = {"enforce_handshake_compat": enforced}
    text = refused(NIXL_BESIDE | {"kv_connector_extra_config": extra})
    assert "enforce_handshake_compat" in text
    assert "remove it" in text


@pytest.mark.parametrize(
    ("beside", "complaint"),
    [
        ({}, "needs kv_connector"),
        ("NixlConnector", "must be a mapping of options, or null"),
        (NIXL_BESIDE | {"connector": 1}, "unknown option 'connector'"),
        (NIXL_BESIDE | {"kv_role": "both"}, "kv_role='both' must be kv_producer"),
        (NIXL_BESIDE | {"kv_port": 0}, "kv_port=0 must be a port"),
        (NIXL_BESIDE | {"kv_port": True}, "kv_port=True must be a port"),
        (NIXL_BESIDE | {"kv_connector_extra_config": []}, "must be a mapping"),
        (NIXL_BESIDE | {"kv_load_failure_policy": "retry"}, "must be recompute, fail or null"),
        (NIXL_BESIDE | {"name_free": 1}, "name_free=1 must be true or false"),
        (NIXL_BESIDE | {"kv_buffer_device": ""}, "must be a text"),
        ({"kv_connector": 3}, "must be the name of a connector"),
    ],
)
def test_bad_values_are_named(beside: Any, complaint: str) -> None:
    assert complaint in refused(beside)


# The configuration of the engine.


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_the_role_is_that_of_the_hosted_connector(role: str) -> None:
    config = kv_transfer_config(beside=STAND_IN | {"kv_role": role})
    assert config.kv_role == role
    checked = check_config(config)
    assert checked.kv_connector == "SegReuseTransferConnector"
    assert checked.kv_connector_module_path == "segreuse_extras.transfer.connector"
    assert names_connector(checked)
    assert check_config(checked) is checked
    assert not runs_alone(checked)
    assert runs_alone(check_config(kv_transfer_config()))


def test_prefill_is_the_role_where_none_is_given() -> None:
    assert kv_transfer_config(beside=STAND_IN).kv_role == "kv_producer"


def test_two_roles_are_refused() -> None:
    beside = STAND_IN | {"kv_role": "kv_producer"}
    given = {
        "kv_connector": "SegReuseConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"beside": beside},
    }
    with pytest.raises(ConfigError, match="give both the same"):
        check_config(given)
    del beside["kv_role"]
    assert check_config(given).kv_role == "kv_consumer"


def test_the_policy_of_failed_loads_is_the_engines() -> None:
    config = kv_transfer_config(beside=STAND_IN | {"kv_load_failure_policy": "recompute"})
    assert check_config(config).kv_load_failure_policy == "recompute"
    assert check_config(kv_transfer_config(beside=STAND_IN)).kv_load_failure_policy == "fail"


def test_the_hosted_connector_has_options_of_its_own() -> None:
    beside = STAND_IN | {"kv_connector_extra_config": {"folder": "f"}, "kv_port": 5}
    outer = check_config(kv_transfer_config(beside=beside, policy="shift"))
    found = TransferServer.of(SegReuseConfig.from_options(outer.kv_connector_extra_config)).beside
    assert found is not None
    inner = transfer_config(found, outer)
    assert inner.kv_connector == "FolderConnector"
    assert inner.kv_connector_extra_config["folder"] == "f"
    assert "policy" not in inner.kv_connector_extra_config
    assert (inner.kv_port, inner.engine_id) == (5, outer.engine_id)
    assert is_hosted(SimpleNamespace(kv_transfer_config=inner))  # type: ignore[arg-type]
    for other in (outer, KVTransferConfig(), None):
        assert not is_hosted(SimpleNamespace(kv_transfer_config=other))  # type: ignore[arg-type]


class ExampleConnector(KVConnectorBase_V1):
    """Has the name of a store."""


class RenamedStore(ExampleConnector):
    """Is one under another name."""


class LayerByLayer(KVConnectorBase_V1):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True


class NoConnector:
    def __init__(self, kv_cache_config: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("RenamedStore", "stores KV by the hash"),
        ("LayerByLayer", "layer by layer"),
        ("Missing", "cannot be loaded"),
        ("NoConnector", "is no KVConnectorBase_V1"),
    ],
)
def test_a_declared_class_is_looked_at(name: str, complaint: str) -> None:
    beside = STAND_IN | {"kv_connector": name, "kv_connector_module_path": __name__}
    with pytest.raises(ConfigError, match=complaint):
        check_config(kv_transfer_config(beside=beside))


# What an engine cannot have beside one.


def vllm_config(role: str, **given: Any) -> Any:
    model = SimpleNamespace(
        is_multimodal_model=given.get("images", False),
        enable_sleep_mode=given.get("sleeps", False),
        hf_config=SimpleNamespace(),
    )
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector="c", kv_role=role),
        model_config=model,
        scheduler_config=SimpleNamespace(policy=given.get("policy", "fcfs")),
        max_concurrent_batches=given.get("batches", 1),
    )


@pytest.fixture(autouse=True)
def _layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "sees_documents_alone", lambda model: hasattr(model, "layout"))


RECEIVERS = ["kv_consumer", "kv_both"]
TIER = {"tier": {"host_gib": 1}}


def options(**others: Any) -> SegReuseConfig:
    return SegReuseConfig.from_options({"beside": NIXL_BESIDE, "spread_tokens": 0, **others})


@pytest.mark.parametrize("role", RECEIVERS)
@pytest.mark.parametrize(
    ("engine", "others", "complaint"),
    [
        ({}, TIER, "remove tier"),
        ({}, {"spread_tokens": None}, "set spread_tokens: 0"),
        ({}, {"spread_tokens": 64}, "set spread_tokens: 0"),
        ({"policy": "priority", "batches": 2}, {}, "--no-async-scheduling"),
        ({"images": True}, {}, "a model of text"),
    ],
)
def test_what_others_may_overwrite_is_refused_where_they_write(
    role: str, engine: dict[str, Any], others: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(RefusedError, match=complaint):
        refusals.check(vllm_config(role, **engine), options(**others))
    refusals.check(vllm_config("kv_producer", **engine), options(**others))
    without = SegReuseConfig.from_options(others)
    refusals.check(vllm_config("kv_producer", **engine), without)


@pytest.mark.parametrize("role", RECEIVERS)
def test_what_they_cannot_overwrite_is_not(role: str) -> None:
    refusals.check(vllm_config(role, batches=2), options())
    refusals.check(vllm_config(role, policy="priority"), options())


@pytest.mark.parametrize("role", ["kv_producer", *RECEIVERS])
def test_what_no_engine_can_have_is_refused(role: str) -> None:
    if hasattr(KVConnectorBase_V1, "restore_kv_caches"):
        refusals.check(vllm_config(role, sleeps=True), options())
    else:
        with pytest.raises(RefusedError, match=r"--enable-sleep-mode in vLLM 0\.32"):
            refusals.check(vllm_config(role, sleeps=True), options())
    config = vllm_config(role)
    config.model_config.layout = "isolated"
    with pytest.raises(RefusedError, match="documents computed alone"):
        refusals.check(config, options())
    refusals.check(config, SegReuseConfig())
