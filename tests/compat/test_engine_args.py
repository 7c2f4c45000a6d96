# SPDX-License-Identifier: Apache-2.0
"""What happens when an engine's configuration is made, with and without our connector in it."""

from types import SimpleNamespace
from typing import Any

import pytest
import vllm.envs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

import vllm_segreuse
from vllm_segreuse import plugin
from vllm_segreuse.compat import envs
from vllm_segreuse.config import launch
from vllm_segreuse.engine import supported
from vllm_segreuse.options.server import ConfigError


def original(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of vLLM's: a configuration that shows what it was made of."""
    return SimpleNamespace(
        kv_transfer_config=self.kv_transfer_config,
        kv_offloading_size=self.kv_offloading_size,
        args=args,
    )


def refusing_nothing(monkeypatch: pytest.MonkeyPatch, but: list[Any]) -> None:
    """Features refuse nothing, since that looks at a model, but for these modules."""
    found = launch.having
    monkeypatch.setattr(launch, "having", lambda file: but if file == "refusals" else found(file))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin has wrapped functions that do nothing else."""
    monkeypatch.delenv("VLLM_SEGREUSE_ENABLED", raising=False)
    own_parser = staticmethod(lambda parser: parser)
    own_arguments = classmethod(lambda cls, args: (cls, args.kv_transfer_config))
    monkeypatch.setattr(EngineArgs, "create_engine_config", original)
    monkeypatch.setattr(EngineArgs, "add_cli_args", own_parser)
    monkeypatch.setattr(EngineArgs, "from_cli_args", own_arguments)
    refusing_nothing(monkeypatch, [])
    plugin.register()


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(plugin, "enable", lambda: calls.append("enabled"))
    return calls


def create(
    kv_transfer_config: Any,
    kv_offloading_size: float | None = None,
    without_hybrid: bool | None = None,
) -> Any:
    """An engine's configuration, as vLLM makes it."""
    self: Any = SimpleNamespace(
        kv_transfer_config=kv_transfer_config,
        kv_offloading_size=kv_offloading_size,
        kv_offloading_backend="native",
        disable_hybrid_kv_cache_manager=without_hybrid,
    )
    return EngineArgs.create_engine_config(self, "usage context")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        vllm_segreuse.kv_transfer_config(policy="shift"),
        {"kv_connector": "SegReuseConnector", "kv_role": "kv_producer"},
    ],
)
def test_our_connector_enables_before_the_engine_exists(
    config: Any, enabled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(supported, "check_config", lambda *given: checked.extend(given))
    made = create(config)
    assert enabled == ["enabled"]
    assert checked == [made, ()]
    assert made.args == ("usage context",)
    assert made.kv_transfer_config.kv_connector_module_path == "vllm_segreuse.connector"


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("flag", "named"),
    [
        (None, "SegReuseConnector"),
        (True, "SegReuseConnector"),
        (False, "SegReuseHybridConnector"),
    ],
)
def test_windows_are_kept_only_where_that_was_asked_for(
    flag: bool | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM turns its hybrid manager on by itself beside a connector that says it can be."""
    monkeypatch.setattr(supported, "check_config", lambda *given: None)
    made = create(vllm_segreuse.kv_transfer_config(policy="shift"), without_hybrid=flag)
    connector = KVConnectorFactory.get_connector_class(made.kv_transfer_config)
    assert connector.__name__ == named
    assert supports_hma(connector) == (flag is False)
    assert launch.names_connector(made.kv_transfer_config)
    assert launch.runs_alone(made.kv_transfer_config)


@pytest.mark.usefixtures("enabled")
def test_features_refuse_before_the_engine_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    refusing = SimpleNamespace(KNOWN_EARLY=True, check=lambda *given: asked.extend(given))
    later = SimpleNamespace(check=lambda *given: pytest.fail("needs a tokenizer, or more"))
    monkeypatch.setattr(supported, "check_config", lambda *given: None)
    refusing_nothing(monkeypatch, [later, refusing])
    made = create(vllm_segreuse.kv_transfer_config(policy="shift"))
    found, options = asked
    assert found is made
    assert options.policy == "shift"


def test_the_layers_of_boundary_states_are_checked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(supported, "check_config", lambda *given: checked.extend(given))
    create(vllm_segreuse.kv_transfer_config(similarity={"w_exact": {8: 4, "all": 9}}))
    assert checked[1] == (8,)


@pytest.mark.parametrize(
    "config", [None, KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")]
)
def test_without_it_nothing_happens(config: Any, enabled: list[str]) -> None:
    assert create(config).kv_transfer_config is config
    assert enabled == []


def test_flags_are_added_to_vllms_and_resolved_before_vllm_reads_them() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--kv-transfer-config", default=None)
    args = EngineArgs.add_cli_args(parser).parse_args(["--segreuse"])

    class Others(EngineArgs):
        """Of another kind of engine."""

    seen: Any = Others.from_cli_args(args)
    assert seen[0] is Others
    assert seen[1].kv_connector == "SegReuseConnector"


def test_bad_options_are_refused_before_the_engine_exists(enabled: list[str]) -> None:
    config = vllm_segreuse.kv_transfer_config()
    config.kv_connector_extra_config["polcy"] = "shift"
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config.*'polcy'"):
        create(config)


@pytest.mark.usefixtures("enabled")
def test_kv_offloading_becomes_the_second_tier_and_leaves_our_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supported, "check_config", lambda *given: None)
    made = create(vllm_segreuse.kv_transfer_config(), kv_offloading_size=1.5)
    assert made.kv_transfer_config.kv_connector_extra_config["tier"] == {"host_gib": 1.5}
    assert made.kv_offloading_size is None, "vLLM would put its own connector in place of ours"
    assert create(None, kv_offloading_size=1.5).kv_offloading_size == 1.5


def test_our_variables_are_known_to_vllm_without_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm.envs, "environment_variables", dict(vllm.envs.environment_variables))
    monkeypatch.setenv("VLLM_SEGREUSE_ADMIN_TOKEN", "secret")
    monkeypatch.delenv("VLLM_SEGREUSE_DISABLE", raising=False)
    envs.install()
    known = vllm.envs.environment_variables
    assert known["VLLM_SEGREUSE_ADMIN_TOKEN"]() is None
    assert "VLLM_SEGREUSE_DISABLE" not in known
