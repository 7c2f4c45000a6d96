# SPDX-License-Identifier: Apache-2.0
"""The other ways in, the environment's kill switch, and a server where reuse is not enabled."""

import json
from typing import Any

import pytest

from bench.shapes import make_model, passages
from tests.e2e.server import Server, failed_start

pytestmark = pytest.mark.slow(
    "other ways to start a server", instead="e2e/test_http_api test_plugin"
)

TOKEN = "an admin token of this test"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
SWITCH = "/plugins/segreuse/v1"
DOCUMENTS = [text[:2500] for _, text in passages() if len(text) > 2500][:2]


def report(server: Server, preamble: str, **options: Any) -> Any:
    """The report on the two documents behind `preamble`, or None if there is none."""
    prompt = preamble + "".join(DOCUMENTS)
    body = {"model": "m", "prompt": prompt, "max_tokens": 2, "extra_keys": "docs", **options}
    answer = server.post("/v1/completions", body).raise_for_status().json()
    return (answer["kv_transfer_params"] or {}).get("segreuse")


def test_stock_server_with_kv_transfer_config_switched_off_at_start() -> None:
    config = {
        "kv_connector": "SegReuseConnector",
        "kv_connector_module_path": "vllm_segreuse.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"policy": "shift"},
    }
    with Server(
        make_model("llama"),
        ["--kv-transfer-config", json.dumps(config)],
        {"VLLM_SEGREUSE_DISABLE": "1", "VLLM_SEGREUSE_ADMIN_TOKEN": TOKEN},
        stock=True,
    ) as server:
        assert "Unknown vLLM environment variable detected: VLLM_SEGREUSE" not in server.log_text()
        assert server.get(f"{SWITCH}/status", headers=ADMIN).json()["enabled"] is False
        for preamble in ("One. ", "Two. "):
            off = report(server, preamble)
            assert (off["reused_tokens"], off["policy"]) == (0, "shift")
            assert off["bypass_reason"]
        server.post(f"{SWITCH}/enable", headers=ADMIN).raise_for_status()
        assert report(server, "Three. ")["reused_tokens"] > 0


def test_another_offloading_beside_it_is_refused_in_one_sentence() -> None:
    flags = ["--kv-offloading-size", "1", "--kv-offloading-backend", "lmcache"]
    log = failed_start(make_model("llama"), flags)
    last = log.strip().splitlines()[-1]
    assert last.startswith("vllm-segreuse: segment reuse cannot run beside another KV connector")
    assert "--kv-offloading-size" in last
    assert "Traceback" not in log


def test_33_server_without_the_flag_is_vllms_own() -> None:
    with Server(
        make_model("llama"), env={"VLLM_SEGREUSE_ADMIN_TOKEN": TOKEN}, stock=True
    ) as server:
        for keys in ("docs", 5, ["k"] * 100):
            assert report(server, "One. ", extra_keys=keys) is None
        assert report(server, "Two. ", vllm_xargs={"segreuse_polcy": 1}) is None
        assert server.get(f"{SWITCH}/status", headers=ADMIN).status_code == 404
        assert "segreuse" not in server.get("/metrics").text.replace(SWITCH, "")
