# SPDX-License-Identifier: Apache-2.0
"""What is not proven beside pipeline stages is refused at start, and what chooses tokens behind the
first stage."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import LoRAConfig

from segreuse_extras.pipeline.refusals import check
from tests.prefill.loaded import model_config, refused
from tests.test_supported import Changed, config
from vllm_segreuse.config import SegReuseConfig
from vllm_segreuse.engine.stage import Stage, layers_of_stages, stage_of
from vllm_segreuse.engine.supported import RefusedError
from vllm_segreuse.policies import POLICIES

LAYERS, OF_FIRST = 12, 4
STAGED = {"pipeline_parallel_size": 3}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return model_config(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


def engine(
    llama: Any,
    parallel: dict[str, Any] | None = None,
    runs_v2: bool = False,
    **changes: Any,
) -> Any:
    found = config(llama, parallel=STAGED | (parallel or {}), **changes)
    found.use_v2_model_runner = runs_v2
    return found


def options(**changes: Any) -> SegReuseConfig:
    return SegReuseConfig.from_options({"policy": "epic"} | changes)


def test_plain_engines_start_in_stages(llama: Any) -> None:
    for policy in POLICIES:
        check(engine(llama), options(policy=policy))
    check(engine(llama), SegReuseConfig.from_options({}))
    one = engine(llama, parallel={"pipeline_parallel_size": 1}, runs_v2=True)
    check(one, SegReuseConfig.from_options({}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"runs_v2": True}, "set VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"parallel": {"data_parallel_size": 2}}, "data_parallel_size=2; use 1, and a router"),
        ({"parallel": {"distributed_executor_backend": "external_launcher"}}, "; use mp"),
        ({"lora": LoRAConfig()}, "LoRA adapters; remove --enable-lora"),
        ({"speculative": "eagle"}, "speculative decoding by eagle; remove --speculative-config"),
        ({"model": {"is_multimodal_model": True}}, "a model that takes images; use --tensor"),
        ({"model": {"use_mla": True}}, "multi-head latent attention (MLA); use --tensor"),
        ({"text": {"num_kv_shared_layers": 4}}, "layers that share the KV of others; use --tensor"),
        ({"text": {"hidden_size_per_layer_input": 8}}, "an input of its own for each token; use"),
        (
            {"model": {"using_transformers_backend": lambda: True}},
            "a model that vLLM runs by its Transformers backend; use --tensor",
        ),
        ({"model": {"enable_sleep_mode": True}}, "beside sleep mode; remove --enable-sleep-mode"),
    ],
)
def test_what_is_not_proven_of_the_engine_is_refused(
    changes: dict[str, Any], sentence: str, llama: Any
) -> None:
    text = refused(lambda: check(engine(llama, **changes), options()))
    assert text.startswith("pipeline_parallel_size=3 is not proven")
    assert sentence in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tier": {"host_gib": 1}}, "tier"),
        ({"beside": {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}}, "beside"),
        ({"similarity": {}}, "similarity"),
        ({"audit": {"share": 0.1}}, "audit.share"),
    ],
)
def test_what_is_not_proven_of_the_options_is_refused(
    changes: dict[str, Any], named: str, llama: Any
) -> None:
    text = refused(lambda: check(engine(llama), options(**changes)))
    assert text.startswith("pipeline_parallel_size=3 is not proven beside ")
    assert text.endswith(f"; remove {named}")


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"policy": "sparsex", "dense_layers": OF_FIRST + 1}, OF_FIRST + 1),
        ({"policy": "cacheblend", "dense_layers": OF_FIRST}, OF_FIRST + 1),
    ],
)
def test_policies_that_choose_behind_the_first_stage_are_refused(
    changes: dict[str, Any], layers: int, llama: Any
) -> None:
    text = refused(lambda: check(engine(llama), options(**changes)))
    assert f"leaves {OF_FIRST} of {LAYERS} layers to the first stage, and policy: " in text
    assert f" needs {layers} to choose tokens (dense_layers: " in text
    just = {"sparsex": OF_FIRST, "cacheblend": OF_FIRST - 1}.get(changes["policy"])
    if just is not None:
        check(engine(llama), options(**changes | {"dense_layers": just}))


def test_all_reasons_are_kept(llama: Any) -> None:
    with pytest.raises(RefusedError) as found:
        check(
            engine(llama, lora=LoRAConfig()),
            options(policy="sparsex", dense_layers=5, tier={"host_gib": 1}),
        )
    assert len(found.value.reasons) == 3


def test_a_worker_knows_its_layers(llama: Any) -> None:
    for rank, expected in enumerate((0, 0, 4, 4, 8, 8)):
        parallel = STAGED | {"tensor_parallel_size": 2, "rank": rank}
        found = SimpleNamespace(
            model_config=llama, parallel_config=Changed(engine(llama).parallel_config, parallel)
        )
        stage = stage_of(found, OF_FIRST)
        assert stage == Stage(rank // 2, 3, expected, expected + OF_FIRST, LAYERS)
        assert (stage.is_first, stage.is_last) == (rank < 2, rank > 3)
        assert layers_of_stages(found)[rank // 2] == range(expected, expected + OF_FIRST)
    assert stage_of(engine(llama, parallel={"pipeline_parallel_size": 1}), 7) == Stage.alone(7)
