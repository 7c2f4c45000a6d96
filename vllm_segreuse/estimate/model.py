# SPDX-License-Identifier: Apache-2.0
"""The model that a log is estimated for: what `serve` would make of its folder, without weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # vLLM 0.33
    from vllm.entrypoints.common.cli_args import make_arg_parser

from vllm_segreuse.doctor.diagnosis import of_one_rank, one_line
from vllm_segreuse.doctor.layers import UnexaminedError, examine
from vllm_segreuse.doctor.memory import memory_of
from vllm_segreuse.doctor.reading import InputError, find_model, read_config
from vllm_segreuse.launch import kv_transfer_config
from vllm_segreuse.plan import ModelLayers
from vllm_segreuse.plugin import register
from vllm_segreuse.supported import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Model:
    """What a replay needs of it.

    Attributes:
        vllm_config: of the engine, with vLLM's plain scheduler.
        args: of the server.
        layers: as programs see them.
        kv_bytes: of one token at all layers, on one device; None: they could not be examined.
    """

    vllm_config: VllmConfig
    args: Namespace
    layers: ModelLayers
    kv_bytes: int | None


def load_model(model: str, arguments: Sequence[str]) -> Model:
    """Read a model's folder.

    Args:
        model: a folder, or a name in the local cache.
        arguments: of vLLM's server.

    Raises:
        InputError: there is no such model, or vLLM does not take it or the arguments.
        RefusedError: segment reuse refuses it.
    """
    register()
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm-segreuse estimate"))
    args = parser.parse_args(["--model", model, *arguments])
    folder = find_model(model, args.revision)
    read_config(folder)
    args.model = str(folder)
    engine_args = replace(
        AsyncEngineArgs.from_cli_args(args),
        kv_transfer_config=kv_transfer_config({}),
        async_scheduling=False,
    )
    try:
        vllm_config = engine_args.create_engine_config()
    except RefusedError:
        raise
    except Exception as error:
        raise InputError(f"vLLM refuses {model}: {one_line(error)}") from None
    try:
        examined = examine(of_one_rank(engine_args, vllm_config))
    except UnexaminedError:
        parallel = vllm_config.parallel_config
        count = vllm_config.model_config.get_num_layers(parallel)
        return Model(vllm_config, args, ModelLayers.of_full_attention(count), None)
    except ValueError as error:
        raise InputError(f"vLLM refuses {model}: {one_line(error)}") from None
    kv_bytes = memory_of(vllm_config, examined).kv_bytes_per_token
    return Model(vllm_config, args, examined.layers, kv_bytes)
