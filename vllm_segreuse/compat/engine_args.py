# SPDX-License-Identifier: Apache-2.0
"""`vllm.engine.arg_utils.EngineArgs`: the flags, and the moment an engine's configuration is made.

vLLM lets plugins neither add flags nor see the configuration. Without `--segreuse` and without our
connector in the configuration the wrapped functions do what they did before.

Obsolete when plugins can declare flags, and check an engine's configuration before the model is
loaded. None filed that we know of.
"""

import argparse
from collections.abc import Callable
from typing import Any

from vllm_segreuse import compat, supported
from vllm_segreuse.compat.patching import wrap


def install() -> None:
    """Wrap the three functions, once."""
    from vllm.engine.arg_utils import EngineArgs

    wrap(EngineArgs, "add_cli_args", _add_cli_args)
    wrap(EngineArgs, "from_cli_args", _from_cli_args)
    wrap(EngineArgs, "create_engine_config", _create_engine_config)


def _add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_segreuse.launch import add_flags

        parser = original(parser, *args, **kwargs)
        add_flags(parser)
        return parser

    return add_cli_args


def _from_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        from vllm_segreuse.launch import resolve_flags

        resolve_flags(args)
        return original(cls, args, *rest, **kwargs)

    return from_cli_args


def _create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm_segreuse.launch import KvOffloading, check_config, cuts_of, names_connector

        if not names_connector(self.kv_transfer_config):
            return original(self, *args, **kwargs)
        compat.enable()
        size = self.kv_offloading_size
        offloading = None if size is None else KvOffloading(size, self.kv_offloading_backend)
        self.kv_transfer_config = check_config(self.kv_transfer_config, offloading=offloading)
        self.kv_offloading_size = None  # or vLLM would replace the connector
        vllm_config = original(self, *args, **kwargs)
        supported.check_config(vllm_config, cuts_of(self.kv_transfer_config))
        return vllm_config

    return create_engine_config
