# SPDX-License-Identifier: Apache-2.0
"""`vllm.engine.arg_utils.EngineArgs`: the flags, and the moment an engine's configuration is made.

vLLM lets plugins neither add flags nor see the configuration. Without `--segreuse` and without our
connector in the configuration the wrapped functions do what they did before.

Obsolete when plugins can declare flags, and check an engine's configuration before the model is
loaded. None filed that we know of.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_segreuse.compat.patching import wrap

Check = Callable[[Any], None]
"""Raises if the engine's `VllmConfig` cannot be combined with ours."""

Configure = Callable[[Any, float | None, str, bool], tuple[Any, Check] | None]
"""Given a `KVTransferConfig` (or None), the size and the backend of vLLM's own offloading, and
whether its hybrid KV cache manager was asked for: the one to go on with, without that offloading,
and a check of what becomes of it; None: it is not ours."""


class Flags(NamedTuple):
    """What is done with an engine's arguments.

    Attributes:
        add: adds flags to vLLM's argument parser.
        resolve: turns them into vLLM's own arguments, in place.
        configure: see `Configure`.
    """

    add: Callable[[Any], None]
    resolve: Callable[[argparse.Namespace], None]
    configure: Configure


def install(flags: Flags) -> None:
    """Wrap the three functions, once."""
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "add_cli_args", _add_cli_args, flags)
    wrap(EngineArgs, "from_cli_args", _from_cli_args, flags)
    wrap(EngineArgs, "create_engine_config", _create_engine_config, flags)


def _add_cli_args(original: Callable[..., Any], flags: Flags) -> Callable[..., Any]:
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        flags.add(parser)
        return parser

    return add_cli_args


def _from_cli_args(original: Callable[..., Any], flags: Flags) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        flags.resolve(args)
        return original(cls, args, *rest, **kwargs)

    return from_cli_args


def _create_engine_config(original: Callable[..., Any], flags: Flags) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = flags.configure(
            self.kv_transfer_config,
            self.kv_offloading_size,
            self.kv_offloading_backend,
            self.disable_hybrid_kv_cache_manager is False,
        )
        if found is None:
            return original(self, *args, **kwargs)
        self.kv_transfer_config, check = found
        self.kv_offloading_size = None  # or vLLM would replace the connector
        vllm_config = original(self, *args, **kwargs)
        check(vllm_config)
        return vllm_config

    return create_engine_config
