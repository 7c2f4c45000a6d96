# SPDX-License-Identifier: Apache-2.0
"""The model that a log is estimated for: what `serve` would make of its folder, without weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from segreuse_tools.doctor.examination import UnexaminedError, examine
from segreuse_tools.doctor.looking import of_one_rank
from segreuse_tools.doctor.memory_use import memory_of
from segreuse_tools.engine_loading import load_code, refused_by_vllm
from segreuse_tools.model_folder import find_model, read_config
from segreuse_tools.server_arguments import options_of, server_arguments
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.launch import kv_transfer_config
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.plan import ModelLayers

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Model:
    """What a replay needs of it.

    Attributes:
        vllm_config: of the engine, with vLLM's plain scheduler.
        args: of the server.
        options: of segment reuse.
        layers: as programs see them.
        kv_bytes: of one token at all layers, on one device; None: they could not be examined.
    """

    vllm_config: VllmConfig
    args: Namespace
    options: SegReuseConfig
    layers: ModelLayers
    kv_bytes: int | None


def load_model(
    command: str, model: str, arguments: Sequence[str], of_file: SegReuseConfig | None = None
) -> Model:
    """Read a model's folder.

    Args:
        command: of ours, for messages.
        model: a folder, or a name in the local cache.
        arguments: of vLLM's server.
        of_file: options of segment reuse that a file was given with.

    Raises:
        ConfigError: `arguments` have other options of segment reuse, or bad ones.
        InputError: there is no such model, or vLLM does not take it or the arguments.
        RefusedError: segment reuse refuses it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = server_arguments(command, model, arguments)
    options = options_of(args, of_file)
    folder = find_model(model, args.revision)
    config = read_config(folder, args.hf_overrides)
    with suppress(ImportError):  # vLLM's configuration refuses it
        load_code(config["architectures"])
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
        raise refused_by_vllm(model, error) from None
    try:
        examined = examine(of_one_rank(engine_args, vllm_config))
    except UnexaminedError:
        parallel = vllm_config.parallel_config
        count = vllm_config.model_config.get_num_layers(parallel)
        return Model(vllm_config, args, options, ModelLayers.of_full_attention(count), None)
    except ValueError as error:
        raise refused_by_vllm(model, error) from None
    kv_bytes = memory_of(vllm_config, examined).kv_bytes_per_token
    return Model(vllm_config, args, options, examined.layers, kv_bytes)
