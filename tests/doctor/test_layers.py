# SPDX-License-Identifier: Apache-2.0
"""Layers without weights: what cannot be built is said, and nothing of it stays behind."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.models.llama import LlamaModel

from segreuse_tools.doctor import diagnosis, examination
from segreuse_tools.doctor.diagnosis import Diagnosis, diagnose
from tests.doctor.test_families import FAMILIES
from vllm_segreuse.config import SegReuseConfig


def found(
    folder: Path, name: str = "llama-3.2-1b", changes: dict[str, Any] | None = None, **options: Any
) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]["config"] | (changes or {})))
    return diagnose(EngineArgs(model=str(folder), **options), SegReuseConfig())


def test_what_cannot_be_built_without_weights_is_left_to_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(vllm_config: Any) -> torch.nn.Module:
        raise TypeError("a meta tensor has no items\nin line 3")

    monkeypatch.setattr(examination, "_without_weights", fails)
    told = found(tmp_path)
    assert told.works
    assert told.notes == (
        "the layers are checked at start-up only: TypeError: a meta tensor has no items",
    )
    assert told.memory is told.kernels is None
    assert not model_parallel_is_initialized()


def test_no_weight_is_allocated_and_nothing_stays(tmp_path: Path) -> None:
    told = found(tmp_path, "llama-3.3-70b")
    assert told.memory is not None
    assert told.memory.weight_bytes > 130 << 30
    buffers = [buffer for it in _ROPE_DICT.values() for buffer in it.buffers()]
    assert not any(buffer.is_meta for buffer in buffers)
    gc.collect()
    assert not any(type(it) is LlamaModel for it in gc.get_objects())
    assert not model_parallel_is_initialized()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(("memory_bytes", "fits"), [(100 << 30, False), (200 << 30, True)])
def test_weights_that_do_not_fit_are_noted(
    memory_bytes: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"device": "cpu", "name": "", "memory_bytes": memory_bytes}
    monkeypatch.setattr(diagnosis, "_machine", lambda: here)
    for options in ({}, {"tensor_parallel_size": 2}):  # ranks share the memory of a CPU
        told = found(tmp_path, "llama-3.3-70b", **options)
        assert told.works
        wanted = () if fits else ("weights of 131.4 GiB do not fit into the 100.0 GiB",)
        assert tuple(note[:48] for note in told.notes) == tuple(note[:48] for note in wanted)


def test_a_draft_is_left_to_start_up(tmp_path: Path) -> None:
    by = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    told = found(tmp_path, speculative_config=by)
    assert (told.works, told.reasons) == (True, ())
    assert told.notes == (
        "layers of the draft (draft_model) are checked at start-up only, and their weights and KV "
        "are not counted here",
    )
    refused = found(tmp_path, speculative_config=by, enable_lora=True)
    assert "beside LoRA adapters is not proven" in refused.reasons[0]


def test_engines_side_by_side_are_examined_as_one(tmp_path: Path) -> None:
    assert found(tmp_path, data_parallel_size=2).memory == found(tmp_path).memory is not None


def test_kernels_and_backend_are_those_of_this_machine(tmp_path: Path) -> None:
    told = found(tmp_path)
    assert told.backend == "CPU_ATTN"
    assert told.kernels is not None
    assert told.kernels.startswith("alignment")


def test_a_layer_that_start_up_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.attention import Attention

    init = Attention.__init__

    def with_slopes(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.impl.alibi_slopes = [0.5]

    monkeypatch.setattr(Attention, "__init__", with_slopes)
    told = found(tmp_path)
    assert not told.works
    assert "has ALiBi positions; serve this model without --segreuse" in told.reasons[0]
    assert told.model is not None
    assert told.memory is None


def test_a_layer_of_another_class_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models import llama

    class OtherAttention(Attention):
        def to_empty(self, **_: Any) -> Any:
            raise AttributeError("a state has no scales")

    monkeypatch.setattr(llama, "Attention", OtherAttention)
    told = found(tmp_path)
    assert told.reasons == (
        "model.layers.0.self_attn.attn is OtherAttention, not plain attention; serve this model "
        "without --segreuse",
    )


def test_a_file_without_what_vllm_reads_is_refused(tmp_path: Path) -> None:
    """It is no matter of weights: start-up would end the same way."""
    config = dict(FAMILIES["minimax-m2.5"]["config"])
    for key in ("rotary_dim", "quantization_config"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = diagnose(EngineArgs(model=str(tmp_path)), SegReuseConfig())
    assert not told.works
    assert told.reasons == (
        "vLLM itself refuses: AttributeError: 'MiniMaxM2Config' object has no attribute "
        "'rotary_dim'",
    )


def test_code_of_the_models_own_is_said_to_be_what_vllm_waits_for(tmp_path: Path) -> None:
    own = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    assert found(tmp_path, changes=own).reasons == (
        "LlamaForCausalLM comes with code of its own (auto_map), which vLLM does not run unasked; "
        "read that code, and add --trust-remote-code",
    )


def test_a_model_whose_last_layer_alone_sees_everything_is_refused(tmp_path: Path) -> None:
    told = found(tmp_path, "gemma-3-1b", {"num_hidden_layers": 6})
    assert not told.works
    assert "no layer before the last one attends to the whole prompt" in told.reasons[0]


@pytest.mark.parametrize(("max_model_len", "enough"), [(300, False), (400, True)])
def test_prompts_too_short_to_prove_chunks_are_refused(
    max_model_len: int, enough: bool, tmp_path: Path
) -> None:
    options = {"max_model_len": max_model_len, "block_size": 32}
    told = found(tmp_path, "llama-3.2-1b", CHUNKED, **options)
    assert told.works == enough, told.reasons
    if not enough:
        assert (
            "prompts of 300 tokens are too short to prove layers that attend to chunks"
            in told.reasons[0]
        )


CHUNKED: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "attention_chunk_size": 256,
    "no_rope_layers": [1, 0, 1],
    "num_hidden_layers": 3,
    "intermediate_size_mlp": 256,
    "interleave_moe_layer_step": 1,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "use_qk_norm": True,
}
"""Chunks, and all tokens."""
