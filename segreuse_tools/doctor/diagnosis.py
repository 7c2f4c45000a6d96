# SPDX-License-Identifier: Apache-2.0
"""The verdict on a model and its engine options, with what it rests on."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from segreuse_extras.trained.refusals import POLICY as LINK
from segreuse_tools.doctor.composed import ComposedStates
from segreuse_tools.doctor.looking import look, look_at_rest
from segreuse_tools.doctor.memory_use import Memory
from segreuse_tools.doctor.trained_documents import TrainedDocuments
from segreuse_tools.doctor.windowed_kv import WindowedKv
from segreuse_tools.model_folder import InputError, find_model, read_config
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.engine.supported import NO_KV
from vllm_segreuse.plugin import register

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


@dataclass(frozen=True)
class Diagnosis:
    """What `vllm-segreuse doctor` reports; its fields are the keys of `--json`.

    Attributes:
        works: whether nothing is known that start-up would refuse.
        architectures: as `config.json` names them.
        reasons: why not, one sentence each, with what to do instead; none if it works.
        notes: what could not be checked, or is worth knowing.
        versions: of vLLM and of this plugin.
        machine: the device that vLLM runs on here.
        model: sizes of the model; None if vLLM did not get as far.
        policy: name and settings that decide what is recomputed.
        backend, kernels: vLLM's attention backend, and what a pass runs; None as for `model`.
        memory: see `Memory`; None as for `model`.
        documents: see `TrainedDocuments`; None for an ordinary model.
        windows: see `WindowedKv`; None: no layer has one, or all do.
        states: see `ComposedStates`; None: none are composed.
    """

    works: bool
    architectures: tuple[str, ...]
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    machine: dict[str, Any]
    model: dict[str, Any] | None
    policy: dict[str, Any]
    backend: str | None
    kernels: str | None
    memory: Memory | None
    documents: TrainedDocuments | None = None
    windows: WindowedKv | None = None
    states: ComposedStates | None = None

    def as_json(self) -> dict[str, Any]:
        """Its fields, as JSON has them."""
        return asdict(self)


def diagnose(args: EngineArgs, options: SegReuseConfig) -> Diagnosis:
    """Examine a model as `serve` would start it, without weights and tokenizer.

    Args:
        args: of the engine; `model` is a folder, or a name in the local cache.
        options: of segment reuse.

    Raises:
        InputError: there is no such model, or its configuration makes no sense.
    """
    folder = find_model(args.model, args.revision)
    config = read_config(folder, args.hf_overrides)
    architectures = tuple(config["architectures"])
    _check_known(config)
    register()  # start-up refuses through the patches, also where the plugin is not installed
    machine = _machine()
    found = look(args, folder, options)
    notes: tuple[str, ...] = ()
    if found.memory is None and not found.reasons:
        found = look_at_rest(found, args, folder, options)
    elif found.memory is not None and found.vllm_config is not None:
        notes = _tight(found.memory.weight_bytes, machine, found.vllm_config)
        notes += _drafted(found.vllm_config)
    examined = found.examined
    return Diagnosis(
        works=not (found.reasons or found.by_vllm),
        architectures=architectures,
        reasons=(*found.reasons, *found.by_vllm),
        notes=(*found.notes, *notes),
        versions=_versions(),
        machine=machine,
        model=None if found.vllm_config is None else _model(found.vllm_config),
        policy=_policy(options, found.documents),
        backend=None if examined is None else examined.backend,
        kernels=None if examined is None else examined.kernels,
        memory=found.memory,
        documents=found.documents,
        windows=None if examined is None else examined.windows,
        states=found.states,
    )


def _check_known(config: dict[str, Any]) -> None:
    """Nobody has an architecture of this name: vLLM never had it, transformers has it not, and the
    model brings no code of its own. The file is wrong."""
    import transformers
    import vllm
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _PREVIOUSLY_SUPPORTED_MODELS

    named = config["architectures"]
    known = {*ModelRegistry.get_supported_archs(), *_PREVIOUSLY_SUPPORTED_MODELS}
    if "auto_map" not in config and not any(
        name in known or hasattr(transformers, name) for name in named
    ):
        raise InputError(
            f"vLLM {vllm.__version__} has no architecture {', '.join(named)}: serve one of its "
            "models, or register yours with a plugin"
        )


def _versions() -> dict[str, str]:
    import vllm

    import vllm_segreuse

    return {"vllm": vllm.__version__, "vllm_segreuse": vllm_segreuse.__version__}


def _machine() -> dict[str, Any]:
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device == "cpu":
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        name, memory = f"{len(os.sched_getaffinity(0))} cores", pages * size
    else:
        name = current_platform.get_device_name()
        memory = current_platform.get_device_total_memory()
    return {"device": device, "name": name, "memory_bytes": memory}


def _tight(weight_bytes: int, machine: dict[str, Any], vllm_config: VllmConfig) -> tuple[str, ...]:
    """A note if the weights alone do not fit; ranks on a CPU share its memory."""
    sharing = vllm_config.parallel_config.world_size if machine["device"] == "cpu" else 1
    needed, there = weight_bytes * sharing / 2**30, machine["memory_bytes"] / 2**30
    if needed < there:
        return ()
    return (f"weights of {needed:,.1f} GiB do not fit into the {there:,.1f} GiB that are here",)


def _drafted(vllm_config: VllmConfig) -> tuple[str, ...]:
    """A note if a draft has layers of its own: only the model's were built."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in NO_KV:
        return ()
    return (
        f"layers of the draft ({speculative.method}) are checked at start-up only, and their "
        "weights and KV are not counted here",
    )


def _model(vllm_config: VllmConfig) -> dict[str, Any]:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        "layers": model.get_total_num_hidden_layers(),
        "attention_heads": model.get_num_attention_heads(parallel) * parallel.tensor_parallel_size,
        "kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "max_model_len": model.max_model_len,
        "block_size": vllm_config.cache_config.block_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
    }


def _policy(options: SegReuseConfig, documents: TrainedDocuments | None) -> dict[str, Any]:
    return {
        "name": options.policy if documents is None else LINK,
        "recompute_ratio": options.recompute_ratio,
        "max_drift": options.max_drift,
        "enabled": options.starts_enabled,
    }
