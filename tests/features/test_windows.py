# SPDX-License-Identifier: Apache-2.0
"""What is not proven beside vLLM's hybrid KV cache manager is refused where that was asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import LoRAConfig
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from segreuse_extras.windows.refusals import FLAG, check
from tests.prefill.loaded import model_config, refused
from tests.test_kv_group import FULL, SHAPE, kv_cache
from tests.test_supported import config
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.config.launch import check_config, kv_transfer_config
from vllm_segreuse.model.attention_kind import AttentionKind
from vllm_segreuse.options.server import ConfigError
from vllm_segreuse.prefill.worker import windows_note


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_config(tmp_path_factory.mktemp("llama"))


def engine(llama: Any, disabled: bool | None = False, **changes: Any) -> Any:
    found = config(llama, **changes)
    found.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=disabled)
    return found


def options(**changes: Any) -> SegReuseConfig:
    return SegReuseConfig.from_options(changes)


def test_plain_engines_start(llama: Any) -> None:
    check(engine(llama), options())
    check(engine(llama, parallel={"tensor_parallel_size": 2}, speculative="ngram"), options())


TRAINED = {
    "isolated_documents": True,
    "link_tokens": 1,
    "max_documents": 2,
    "document_start": "<s>",
    "document_end": "<e>",
    "link_token": "<l{}>",
}
ENGINES = [
    ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline stages; remove it, or use"),
    ({"speculative": "eagle"}, "speculative decoding by eagle; remove one of them"),
    ({"lora": LoRAConfig()}, "LoRA adapters; remove one of them"),
    (
        {"model": {"hf_config": SimpleNamespace(segreuse=TRAINED)}},
        "trained on documents computed alone",
    ),
]
OPTIONS = [
    ({"tier": {"host_gib": 1}}, "the second tier; remove it, or tier"),
    ({"similarity": {}}, "similar segments; remove it, or similarity"),
    ({"audit": {"share": 0.1}}, "audits; remove it, or audit.share"),
    ({"heal_tokens": 64}, "computed in full later; remove it, or heal_tokens"),
]


@pytest.mark.parametrize(("changes", "sentence"), ENGINES)
def test_what_is_not_proven_of_the_engine_is_refused(
    changes: dict[str, Any], sentence: str, llama: Any
) -> None:
    text = refused(lambda: check(engine(llama, **changes), options()))
    assert text.startswith(f"{FLAG} is not proven")
    assert sentence in text
    check(engine(llama, disabled=True, **changes), options())


@pytest.mark.parametrize(("changes", "sentence"), OPTIONS)
def test_what_is_not_proven_of_the_options_is_refused(
    changes: dict[str, Any], sentence: str, llama: Any
) -> None:
    text = refused(lambda: check(engine(llama), options(**changes)))
    assert text.startswith(f"{FLAG} is not proven beside ")
    assert text.endswith(sentence)
    check(engine(llama, disabled=None), options(**changes))


def test_a_transfer_connector_is_refused_beside_it() -> None:
    beside = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    with pytest.raises(ConfigError, match=f"Connector cannot be combined with {FLAG}"):
        check_config(kv_transfer_config({"beside": beside}), keeps_windows=True)


def layer(name: str, window: int) -> Any:
    return SimpleNamespace(attention=SimpleNamespace(layer_name=name), kind=AttentionKind(window))


def test_start_up_says_what_keeping_all_blocks_takes() -> None:
    """A token of one head of 32 channels in bf16 takes 128 bytes at a layer."""
    cache = kv_cache(FULL)
    cache.kv_cache_groups[0].layer_names[:] = ["a", "b", "c"]
    layers = [layer("a", 64), layer("b", 0), layer("c", 96)]
    told = windows_note(layers, cache)
    assert told is not None
    assert told.startswith("2 of 3 layers attend to 96 tokens at most, and all of their blocks ")
    assert "256 bytes more for each token that windows have passed; " + FLAG in told
    assert windows_note(layers[1:2], cache) is None, "no layer has a window"


def test_it_says_nothing_where_windows_have_blocks_of_their_own() -> None:
    windowed = SlidingWindowSpec(block_size=16, sliding_window=64, **SHAPE)
    assert (
        windows_note([layer("layer 0", 0), layer("layer 1", 64)], kv_cache(FULL, windowed)) is None
    )
