# SPDX-License-Identifier: Apache-2.0
"""vLLM's LoRA layers are proven like others, and passes apply to each plan its own adapter."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.loaded import BLOCK_SIZE, POSITIONS, Loaded, loaded
from vllm_segreuse.compat.lora_manager import Adapters
from vllm_segreuse.kernels.pages import flat_pages
from vllm_segreuse.plan import Fixed, Pieces, Recipe, ReusePlan
from vllm_segreuse.prefill import checks
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.rows import EAGER

TOKENS, RANK = 4 * BLOCK_SIZE - 3, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """With two adapters, and a slot that holds none."""
    from vllm.config import LoRAConfig
    from vllm.lora.model_manager import LRUCacheLoRAModelManager, create_lora_manager

    with loaded(tmp_path_factory.mktemp("lora"), tie_word_embeddings=False) as made:
        config = LoRAConfig(max_lora_rank=RANK, max_loras=3, max_cpu_loras=3)
        config.lora_dtype = torch.float32
        made.vllm_config.lora_config = config
        manager = create_lora_manager(
            made.model,
            max_num_seqs=4,
            max_num_batched_tokens=POSITIONS,
            vocab_size=128,
            lora_config=config,
            vllm_config=made.vllm_config,
            device=torch.device("cpu"),
            lora_manager_cls=LRUCacheLoRAModelManager,
        )
        for number in (1, 2):
            _load(manager, number)
        yield Loaded(manager.model, made.vllm_config, made.kv_cache_config)


def _load(manager: Any, number: int) -> None:
    adapter = manager.create_dummy_lora(number, RANK, {})
    generator = torch.Generator().manual_seed(number)
    for weights in adapter.loras.values():
        for matrices in (weights.lora_a, weights.lora_b):
            for matrix in matrices if isinstance(matrices, list) else [matrices]:
                if matrix is not None:
                    matrix.copy_(0.3 * torch.randn(matrix.shape, generator=generator))
    manager.add_adapter(adapter)
    manager.activate_adapter(number)


@pytest.fixture(scope="module")
def runtime(model: Loaded) -> checks.Runtime:
    return checks.prove(model.model, model.vllm_config, model.kv_cache_config)


def test_a_model_with_adapters_is_proven_without_them(runtime: checks.Runtime) -> None:
    assert runtime.max_deviation < 2e-6


def plan_of(number: int) -> ReusePlan:
    """A plan of the same tokens as all others, in blocks of its own."""
    blocks = np.arange(1 + 4 * number, 5 + 4 * number, dtype=np.int32)
    token_ids = np.random.default_rng(0).integers(1, 128, TOKENS, dtype=np.int32)
    always = np.ones(TOKENS, dtype=np.bool_)
    pieces = np.zeros((0, 5), np.int64)
    recipe = Recipe.without_choice(always, Fixed())
    return ReusePlan(
        f"plan {number}",
        0,
        TOKENS,
        token_ids,
        Pieces.from_table(pieces),
        recipe,
        donor_blocks=[],
        donor_depth=0,
        block_ids=blocks,
        lora_id=number,
    )


def own_forward(model: Loaded, runtime: checks.Runtime, number: int) -> list[torch.Tensor]:
    """Pages of each layer, as the model itself fills them with this adapter."""
    layers = runtime.prefill.runner
    plan = plan_of(number)
    batch = Batch([plan], BLOCK_SIZE, torch.device("cpu"))
    attending = layers.attention.stock_context(batch.tokens, batch.block_tables, EAGER)
    with torch.inference_mode(), attending, Adapters(model.model).applied(number, TOKENS):
        layers.stack.forward(batch.tokens.token_ids, batch.tokens.positions)
    return pages_of(model, plan)


def pages_of(model: Loaded, plan: ReusePlan) -> list[torch.Tensor]:
    blocks = plan.block_ids.tolist()
    return [flat_pages(layer.kv_cache)[blocks].clone() for layer in model.attention.values()]


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def test_plans_of_several_adapters_in_one_pass_are_what_the_model_makes_of_each(
    model: Loaded, runtime: checks.Runtime
) -> None:
    numbers = (1, 0, 2)
    expected = {number: own_forward(model, runtime, number) for number in numbers}
    assert apart(expected[1], expected[0]) > 0.05
    assert apart(expected[1], expected[2]) > 0.05
    for layer in model.attention.values():
        layer.kv_cache.zero_()
    plans = [plan_of(number) for number in numbers]
    assert runtime.prefill.run(plans).not_finite == []
    for plan in plans:
        assert apart(pages_of(model, plan), expected[plan.lora_id]) < 1e-5
