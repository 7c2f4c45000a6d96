# SPDX-License-Identifier: Apache-2.0
"""Each engine option and kind of model under which reuse is not proven is refused, in a sentence
that names it and the way out; everything else is not."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config import CacheConfig, LoRAConfig, ParallelConfig, SpeculativeConfig
from vllm.config.aux_output import AuxOutputConfig
from vllm.config.cache import CacheDType

from tests.prefill.loaded import model_config, refused
from vllm_segreuse.engine.supported import (
    KV_CACHE_DTYPES,
    RefusedError,
    check_config,
    model_reasons,
    text_reasons,
)

WITHOUT = "serve this model without --segreuse"


class Changed:
    """One of vLLM's configurations, in which some values are others."""

    def __init__(self, real: Any, changes: dict[str, Any]) -> None:
        for name in changes:
            assert hasattr(real, name), f"vLLM's {type(real).__name__} has no {name} any more"
        self.__dict__.update(changes, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_config(tmp_path_factory.mktemp("llama"))


def config(
    llama: Any,
    model: dict[str, Any] | None = None,
    cache: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    speculative: str | dict[str, Any] | None = None,
    lora: LoRAConfig | None = None,
    experts: bool = False,
) -> Any:
    """vLLM's defaults, and what differs from them."""
    model = dict(model or {})
    if text is not None:
        model["hf_text_config"] = SimpleNamespace(**text)
    method = None if speculative is None else drafts_by(speculative)
    return SimpleNamespace(
        model_config=Changed(llama, model),
        cache_config=Changed(CacheConfig(), cache or {}),
        parallel_config=Changed(ParallelConfig(), parallel or {}),
        speculative_config=method,
        lora_config=lora,
        aux_output_config=AuxOutputConfig(enable_return_routed_experts=experts),
    )


def drafts_by(method: str | dict[str, Any]) -> Any:
    """As vLLM's `SpeculativeConfig`, of a method or with more values."""
    given = {"method": method} if isinstance(method, str) else dict(method)
    kind = given.pop("kind", "llama")
    real: Any = SpeculativeConfig.__new__(SpeculativeConfig)
    draft = SimpleNamespace(hf_config=SimpleNamespace(model_type=kind))
    defaults = {
        "draft_model_config": draft,
        "parallel_drafting": False,
        "use_heterogeneous_vocab": False,
        "kv_cache_dtype": None,
    }
    real.__dict__.update(defaults | given)
    return real


def refusal(vllm_config: Any) -> str:
    return refused(lambda: check_config(vllm_config))


STATES = (
    "has layers that hand on a state in place of keys and values (linear attention, state space or "
    "convolution), and vLLM keeps nothing of a segment by which that state could be composed, so "
    "that these layers would compute every token all the same"
)
INDEXER = "attends to tokens that an indexer of its own chooses, whose keys are not reused"
MODELS: list[tuple[dict[str, Any], str]] = [
    ({"runner_type": "pooling"}, "is a pooling model"),
    ({"is_hybrid": True}, STATES),
    ({"is_attention_free": True}, STATES),
    ({"is_encoder_decoder": True}, "is an encoder-decoder model"),
]


@pytest.mark.parametrize(("model", "why"), MODELS)
def test_models_that_cannot_be_proven_are_refused_by_name(
    model: dict[str, Any], why: str, llama: Any
) -> None:
    assert refusal(config(llama, model)) == f"LlamaForCausalLM {why}; {WITHOUT}"


@pytest.mark.parametrize(
    ("model_impl", "way_out"), [("auto", WITHOUT), ("transformers", "remove --model-impl")]
)
def test_images_of_the_transformers_backend_are_refused(
    model_impl: str, way_out: str, llama: Any
) -> None:
    by = {"using_transformers_backend": lambda: True, "model_impl": model_impl}
    assert refusal(config(llama, by | {"is_multimodal_model": True})) == (
        "vLLM runs LlamaForCausalLM by its Transformers backend, and its images are not proven; "
        + way_out
    )
    check_config(config(llama, by))


LAYERS: list[tuple[dict[str, Any], str]] = [
    (
        {"altup_num_inputs": 4, "num_kv_shared_layers": 15, "hidden_size_per_layer_input": 256},
        "layers of LlamaForCausalLM take several states of each token at once (AltUp), and a pass "
        "hands on one",
    ),
    *(
        (text, f"LlamaForCausalLM {INDEXER}")
        for text in (
            {"index_topk": 2048},
            {"index_topk_blocks": 16},
            {"sparse_attention_config": {"sparse_topk_blocks": 16}},
            {"layer_types": ["full_attention", "indexed_attention"]},
        )
    ),
    *(
        ({key: ["full_attention", kind]}, f"LlamaForCausalLM {STATES}")
        for key in ("layer_types", "layers_block_type")
        for kind in ("linear_attention", "mamba", "conv", "hybrid")
    ),
    (
        {"cross_attention_layers": [3, 8]},
        "layers of LlamaForCausalLM attend to images beside the prompt (cross attention)",
    ),
    (
        {"dual_chunk_attention_config": {"chunk_size": 262144}},
        "LlamaForCausalLM uses dual chunk attention, whose keys depend on the chunk",
    ),
    ({"alibi": True}, "LlamaForCausalLM has ALiBi positions"),
]


@pytest.mark.parametrize(("text", "why"), LAYERS)
def test_layers_that_config_json_tells_of_are_refused(
    text: dict[str, Any], why: str, llama: Any
) -> None:
    model = {"uses_alibi": "alibi" in text}
    assert refusal(config(llama, model, text=text)) == f"{why}; {WITHOUT}"


@pytest.mark.parametrize(
    "text",
    [
        {"num_kv_shared_layers": 15, "index_topk": None, "attention_chunk_size": 8192},
        {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}},
        {"rope_parameters": None, "dual_chunk_attention_config": None},
        {"llama_4_scaling": {"beta": 0.1}},
        {"layer_types": ["full_attention", "sliding_attention", "chunked_attention"]},
        {"layer_types": 32, "layers_block_type": [{"mamba": 1}, 0]},
        {"layer_types": None, "sparse_attention_config": {}, "hidden_size_per_layer_input": 256},
    ],
    ids=str,
)
def test_layers_that_are_like_others_are_not_refused(text: dict[str, Any], llama: Any) -> None:
    check_config(config(llama, text=text))


@pytest.mark.parametrize(
    "model",
    [
        {"is_hybrid": True},
        {"is_attention_free": True},
        {"runner_type": "pooling"},
        {"is_encoder_decoder": True},
    ],
    ids=str,
)
def test_a_prefix_cache_that_vllm_itself_turns_off_is_not_the_users_fault(
    model: dict[str, Any], llama: Any
) -> None:
    given = config(llama, model, cache={"enable_prefix_caching": False})
    with pytest.raises(RefusedError) as refused:
        check_config(given)
    assert not any("prefix caching" in reason for reason in refused.value.reasons)


def test_a_model_is_known_by_its_own_configuration_or_by_what_its_file_says(llama: Any) -> None:
    hybrid = config(llama, {"is_hybrid": True}).model_config
    assert model_reasons(hybrid) == (f"LlamaForCausalLM {STATES}; {WITHOUT}",)
    assert model_reasons(config(llama).model_config) == ()
    text = SimpleNamespace(layer_types=["linear_attention", "indexed_attention"])
    assert text_reasons("Other", text) == (
        f"Other {INDEXER}; {WITHOUT}",
        f"Other {STATES}; {WITHOUT}",
    )
    assert text_reasons("Other", SimpleNamespace(layer_types=["full_attention"])) == ()


@pytest.mark.parametrize("asked", [False, True])
def test_states_are_no_reason_where_they_are_to_be_composed_and_can_be(
    asked: bool, llama: Any
) -> None:
    """Also of a model of which vLLM makes no engine's configuration."""
    rule = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 64}
    mamba2 = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 48}
    convolution = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    other = {"layer_types": ["mamba", "full_attention"]}
    each = (rule, not asked), (mamba2, not asked), (convolution, not asked), (other, True)
    for text, is_refused in each:
        known = config(llama, {"is_hybrid": True}, text=text).model_config
        assert bool(model_reasons(known, asked)) == is_refused
        assert bool(text_reasons("Other", SimpleNamespace(**text), asked)) == is_refused


def test_all_reasons_are_known_and_the_first_is_told(llama: Any) -> None:
    given = config(llama, {"is_encoder_decoder": True}, parallel={"enable_eplb": True})
    with pytest.raises(RefusedError, match="encoder-decoder") as refused:
        check_config(given)
    assert [reason.split(";")[0] for reason in refused.value.reasons] == [
        "LlamaForCausalLM is an encoder-decoder model",
        "expert load balancing is on",
    ]


LATENT: list[tuple[dict[str, Any], str]] = [
    (
        {"cache": {"cache_dtype": "fp8_e5m2"}},
        "LlamaForCausalLM uses multi-head latent attention (MLA), whose fp8 KV cache is not "
        "proven; use --kv-cache-dtype auto",
    ),
    (
        {"lora": LoRAConfig()},
        "LlamaForCausalLM uses multi-head latent attention (MLA), which is not proven beside LoRA "
        "adapters; remove --enable-lora",
    ),
    (
        {"cache": {"enable_prefix_caching": False}},
        "LlamaForCausalLM uses multi-head latent attention (MLA), for which vLLM has no prefix "
        "cache on CPUs without AMX; use a CPU with AMX or a GPU, or serve this model without "
        "--segreuse",
    ),
    (
        {"speculative": "mtp"},
        "speculative decoding by mtp of a model with multi-head latent attention (MLA) is not "
        "proven; use ngram",
    ),
]


@pytest.mark.parametrize(("changes", "why"), LATENT)
def test_latent_attention_is_refused_beside_what_is_not_proven(
    changes: dict[str, Any], why: str, llama: Any
) -> None:
    with pytest.raises(RefusedError) as refused:
        check_config(config(llama, {"use_mla": True}, **changes))
    assert refused.value.reasons == (why,)
    check_config(config(llama, {"use_mla": True}))


def test_on_a_gpu_it_is_the_user_who_turns_the_prefix_cache_off(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    given = config(llama, {"use_mla": True}, cache={"enable_prefix_caching": False})
    assert refusal(given) == "prefix caching is off; remove --no-enable-prefix-caching"


QUANTISED_OTHERWISE = sorted(set(get_args(CacheDType)) - set(KV_CACHE_DTYPES))

OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"model": {"enable_prompt_embeds": True}},
        "prompt embeddings are on; remove --enable-prompt-embeds",
    ),
    (
        {"cache": {"enable_prefix_caching": False}},
        "prefix caching is off; remove --no-enable-prefix-caching",
    ),
    (
        {"cache": {"cache_dtype": "fp8_e4m3", "kv_cache_dtype_skip_layers": ["0", "3"]}},
        "some layers are not quantised (kv_cache_dtype_skip_layers=['0', '3']), others are; remove "
        "--kv-cache-dtype-skip-layers, or use --kv-cache-dtype auto",
    ),
    *(
        (
            {"cache": {"cache_dtype": dtype}},
            f"kv_cache_dtype={dtype} is quantised in a way that reuse does not handle; "
            "use --kv-cache-dtype fp8 or auto",
        )
        for dtype in QUANTISED_OTHERWISE
    ),
    (
        {"parallel": {"decode_context_parallel_size": 2}},
        "context parallelism is on; set both context parallel sizes to 1",
    ),
    (
        {"parallel": {"prefill_context_parallel_size": 2}},
        "context parallelism is on; set both context parallel sizes to 1",
    ),
    (
        {"model": {"is_moe": True}, "parallel": {"data_parallel_size": 2}},
        "a mixture of experts with data_parallel_size=2, whose engines compute every layer "
        "together; use 1, with --tensor-parallel-size and --enable-expert-parallel, and several "
        "such servers behind a router",
    ),
    (
        {"model": {"enable_sleep_mode": True, "sleep_mode_backend": "checkpoint"}},
        "sleep_mode_backend=checkpoint is not known to bring back pages and tables where they "
        "were; use --sleep-mode-backend cumem, or remove --enable-sleep-mode",
    ),
    (
        {"parallel": {"enable_eplb": True}},
        "expert load balancing is on; remove --enable-eplb",
    ),
    (
        {"lora": LoRAConfig(enable_tower_connector_lora=True)},
        "LoRA adapts the vision tower, too; remove --enable-tower-connector-lora",
    ),
    ({"parallel": {"use_ubatching": True}}, "micro-batching is on; remove --enable-dbo"),
    (
        {"experts": True},
        "vLLM knows no experts of reused tokens; remove --enable-return-routed-experts",
    ),
    (
        {"cache": {"kv_sharing_fast_prefill": True}},
        "vLLM would run layers that share the KV of others in a part of the model of its own, on a "
        "prompt's last token only; remove --kv-sharing-fast-prefill",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), OPTIONS)
def test_engine_options_that_cannot_be_proven_are_refused(
    changes: dict[str, Any], sentence: str, llama: Any
) -> None:
    assert refusal(config(llama, **changes)) == sentence


@pytest.mark.parametrize("option", ["enable_dbo", "ubatch_size"])
def test_micro_batching_is_known_by_both_of_its_options(option: str, llama: Any) -> None:
    parallel = ParallelConfig(**{option: True if option == "enable_dbo" else 2})
    given = config(llama)
    given.parallel_config = parallel
    assert "micro-batching is on" in refusal(given)


@pytest.mark.parametrize(
    ("method", "kind"),
    [("medusa", "medusa"), ("dflash", "qwen3"), ("mtp", "gemma4_mtp"), ("mtp", "step3p5_mtp")],
)
def test_drafts_of_other_kinds_are_refused(method: str, kind: str, llama: Any) -> None:
    assert refusal(config(llama, speculative={"method": method, "kind": kind})) == (
        f"speculative decoding by {method} ({kind}) keeps KV that is not known to move as the "
        "model's does; use draft_model, eagle, eagle3, mtp, ngram, suffix, or none"
    )


DRAFTS_WITH: list[tuple[dict[str, Any], str]] = [
    (
        {"speculative": {"method": "eagle3", "parallel_drafting": True}},
        "by eagle3 drafts all tokens at once; remove parallel_drafting",
    ),
    (
        {"speculative": {"method": "draft_model", "use_heterogeneous_vocab": True}},
        "by draft_model has another vocabulary than the model; use a draft of the same one",
    ),
    (
        {"speculative": "eagle", "lora": LoRAConfig()},
        "by eagle beside LoRA adapters is not proven; remove --enable-lora, or use ngram",
    ),
    (
        {"speculative": "mtp", "model": {"is_multimodal_model": True}},
        "by mtp of a model that takes images is not proven; use ngram",
    ),
    (
        {"speculative": "mtp", "model": {"using_transformers_backend": lambda: True}},
        "by mtp of a model that vLLM runs by its Transformers backend is not proven; use ngram",
    ),
    (
        {"speculative": "eagle", "text": {"num_kv_shared_layers": 15}},
        "by eagle of a model with layers that share the KV of others is not proven; use ngram",
    ),
    (
        {"speculative": "eagle", "cache": {"cache_dtype": "fp8_e4m3"}},
        "by eagle with an fp8 KV cache is not proven; use --kv-cache-dtype auto, or ngram",
    ),
    (
        {"speculative": {"method": "eagle", "kv_cache_dtype": "fp8"}},
        "by eagle with an fp8 KV cache is not proven; use --kv-cache-dtype auto, or ngram",
    ),
]


@pytest.mark.parametrize(("changes", "why"), DRAFTS_WITH)
def test_drafts_beside_what_is_not_proven_with_them_are_refused(
    changes: dict[str, Any], why: str, llama: Any
) -> None:
    assert refusal(config(llama, **changes)) == f"speculative decoding {why}"


def test_drafts_from_states_are_refused_beside_boundary_states(llama: Any) -> None:
    with pytest.raises(RefusedError, match="w_exact beside speculative decoding by eagle"):
        check_config(config(llama, speculative="eagle"), (1,))
    check_config(config(llama, speculative="draft_model"), (1,))


SUPPORTED: list[dict[str, Any]] = [
    {},
    {"model": {"is_moe": True}},
    {"parallel": {"data_parallel_size": 2}},
    {"parallel": {"tensor_parallel_size": 2}},
    {"speculative": "ngram"},
    {"speculative": "suffix"},
    {"speculative": "draft_model"},
    {"speculative": "eagle"},
    {"speculative": "eagle3"},
    {"speculative": "mtp"},
    {"lora": LoRAConfig()},
    {"model": {"is_multimodal_model": True, "uses_mrope": True}},
    {"text": {"sliding_window": 4096}},
    {"cache": {"kv_cache_dtype_skip_layers": ["0"]}},
] + [{"cache": {"cache_dtype": dtype}} for dtype in KV_CACHE_DTYPES]


@pytest.mark.parametrize("changes", SUPPORTED, ids=str)
def test_nothing_else_is_refused(changes: dict[str, Any], llama: Any) -> None:
    check_config(config(llama, **changes))


def test_a_model_without_a_name_is_named_by_where_it_is(llama: Any) -> None:
    nameless = {"hf_config": SimpleNamespace(architectures=None), "is_encoder_decoder": True}
    assert refusal(config(llama, nameless)).startswith(f"{llama.model} is an encoder-decoder")


@pytest.mark.parametrize("cuts", [(1,), (1, 2)])
def test_boundary_states_need_layers_that_report_their_input(
    cuts: tuple[int, ...], llama: Any
) -> None:
    check_config(config(llama), cuts)
    compiled = config(llama, {"enforce_eager": False})
    check_config(compiled)
    text = refused(lambda: check_config(compiled, cuts))
    assert text.endswith("which compiled models do not report; add --enforce-eager")


def test_boundary_states_are_of_layers_that_the_model_has(llama: Any) -> None:
    text = refused(lambda: check_config(config(llama), (1, 3)))
    assert text == (
        "similarity.w_exact names layer 3, and the last layer of LlamaForCausalLM that writes KV "
        'is 2; remove it, or call it "all"'
    )
    sharing = config(llama, text={"num_kv_shared_layers": 1})
    check_config(sharing, (1,))
    assert "names layer 2, and the last layer" in refused(lambda: check_config(sharing, (1, 2)))
