# SPDX-License-Identifier: Apache-2.0
"""A small model of vLLM's own in this process, with its KV cache, as a worker hands it over to a
connector; no engine, and random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.prefill import checks

BLOCK_SIZE, NUM_BLOCKS = 32, 20
LAYERS, HEADS, HEAD_SIZE, POSITIONS = 3, 2, 32, 512

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
}


WINDOW = 40
GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": HEAD_SIZE,
    "attn_logit_softcapping": 5.0,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
"""Windows on some layers, and logits that are capped."""


@dataclass
class Loaded:
    """What `prove` is given."""

    model: nn.Module
    vllm_config: Any
    kv_cache_config: Any
    draft: nn.Module | None = None

    @property
    def attention(self) -> dict[str, nn.Module]:
        """The attention layers, by name."""
        by_name: dict[str, nn.Module] = self.vllm_config.compilation_config.static_forward_context
        return by_name

    @property
    def first(self) -> Any:
        """The first of them."""
        return next(iter(self.attention.values()))


def model_config(folder: Path, dtype: str = "float32", **changes: Any) -> Any:
    """vLLM's configuration of a small llama.

    Args:
        folder: where its `config.json` is written.
        dtype: of weights, and of the KV cache unless it has one of its own.
        changes: fields of `config.json` that are not as usual.
    """
    from vllm.config import ModelConfig

    (folder / "config.json").write_text(json.dumps(_LLAMA | changes))
    return ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=POSITIONS,
        enforce_eager=True,
    )


@contextmanager
def loaded(
    folder: Path,
    dtype: str = "float32",
    kv_cache_dtype: Any = "auto",
    draft: Callable[[Any], nn.Module] | None = None,
    num_blocks: int = NUM_BLOCKS,
    **changes: Any,
) -> Iterator[Loaded]:
    """Load the model; vLLM's configuration of it and its parallel groups are set meanwhile.

    Args:
        folder, dtype, changes: see `model_config`.
        kv_cache_dtype: as vLLM's option.
        draft: makes a model beside it, of vLLM's configuration.
        num_blocks: of the KV cache.
    """
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig, set_current_vllm_config

    vllm_config = VllmConfig(
        model_config=model_config(folder, dtype, **changes),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, cache_dtype=kv_cache_dtype),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=POSITIONS,
            max_num_seqs=4,
            max_model_len=POSITIONS,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=True,  # as vLLM decides for our connector
        ),
    )
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(_alone(folder))
        model = _model(vllm_config)
        beside = None if draft is None else _randomised(draft(vllm_config), vllm_config)
        yield Loaded(model, vllm_config, _bind_kv_cache(vllm_config, num_blocks), beside)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Parallel groups of one rank."""
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
    initialize_model_parallel()
    try:
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def _model(vllm_config: Any) -> nn.Module:
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(vllm_config.model_config.dtype):
        model = initialize_model(vllm_config=vllm_config)
    return _randomised(model, vllm_config)


def _randomised(model: nn.Module, vllm_config: Any) -> nn.Module:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        scale, middle = (0.2, 0.0) if parameter.dim() > 1 else (0.1, 1.0)  # norms are vectors
        parameter.data.copy_(middle + scale * torch.randn(parameter.shape, generator=generator))
    process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return model.eval()


def _bind_kv_cache(vllm_config: Any, num_blocks: int) -> Any:
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache

    all_layers = vllm_config.compilation_config.static_forward_context
    # As a worker does; what shares the KV of others has none of its own.
    layers = {
        name: layer
        for name, layer in all_layers.items()
        if getattr(layer, "kv_sharing_target_layer_name", None) is None
    }
    specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}
    spec, first = next(iter(specs.values())), next(iter(layers.values()))
    memory = sum(spec.page_size_bytes for spec in specs.values()) * num_blocks
    layout = resolve_kv_cache_layout(vllm_config, [["LBHNC"]])
    [kv_cache_config] = get_kv_cache_configs(vllm_config, [specs], [memory])
    assert kv_cache_config.num_blocks == num_blocks
    device = torch.device("cpu")
    bind_kv_cache(allocate_kv_cache(kv_cache_config, device, layout), layers, [])
    # The runner's builder; on CPUs it tells the layers which kernels to use.
    first.get_attn_backend().get_builder_cls()(spec, list(layers), vllm_config, device)
    return kv_cache_config


def prove(model: Loaded, cuts: tuple[int, ...] = ()) -> checks.Runtime:
    """The proofs of start-up."""
    return checks.prove(model.model, model.vllm_config, model.kv_cache_config, cuts)


def refused(start: Callable[[], object]) -> str:
    """Why a start is refused."""
    with pytest.raises(RefusedError) as found:
        start()
    text = str(found.value)
    assert text.startswith("segment reuse cannot start: ")
    return text.removeprefix("segment reuse cannot start: ")


def refusal(model: Loaded, cuts: tuple[int, ...] = ()) -> str:
    """Why the model is not proven."""
    text = refused(lambda: prove(model, cuts))
    assert text.endswith("; serve this model without --segreuse")
    return text
