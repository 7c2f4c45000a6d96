# SPDX-License-Identifier: Apache-2.0
"""What is not proven where states are composed is refused at start, by name."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import MambaSpec

from segreuse_extras.states.refusals import check
from tests.prefill.loaded import model_config, refused
from tests.test_kv_group import FULL, kv_cache
from tests.test_supported import STATES, config
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.engine.kv_group import segment_group
from vllm_segreuse.engine.supported import RefusedError, check_config

TEXT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "num_kv_shared_layers": 0,
}
MAMBA2 = {
    "layers_block_type": ["mamba", "attention"],
    "mamba_n_heads": 48,
    "num_kv_shared_layers": 0,
}
CACHE = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_config(tmp_path_factory.mktemp("llama"))


def engine(llama: Any, disabled: bool | None = False, **changes: Any) -> Any:
    model = {"is_hybrid": True, "enforce_eager": True} | changes.pop("model", {})
    cache = CACHE | changes.pop("cache", {})
    found = config(llama, model, cache=cache, **({"text": TEXT} | changes))
    found.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=disabled)
    return found


def options(**changes: Any) -> SegReuseConfig:
    return SegReuseConfig.from_options({"policy": "shift"} | changes)


@pytest.mark.parametrize("takes_images", [False, True])
def test_models_of_the_delta_rule_start_where_it_was_asked_for(
    takes_images: bool, llama: Any
) -> None:
    asked = engine(llama, model={"is_multimodal_model": takes_images, "uses_mrope": takes_images})
    check_config(asked)
    check(asked, options())


@pytest.mark.parametrize(
    "text",
    [
        MAMBA2,
        {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 48},
        {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "mamba_num_heads": 64},
        {"layers_block_type": ["hybrid", "hybrid"], "mamba_n_heads": 24},
    ],
)
def test_models_of_mamba_2_start_where_it_was_asked_for(text: dict[str, Any], llama: Any) -> None:
    check_asked(text, llama)


def test_models_of_short_convolutions_start_where_it_was_asked_for(llama: Any) -> None:
    check_asked({"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, llama)


def check_asked(text: dict[str, Any], llama: Any) -> None:
    asked = engine(llama, text={"num_kv_shared_layers": 0} | text)
    check_config(asked)
    check(asked, options())


@pytest.mark.parametrize("disabled", [None, True])
def test_without_the_flag_they_are_refused_with_the_way_out(
    disabled: bool | None, llama: Any
) -> None:
    assert refused(lambda: check_config(engine(llama, disabled))) == (
        f"LlamaForCausalLM {STATES}; on a CPU, --no-disable-hybrid-kv-cache-manager has states of "
        "such layers composed (docs/hybrids.md); or serve this model without --segreuse"
    )
    check(engine(llama, disabled), options(policy="epic"))


@pytest.mark.parametrize(
    "text",
    [
        TEXT | {"layer_types": ["linear_attention", "sliding_attention"]},
        TEXT | {"layer_types": ["mamba", "full_attention"]},
        TEXT | {"layer_types": ["full_attention"]},
        MAMBA2 | {"layers_block_type": ["mamba", "sliding_attention"]},
        MAMBA2 | {"layers_block_type": ["conv", "attention"]},
        {"layers_block_type": ["mamba", "attention"], "mamba_d_state": 16, "mamba_dt_rank": 256},
        {"layer_types": TEXT["layer_types"], "num_kv_shared_layers": 0},
    ],
)
def test_other_layers_are_refused_also_with_it(text: dict[str, Any], llama: Any) -> None:
    assert STATES in refused(lambda: check_config(engine(llama, text=text)))


ENGINES = [
    ({"model": {"enforce_eager": False}}, "for a compiled model; add --enforce-eager"),
    ({"cache": {"enable_prefix_caching": False}}, "add --enable-prefix-caching"),
    ({"cache": {"mamba_cache_mode": "all"}}, "it is all; remove --mamba-cache-mode"),
    (
        {"cache": {"mamba_cache_mode": "none"}},
        "by code of its own; serve this model without --segreuse",
    ),
    ({"cache": {"cache_dtype": "fp8"}}, "beside an fp8 KV cache; use --kv-cache-dtype auto"),
    ({"parallel": {"tensor_parallel_size": 2}}, "use --tensor-parallel-size 1"),
    ({"speculative": "ngram"}, "beside speculative decoding; remove --speculative-config"),
]


@pytest.mark.parametrize(("changes", "sentence"), ENGINES)
def test_what_is_not_proven_is_refused(changes: dict[str, Any], sentence: str, llama: Any) -> None:
    text = refused(lambda: check(engine(llama, **changes), options()))
    assert text.startswith("composed states of linear attention ")
    assert text.endswith(sentence)


def test_other_policies_are_refused(llama: Any) -> None:
    text = refused(lambda: check(engine(llama), options(policy="epic")))
    assert "for the policies focus and shift only, and policy=epic; write policy: focus" in text
    check(engine(llama), options(policy="focus"))
    check(engine(llama), SegReuseConfig())


def test_gpus_are_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from segreuse_extras.states import refusals

    gpu = SimpleNamespace(is_cpu=lambda: False)
    monkeypatch.setattr(refusals, "current_platform", gpu)
    assert "on CPUs only" in refused(lambda: check(engine(llama), options()))


def mamba(block_size: int = 16) -> MambaSpec:
    return MambaSpec(block_size=block_size, shapes=((3, 8),), dtypes=(FULL.dtype,))


def test_groups_of_states_are_beside_the_one_that_segments_are_found_in() -> None:
    found = segment_group(kv_cache(mamba(), FULL, mamba()))
    assert (found.index, found.states, found.others) == (1, (0, 2), ())
    assert found.specs == {"layer 1": FULL}
    assert not found.is_alone
    assert segment_group(kv_cache(FULL)).is_alone


@pytest.mark.parametrize("specs", [[mamba()], [mamba(), FULL, FULL]])
def test_other_groups_beside_states_are_refused(specs: list[Any]) -> None:
    with pytest.raises(RefusedError, match="one group whose blocks are kept for all tokens"):
        segment_group(kv_cache(*specs))


def test_blocks_of_states_of_another_size_are_refused() -> None:
    why = (
        r"layers that hand a state on have blocks of another size than the others \(16, 32 tokens\)"
    )
    with pytest.raises(RefusedError, match=f"{why}; leave --mamba-block-size"):
        segment_group(kv_cache(FULL, mamba(32)))
