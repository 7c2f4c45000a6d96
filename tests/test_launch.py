# SPDX-License-Identifier: Apache-2.0
"""Every way in ends in the same configuration; what cannot work is refused with the reason."""

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_segreuse
from vllm_segreuse.config.launch import (
    KvOffloading,
    add_flags,
    check_config,
    names_connector,
    resolve_flags,
)
from vllm_segreuse.options.server import ConfigError

OTHER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
OURS = {
    "kv_connector": "SegReuseConnector",
    "kv_connector_module_path": "vllm_segreuse.connector",
    "kv_role": "kv_producer",
}


def parse(*arguments: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    parser.add_argument("--kv-transfer-config", type=lambda x: KVTransferConfig(**json.loads(x)))
    add_flags(parser)
    args = parser.parse_args(list(arguments))
    resolve_flags(args)
    return args


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text("policy: shift\n")
    return path


def test_offline_configuration() -> None:
    config = vllm_segreuse.kv_transfer_config(policy="shift", dense_layers=2)
    assert (config.kv_connector, config.kv_connector_module_path) == tuple(OURS.values())[:2]
    assert config.kv_connector_extra_config == {"policy": "shift", "dense_layers": 2}
    assert names_connector(config)


def test_role_keeps_vllm_from_deferring_block_frees() -> None:
    assert not vllm_segreuse.kv_transfer_config().is_kv_consumer


def test_offline_options_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match="'polcy'"):
        vllm_segreuse.kv_transfer_config(polcy="shift")


def test_flag_alone_means_all_defaults() -> None:
    config = parse("--segreuse").kv_transfer_config
    assert names_connector(config)
    assert config.kv_connector_extra_config == {}


def test_flag_with_a_file(yaml_file: Path) -> None:
    config = parse("--segreuse", "--segreuse-config", str(yaml_file)).kv_transfer_config
    assert config.kv_connector_extra_config == {"policy": "shift"}


def test_flags_are_spent_for_api_servers_started_later() -> None:
    args = parse("--segreuse")
    config = args.kv_transfer_config
    resolve_flags(args)
    assert args.kv_transfer_config is config


def test_nothing_changes_without_the_flag() -> None:
    assert parse().kv_transfer_config is None
    assert (
        parse("--kv-transfer-config", json.dumps(OTHER)).kv_transfer_config.kv_connector
        == OTHER["kv_connector"]
    )


def test_file_without_the_flag_is_refused(yaml_file: Path) -> None:
    with pytest.raises(ConfigError, match="without --segreuse"):
        parse("--segreuse-config", str(yaml_file))


def test_bad_file_is_the_parsers_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("polcy: shift\n")
    for file, complaint in ((path, "'polcy'"), (tmp_path / "none.yaml", "cannot read")):
        with pytest.raises(SystemExit):
            parse("--segreuse", "--segreuse-config", str(file))
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert "--segreuse-config" in last
        assert complaint in last


@pytest.mark.parametrize(
    ("config", "complaint"),
    [(OTHER, "it names OffloadingConnector"), (OURS, "both configure SegReuseConnector")],
)
def test_flag_beside_a_connector_is_refused(config: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse("--segreuse", "--kv-transfer-config", json.dumps(config))


def multi(*children: dict[str, str]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": list(children)},
    )


def test_multi_connector_is_refused_with_the_reason() -> None:
    config = multi(OURS, OTHER)
    assert names_connector(config)
    with pytest.raises(ConfigError, match=r"approximate.*instead of in a MultiConnector"):
        check_config(config)


def test_others_are_none_of_our_business() -> None:
    for config in (None, KVTransferConfig(), KVTransferConfig(**OTHER), multi(OTHER), OTHER):
        assert not names_connector(config)  # type: ignore[arg-type]


def test_plain_configuration_is_checked_and_completed() -> None:
    config = check_config({"kv_connector": "SegReuseConnector", "kv_role": "kv_producer"})
    assert config.kv_connector_module_path == "vllm_segreuse.connector"
    with pytest.raises(ConfigError, match="recompute_ratio=2"):
        check_config({**OURS, "kv_connector_extra_config": {"recompute_ratio": 2}})


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_other_roles_are_refused_with_the_one_to_write(role: str) -> None:
    with pytest.raises(ConfigError, match=rf'kv_role={role}: .* write "kv_role": "kv_producer"'):
        check_config(OURS | {"kv_role": role})


def test_rust_front_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND"):
        check_config(OURS)


SIZE = KvOffloading(2.0, "native")


def tier_of(offloading: KvOffloading, **options: Any) -> Any:
    config = check_config(OURS | {"kv_connector_extra_config": options}, offloading=offloading)
    return config.kv_connector_extra_config["tier"]


def test_offloaded_bytes_become_the_second_tiers() -> None:
    assert tier_of(SIZE) == {"host_gib": 2.0}
    assert tier_of(SIZE, tier={"min_run_tokens": 9}) == {"min_run_tokens": 9, "host_gib": 2.0}
    assert tier_of(SIZE, tier={"host_gib": 2}) == {"host_gib": 2.0}
    options = {"tier": {"wait_ms": 1}}
    check_config(OURS | {"kv_connector_extra_config": options}, offloading=SIZE)
    assert options == {"tier": {"wait_ms": 1}}, "what the caller gave is as it was"


@pytest.mark.parametrize(
    ("offloading", "options", "named"),
    [
        (KvOffloading(2.0, "lmcache"), {}, "drop --kv-offloading-backend lmcache"),
        (KvOffloading(0.0, "native"), {}, "--kv-offloading-size 0 holds nothing"),
        (KvOffloading(math.nan, "native"), {}, "--kv-offloading-size nan holds nothing"),
        (SIZE, {"tier": None}, "tier: null off"),
        (SIZE, {"tier": {"host_gib": 3}}, "tier.host_gib is 3: drop one"),
        (SIZE, {"tier": {"admission": "knowledge"}}, "tier.admission is knowledge: drop one"),
        (SIZE, {"tier": {"codec": "int8"}}, "tier.codec=raw, and tier.codec is int8: drop one"),
        (SIZE, {"tier": {"host_gb": 2}}, "host_gb"),
        (SIZE, {"tier": 5}, "tier"),
    ],
)
def test_what_contradicts_offloading_is_refused_by_name(
    offloading: KvOffloading, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        tier_of(offloading, **options)


def test_vllms_other_offloading_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    with pytest.raises(ConfigError, match="unset VLLM_USE_SIMPLE_KV_OFFLOAD"):
        tier_of(SIZE)
