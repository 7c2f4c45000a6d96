# SPDX-License-Identifier: Apache-2.0
"""The engine that settings are tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm_segreuse.calibrate.measure import LOGPROBS

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

ALONE: Mapping[str, Any] = {"max_provenance_depth": 0, "min_reused_tokens": 1}
"""Only exact KV donates: what one setting leaves behind must not help the next."""


def arguments_of(model: str, arguments: Sequence[str]) -> EngineArgs:
    """Options of vLLM's engine, as on the command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-segreuse calibrate"))
    return EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))


def start(named: EngineArgs, options: Mapping[str, Any] = ALONE) -> Any:
    """A `vllm.LLM` with segment reuse.

    Args:
        named: options of vLLM's engine.
        options: ours, of the server.
    """
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from vllm_segreuse import kv_transfer_config

    given = {field.name: getattr(named, field.name) for field in fields(EngineArgs)}
    given["max_logprobs"] = max(LOGPROBS, given["max_logprobs"])
    given["kv_transfer_config"] = kv_transfer_config(**options)
    return LLM(**given)
