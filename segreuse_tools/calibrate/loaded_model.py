# SPDX-License-Identifier: Apache-2.0
"""The engine that settings are tried on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from segreuse_tools.calibrate.trials import LOGPROBS
from segreuse_tools.engine_loading import refused_by_vllm
from vllm_segreuse.options.server import ConfigError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

ALONE: Mapping[str, Any] = {"max_provenance_depth": 0, "min_reused_tokens": 1}
"""Only exact KV donates: what one setting leaves behind must not help the next."""


def arguments_of(model: str, arguments: Sequence[str]) -> EngineArgs:
    """Options of vLLM's engine, as on the command line.

    Raises:
        ConfigError: they have options of segment reuse.
        InputError: there is no such model.
    """
    from vllm.engine.arg_utils import EngineArgs

    from segreuse_tools.server_arguments import server_arguments

    args = server_arguments("calibrate", model, arguments)
    if args.kv_transfer_config is not None:
        raise ConfigError(
            "--kv-transfer-config needs --similarity: a policy is chosen without other options"
        )
    with _refused(model):
        return EngineArgs.from_cli_args(args)


def start(named: EngineArgs, options: Mapping[str, Any] = ALONE) -> Any:
    """A `vllm.LLM` with segment reuse.

    Args:
        named: options of vLLM's engine.
        options: ours, of the server.

    Raises:
        InputError: vLLM finds no such model, or does not take it or the options.
    """
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from vllm_segreuse import kv_transfer_config

    given = {field.name: getattr(named, field.name) for field in fields(EngineArgs)}
    given["max_logprobs"] = max(LOGPROBS, given["max_logprobs"])
    given["kv_transfer_config"] = kv_transfer_config(**options)
    with _refused(named.model):
        return LLM(**given)


@contextmanager
def _refused(model: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise refused_by_vllm(model, error) from None
