# SPDX-License-Identifier: Apache-2.0
"""What start-up's proofs would find in a model's code is found without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import llama

from segreuse_tools.doctor import trial
from segreuse_tools.doctor.diagnosis import Diagnosis, diagnose
from tests.doctor.test_families import FAMILIES
from tests.latent import BLOCK_SIZE, prefix_cache_for_latents
from vllm_segreuse.config import SegReuseConfig


def found(folder: Path, name: str = "llama-3.2-1b", **options: Any) -> Diagnosis:
    (folder / "config.json").write_text(json.dumps(FAMILIES[name]["config"]))
    return diagnose(EngineArgs(model=str(folder), **options), SegReuseConfig())


def _with_values_of_positions(
    self: Any, positions: torch.Tensor, hidden_states: torch.Tensor
) -> Any:
    qkv, _ = self.qkv_proj(hidden_states)
    q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    q, k = self.rotary_emb(positions, q, k)
    return self.o_proj(self.attn(q, k, v * (1 + positions[:, None])))[0]


def test_values_that_depend_on_their_position_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama.LlamaAttention, "forward", _with_values_of_positions)
    [reason] = found(tmp_path).reasons
    assert reason.startswith(
        "model.layers.0.self_attn.attn: the cached value depends on its position, and values are "
        "moved as they are (off by "
    )
    assert reason.endswith("; serve this model without --segreuse")


@pytest.mark.parametrize("eager", [False, True])
def test_positions_that_no_rotary_module_explains_are_found(
    eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(self: Any, *_: Any, **__: Any) -> None:
        self.rotary_emb = lambda positions, q, k: (q, k * (1 + positions[:, None]))

    monkeypatch.setattr(llama.LlamaAttention, "_init_rotary_emb", init)
    [reason] = found(tmp_path, enforce_eager=eager).reasons
    assert "carries positions that no rotary module explains" in reason


def test_what_happens_between_layers_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Solar Pro, which adds what some layers had left to what later ones leave."""
    run = llama.LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        third = self.layers[2]
        hook = third.register_forward_pre_hook(lambda _, given: (given[0], given[1] * 2, given[2]))
        try:
            return run(self, *args, **kwargs)
        finally:
            hook.remove()

    monkeypatch.setattr(llama.LlamaModel, "forward", forward)
    [reason] = found(tmp_path).reasons
    assert reason == (
        "LlamaForCausalLM changes between layers 1 and 2 what one hands on to the other, and a "
        "pass does not; serve this model without --segreuse"
    )


@pytest.mark.parametrize("broken", [llama.LlamaAttention, llama.LlamaModel])
def test_what_cannot_be_tried_is_left_to_start_up(
    broken: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no weights")

    monkeypatch.setattr(broken, "forward", fails)
    told = found(tmp_path)
    assert (told.works, told.reasons) == (True, ())
    assert told.kernels is not None


TRIED = ("llama-3.2-1b", "gemma-3-1b", "gpt-oss-20b", "glm-4-9b", "command-r7b", "hy3")


@pytest.mark.parametrize("name", TRIED)
def test_both_are_tried(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would notice if neither ran."""
    tried = []
    for each in ("_try_rotations", "_try_loop"):
        own = getattr(trial, each)

        def run(*given: Any, own: Any = own) -> Any:
            tried.append(own(*given))
            return tried[-1]

        monkeypatch.setattr(trial, each, run)
    for variable, value in FAMILIES[name].get("environment", {}).items():
        monkeypatch.setenv(variable, value)
    assert found(tmp_path, name).works
    assert tried == [None, None]


def test_angles_of_millions_of_positions_are_left_to_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of those of Llama 4 Scout takes gigabytes."""
    monkeypatch.setattr(trial, "_LARGEST_TABLE", 1 << 18)
    monkeypatch.setattr(llama.LlamaAttention, "forward", _with_values_of_positions)
    assert found(tmp_path).works


def test_keys_of_latent_attention_that_vllm_turns_wrongly_are_found(tmp_path: Path) -> None:
    """Without YaRN, run eagerly: vLLM's kernel for CPUs takes heads for tokens."""
    with prefix_cache_for_latents():
        eager = found(tmp_path, "glm-4.7-flash", block_size=BLOCK_SIZE, enforce_eager=True)
        [reason] = eager.reasons
        assert "the cached key does not turn with its position" in reason
        yarn = found(tmp_path, "deepseek-v2-lite", block_size=BLOCK_SIZE, enforce_eager=True)
    assert (yarn.works, yarn.reasons) == (True, ())
