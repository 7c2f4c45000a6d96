# SPDX-License-Identifier: Apache-2.0
"""A model's layers without its weights: what start-up checks before it proves anything on them."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from segreuse_tools.doctor.windowed_kv import WindowedKv, windowed_kv
from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.engine.supported import WITHOUT, RefusedError, composes_states
from vllm_segreuse.plan import ModelLayers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class UnexaminedError(Exception):
    """The model cannot be built without its weights here; the text is the reason."""


_BLOCKS = 2  # vLLM's null block, and one to write to


@dataclass(frozen=True)
class Examined:
    """What the layers are like on this machine.

    Attributes:
        kv: KV heads of each layer, and bytes of one token's KV there, all ranks together.
        weight_bytes: of all parameters, all ranks together.
        backend: vLLM's name of the first layer's attention backend.
        kernels: which kernels a pass will run, as start-up logs it.
        layers: as programs see them.
        lacks: what vLLM cannot compute of the model on this machine; None: nothing is known.
        windows: what layers with a window take; None: there are none, or no others.
    """

    kv: tuple[tuple[int, int], ...]
    weight_bytes: int
    backend: str
    kernels: str
    layers: ModelLayers
    lacks: str | None = None
    windows: WindowedKv | None = None


def examine(vllm_config: VllmConfig) -> Examined:
    """Build the model on the `meta` device and check its layers as start-up does.

    Args:
        vllm_config: of one rank. Its KV cache is made smaller.

    Raises:
        RefusedError: as start-up does.
        ValueError: vLLM cannot build the model here, as for quantisation or block sizes that it has
            no kernels for, or a configuration without something that it reads.
        UnexaminedError: the model cannot be built without weights, or its layers are not those of a
            pass.
    """
    if composes_states(vllm_config):
        raise UnexaminedError("its states are composed, which start-up proves on the loaded model")
    with built(vllm_config) as model:
        return _examined(model, vllm_config)


@contextmanager
def built(vllm_config: VllmConfig) -> Iterator[torch.nn.Module]:
    """A model on the `meta` device, and meanwhile what its layers ask for. Arguments and errors are
    those of `examine`."""
    from vllm.config import set_current_vllm_config

    try:
        with _forgotten_by_dynamo(), set_current_vllm_config(vllm_config), _one_rank():
            yield _without_weights(vllm_config)
    except (RefusedError, UnexaminedError, ValueError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and not _of_meta(error):
            raise ValueError(str(error)) from error  # a backend has no kernel, say
        raise UnexaminedError(f"{type(error).__name__}: {error}".split("\n")[0]) from error


def _examined(model: torch.nn.Module, vllm_config: VllmConfig) -> Examined:
    from segreuse_tools.doctor.trial import try_parts
    from vllm_segreuse.prefill.checks import layers_of, read_structure

    specs = _specs(vllm_config)
    windows = windowed_kv(vllm_config, specs, _kv_cache_config)
    kv_cache_config = _kv_cache_config(vllm_config, specs)
    _check_bindable(specs, kv_cache_config, vllm_config)
    _bind(kv_cache_config, specs, vllm_config)
    structure = read_structure(model, vllm_config, kv_cache_config)
    first: Any = structure.stack.attention[0]
    examined = Examined(
        kv=tuple(
            (spec.num_kv_heads, spec.page_size_bytes // spec.block_size) for spec in specs.values()
        ),
        weight_bytes=sum(it.numel() * it.element_size() for it in model.parameters()),
        backend=first.get_attn_backend().get_name(),
        kernels=structure.description,
        layers=layers_of(structure.stack, vllm_config.model_config.max_model_len),
        lacks=_unrouted(model),
        windows=windows,
    )
    try_parts(model, structure.stack, vllm_config)  # changes weights: they are counted before
    return examined


@contextmanager
def _forgotten_by_dynamo() -> Iterator[None]:
    """Each model that vLLM builds registers a hook with dynamo for good, which keeps the model, and
    its tables of rotations: hundreds of MB, of contexts of some hundred thousand tokens."""
    from torch._dynamo.convert_frame import _bytecode_hooks

    before = set(_bytecode_hooks)
    try:
        yield
    finally:
        for hook in _bytecode_hooks.keys() - before:
            del _bytecode_hooks[hook]


@contextmanager
def _one_rank() -> Iterator[None]:
    """Parallel groups of one rank: layers ask how many there are."""
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        try:
            initialize_model_parallel()
            yield
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()


def _without_weights(vllm_config: VllmConfig) -> torch.nn.Module:
    import torch
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    shared = dict(_ROPE_DICT)
    try:
        dtype = vllm_config.model_config.dtype
        with set_default_torch_dtype(dtype), torch.device("meta"), _numbers():
            return initialize_model(vllm_config=vllm_config)
    except Exception as error:
        if isinstance(error, ValueError) or _of_meta(error):
            raise
        if _without_tokenizer(error):
            raise UnexaminedError("its code reads its tokenizer as it is built") from error
        raise ValueError(f"{type(error).__name__}: {error}") from error  # start-up meets it, too
    finally:  # vLLM gives equal rotary modules to later models, too
        _ROPE_DICT.clear()
        _ROPE_DICT.update(shared)


def _numbers() -> AbstractContextManager[Any]:
    """Tensors of one number that code names keep it: activations read theirs again (xIELU)."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Numbers(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.tensor and args and isinstance(args[0], int | float):
                kwargs = {"device": "cpu"} | kwargs
            return func(*args, **kwargs)

    return Numbers()


def _of_meta(error: Exception) -> bool:
    """Whether something failed because tensors have no storage here."""
    return "meta" in str(error).lower()


def _without_tokenizer(error: Exception) -> bool:
    """Whether code failed that has asked for the tokenizer, which is not loaded here."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_locals.get("tokenizer", ...) is None


def _unrouted(model: torch.nn.Module) -> str | None:
    """By what vLLM cannot choose experts here, which it finds out once it computes a token.

    Its CPU build knows fewer ways than its GPU builds (`fused_moe/router/cpu_router.py`).
    """
    import torch
    from vllm.model_executor.layers.fused_moe.router.fused_moe_router import FusedMoERouter

    found = (getattr(module, "router", None) for module in model.modules())
    router: Any = next((it for it in found if isinstance(it, FusedMoERouter)), None)
    # A function of the model's own may know its experts in a step only (the Transformers backend).
    if router is None or getattr(router, "custom_routing_function", None) is not None:
        return None
    token, experts = (
        torch.empty(1, size, device="meta") for size in (8, router.global_num_experts)
    )
    try:
        router.select_experts(token, experts)
    except AssertionError:
        return f"vLLM chooses no experts by {router.scoring_func} on this machine"
    except Exception:  # of tensors without storage: nothing is known
        return None
    return None


def _specs(vllm_config: VllmConfig) -> dict[str, Any]:
    """What each attention layer keeps of a token (`GPUModelRunner.get_kv_cache_spec`)."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers: Any = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    specs = {
        name: layer.get_kv_cache_spec(vllm_config)
        for name, layer in layers.items()
        if getattr(layer, "kv_sharing_target_layer_name", None) is None
    }
    return {name: spec for name, spec in specs.items() if spec is not None}


def _kv_cache_config(vllm_config: VllmConfig, specs: dict[str, Any]) -> KVCacheConfig:
    """How vLLM lays the KV cache out: groups as at start-up, of two blocks only."""
    try:
        from vllm.v1.core.kv_cache_utils import (
            get_kv_cache_config_from_groups,
            get_kv_cache_groups,
        )
    except ImportError:  # vLLM 0.33
        from vllm.v1.core.kv_cache_planning import (
            get_kv_cache_config_from_groups,
            get_kv_cache_groups,
        )

    _resolve_layout(vllm_config)
    groups = get_kv_cache_groups(vllm_config, specs)  # may change the specs
    memory = _BLOCKS * sum(spec.page_size_bytes for spec in specs.values())
    return get_kv_cache_config_from_groups(vllm_config, groups, memory)


def _resolve_layout(vllm_config: VllmConfig) -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )

    backends = get_current_attn_backends(vllm_config)
    names = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(vllm_config, [names])


def _check_bindable(
    specs: dict[str, Any], kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> None:
    """Start-up, too, refuses groups and layers of other kinds than those that are bound here."""
    from vllm_segreuse.model.modules import UnsupportedModelError
    from vllm_segreuse.prefill.proofs.causal import check_classes

    by_name = vllm_config.compilation_config.static_forward_context
    segment_group(kv_cache_config)
    try:
        check_classes({name: by_name[name] for name in specs})
    except UnsupportedModelError as error:
        raise RefusedError(f"{error}{WITHOUT}") from error


def _bind(config: KVCacheConfig, specs: dict[str, Any], vllm_config: VllmConfig) -> None:
    """Allocate it on the device, and bind it to the layers as a worker does.

    Raises:
        ValueError: a backend has no kernel for blocks of this size.
    """
    from vllm.v1.worker.utils import (
        allocate_kv_cache,
        bind_kv_cache,
        select_common_block_size,
    )

    by_name = vllm_config.compilation_config.static_forward_context
    device = vllm_config.device_config.device
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    bind_kv_cache(allocate_kv_cache(config, device, layout), by_name, [])
    alike: dict[tuple[Any, Any], list[str]] = {}
    for name, spec in specs.items():
        _default_scales(by_name[name])
        alike.setdefault((by_name[name].get_attn_backend(), spec), []).append(name)
    for (backend, spec), names in alike.items():
        select_common_block_size(spec.block_size, [backend])
        # On CPUs builders tell layers which kernels to use.
        backend.get_builder_cls()(spec, names, vllm_config, device)


def _default_scales(layer: Any) -> None:
    """What loading gives a layer whose checkpoint has no scales of its KV."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    layer.to_empty(device=layer.kv_cache.device)
    set_default_quant_scales(layer)
