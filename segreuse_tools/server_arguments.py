# SPDX-License-Identifier: Apache-2.0
"""Options of `vllm serve`, where a command takes them beside its own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from segreuse_tools.model_folder import InputError
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.launch import CONNECTOR, check_config
from vllm_segreuse.options.server import ConfigError
from vllm_segreuse.plugin import register

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser


def server_parser(name: str) -> FlexibleArgumentParser:
    """vLLM's parser of a server's options.

    Args:
        name: of the command, for messages.
    """
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # vLLM 0.33
        from vllm.entrypoints.common.cli_args import make_arg_parser

    return make_arg_parser(FlexibleArgumentParser(prog=name))


def server_arguments(command: str, model: str, arguments: Sequence[str]) -> Namespace:
    """Parse `arguments` as `vllm serve` does; what it does not know ends the process.

    Args:
        command: name of ours, for messages.

    Raises:
        InputError: vLLM finds no device, and parses nothing then.
    """
    _require_device(command)
    register()  # --segreuse is known, also where the plugin is not installed
    parser = server_parser(f"vllm-segreuse {command}")
    args = parser.parse_args(["--model", model, *arguments])
    if args.model_tag is not None:
        parser.error(f"unrecognized arguments: {args.model_tag}")
    return args


def _require_device(command: str) -> None:
    """vLLM's parser makes defaults for the device that it finds: builds for GPUs may find none.

    Raises:
        InputError: it finds none.
    """
    from vllm.platforms import current_platform

    if not current_platform.device_type:
        instead = ", or add --without-engine" if command == "estimate" else ""
        raise InputError(
            "vLLM finds no device here that this build of it runs on (VLLM_LOGGING_LEVEL=DEBUG "
            f"tells why): use a machine that has one, or vLLM's CPU build{instead}"
        )


def options_of(args: Namespace, of_file: SegReuseConfig | None) -> SegReuseConfig:
    """The options of segment reuse: of the file of `--config`, or of `--kv-transfer-config`.

    `--segreuse` changes nothing: it is what our commands are about in any case.

    Raises:
        ConfigError: both are given, or start-up refuses the latter.
    """
    given = args.kv_transfer_config
    if given is None:
        return of_file or SegReuseConfig()
    if of_file is not None or args.segreuse:
        flag = "--segreuse" if of_file is None else "--config"
        raise ConfigError(
            f"{flag} and --kv-transfer-config both configure {CONNECTOR}: drop one of them"
        )
    return SegReuseConfig.from_options(check_config(given).kv_connector_extra_config)
