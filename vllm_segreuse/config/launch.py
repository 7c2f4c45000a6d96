# SPDX-License-Identifier: Apache-2.0
"""Turning segment reuse on: the flags, `kv_transfer_config`, and what it can be combined with.

All ways in end in one `KVTransferConfig` that names our connector. Its role is `kv_producer`:
vLLM's scheduler takes consumers and `kv_both` for connectors that fill blocks behind its back, and
then defers the freeing of blocks and accepts multimodal requests without their tensors
(`v1/core/sched/scheduler.py`, `config/vllm.py`). Ours copies on the device, in stream order.
A feature may have a class of its own in the place of ours (`launch.py` in its folder).
"""

import argparse
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.engine import supported
from vllm_segreuse.engine.version import require_supported_vllm
from vllm_segreuse.features import having
from vllm_segreuse.options.server import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

CONNECTOR = "SegReuseConnector"
CONNECTOR_MODULE = "vllm_segreuse.connector"
HYBRID_CONNECTOR = "SegReuseHybridConnector"
"""Of an engine whose hybrid KV cache manager was asked for (`segreuse_extras/windows/`)."""

KV_ROLE = "kv_producer"

_ALONE = (
    "segment reuse cannot run beside another KV connector: the other one would store reused KV, "
    "which is approximate, under exact names (a transfer connector is hosted: option beside)"
)


def kv_transfer_config(options: Mapping[str, Any]) -> "KVTransferConfig":
    """`options` (fields of `SegReuseConfig`), checked, as vLLM's configuration of a connector.

    Raises:
        ConfigError: an option is unknown or out of range.
        UnsupportedVersionError: this vLLM is not a supported one.
    """
    require_supported_vllm()
    from vllm.config import KVTransferConfig

    checked = SegReuseConfig.from_options(options)
    roles = [role for module in having("launch") if (role := module.role_of(checked))]
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role=roles[0] if roles else KV_ROLE,
        kv_connector_extra_config=dict(options),
    )


def names_connector(config: "KVTransferConfig | Mapping[str, Any] | None") -> bool:
    """Whether `config` names our connector, directly or inside a MultiConnector."""
    if config is None:
        return False
    found = _as_config(config)
    return any(found.has_connector(name) for name in _connectors())


@cache
def _connectors() -> tuple[str, ...]:
    """Names of our connector, and of those that features have in its place."""
    return CONNECTOR, HYBRID_CONNECTOR, *(module.CONNECTOR for module in having("launch"))


def runs_alone(config: "KVTransferConfig | None") -> bool:
    """Whether `config` names our connector itself, and none of a feature's."""
    return config is not None and config.kv_connector in (CONNECTOR, HYBRID_CONNECTOR)


def _as_config(config: "KVTransferConfig | Mapping[str, Any]") -> "KVTransferConfig":
    """`EngineArgs` takes plain mappings too, which vLLM converts later."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**config) if isinstance(config, Mapping) else config


def cuts_of(config: "KVTransferConfig | None") -> tuple[int, ...]:
    """Layers whose inputs an engine of this configuration keeps (`SimilarityOptions.cuts`)."""
    if config is None or not names_connector(config):
        return ()
    return SegReuseConfig.from_options(config.kv_connector_extra_config).cuts


def check_engine(vllm_config: "VllmConfig", transfer: "KVTransferConfig") -> None:
    """Refuse an engine's configuration before a model is loaded, where that is enough to know it.
    Features say so of what they refuse (`KNOWN_EARLY`); a connector refuses all of it once more.

    Args:
        vllm_config: the engine's.
        transfer: as `check_config` has returned it.

    Raises:
        RefusedError: naming the first reason and the way out.
    """
    options = SegReuseConfig.from_options(transfer.kv_connector_extra_config)
    supported.check_config(vllm_config, options.cuts)
    for module in having("refusals"):
        if getattr(module, "KNOWN_EARLY", False):
            module.check(vllm_config, options)


class KvOffloading(NamedTuple):
    """What vLLM's flags say of offloading.

    Attributes:
        size_gib: `--kv-offloading-size`, of all ranks of an engine together.
        backend: `--kv-offloading-backend`.
    """

    size_gib: float
    backend: str


def check_config(
    config: "KVTransferConfig | Mapping[str, Any]",
    *,
    offloading: KvOffloading | None = None,
    keeps_windows: bool = False,
) -> "KVTransferConfig":
    """Checks a configuration that names our connector, before vLLM builds on it.

    Args:
        config: the configuration.
        offloading: what vLLM is to offload; the second tier does it instead, since vLLM's own
            offloading would replace the connector.
        keeps_windows: whether vLLM's hybrid KV cache manager was asked for.

    Returns:
        The configuration to go on with.

    Raises:
        ConfigError: a bad option or role, another connector beside ours, or a front end we cannot
            reach.
    """
    config = _as_config(config)
    if config.kv_connector not in _connectors():
        raise ConfigError(f"{_ALONE}; name {CONNECTOR} alone instead of in a {config.kv_connector}")
    if offloading is not None:
        config.kv_connector_extra_config = _offloading_to_tier(
            config.kv_connector_extra_config, offloading
        )
    checked = SegReuseConfig.from_options(
        config.kv_connector_extra_config, source="kv_connector_extra_config"
    )
    if not any(module.completed(config, checked) for module in having("launch")):
        if config.kv_role != KV_ROLE:
            raise ConfigError(
                f"kv_role={config.kv_role}: with it vLLM frees blocks late, and cannot reset the "
                f'cache while requests run: write "kv_role": "{KV_ROLE}" in --kv-transfer-config'
            )
        config.kv_connector = CONNECTOR
        config.kv_connector_module_path = config.kv_connector_module_path or CONNECTOR_MODULE
    if keeps_windows:
        if config.kv_connector not in (CONNECTOR, HYBRID_CONNECTOR):
            raise ConfigError(
                f"{config.kv_connector} cannot be combined with "
                "--no-disable-hybrid-kv-cache-manager: drop the flag, or what that connector is "
                "for (option beside)"
            )
        config.kv_connector = HYBRID_CONNECTOR

    import vllm.envs

    if vllm.envs.VLLM_USE_RUST_FRONTEND:
        raise ConfigError(
            "segment reuse checks requests in the Python API server: unset VLLM_USE_RUST_FRONTEND"
        )
    return config


def _offloading_to_tier(options: Mapping[str, Any], flags: KvOffloading) -> dict[str, Any]:
    """The server's options with what is to be offloaded as the second tier's host memory.

    vLLM's flag counts the bytes of all tensor-parallel ranks together, and so does `tier.host_gib`.

    Raises:
        ConfigError: they contradict each other, or the flags ask for what the tier does not do.
    """
    import vllm.envs

    SegReuseConfig.from_options(options, source="kv_connector_extra_config")
    flag = f"--kv-offloading-size {flags.size_gib:g}"
    if flags.backend != "native":
        raise ConfigError(
            f"{_ALONE}; drop --kv-offloading-backend {flags.backend}: with {flag} alone, segment "
            "reuse offloads itself"
        )
    if vllm.envs.VLLM_USE_SIMPLE_KV_OFFLOAD:
        raise ConfigError(f"{_ALONE}; unset VLLM_USE_SIMPLE_KV_OFFLOAD")
    if not flags.size_gib > 0:  # nor a number at all
        raise ConfigError(f"{flag} holds nothing: give a size above 0, or drop it")
    tier = options.get("tier", {})
    if tier is None:
        raise ConfigError(f"{flag} turns the second tier on, and tier: null off: drop one of them")
    meant = {"host_gib": flags.size_gib, "admission": "evicted", "codec": "raw"}
    for option, wanted in meant.items():
        if tier.get(option, wanted) != wanted:
            raise ConfigError(
                f"{flag} means tier.{option}={wanted}, and tier.{option} is {tier[option]}: drop "
                "one of them"
            )
    return {**options, "tier": {**tier, "host_gib": flags.size_gib}}


def add_flags(parser: Any) -> None:
    """Adds `--segreuse` and `--segreuse-config` to vLLM's argument parser."""
    group = parser.add_argument_group(
        "SegReuse", "Reuse the KV cache of segments at any position (vllm-segreuse)."
    )
    group.add_argument(
        "--segreuse",
        action="store_true",
        default=False,
        help="Reuse the KV of any segment of a prompt, for requests that name extra_keys.",
    )
    group.add_argument(
        "--segreuse-config",
        type=_config_file,
        default=None,
        metavar="FILE.yaml",
        help="Options of --segreuse; see configs/ of vllm-segreuse. All have defaults.",
    )


def _config_file(path: str) -> str:
    """Checks the file while arguments are parsed, so that the parser can say what is wrong."""
    try:
        SegReuseConfig.from_yaml(path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def resolve_flags(args: argparse.Namespace) -> None:
    """Turns `--segreuse` into the `--kv-transfer-config` that it stands for.

    `args` itself changes, and the flags in it are spent: further API servers are started with these
    `args`, and parse nothing themselves.

    Raises:
        ConfigError: `--segreuse-config` without `--segreuse`, or another KV connector beside it.
    """
    path = getattr(args, "segreuse_config", None)
    if not getattr(args, "segreuse", False):
        if path is not None:
            raise ConfigError(f"--segreuse-config {path} has no effect without --segreuse: add it")
        return
    given = getattr(args, "kv_transfer_config", None)
    if given is not None:
        named = getattr(given, "kv_connector", None)
        if named != CONNECTOR:
            raise ConfigError(f"{_ALONE}; drop --kv-transfer-config (it names {named})")
        raise ConfigError(
            f"--segreuse and --kv-transfer-config both configure {CONNECTOR}: drop one of them"
        )
    options = SegReuseConfig.from_yaml(path)
    args.kv_transfer_config = kv_transfer_config(options.model_dump(exclude_unset=True))
    args.segreuse, args.segreuse_config = False, None
