# SPDX-License-Identifier: Apache-2.0
"""Which plans are carried out over several steps, and how much of them in one."""

from types import SimpleNamespace as Of
from typing import Any

import pytest

from vllm_segreuse.config import SegReuseConfig, in_scheduler
from vllm_segreuse.plan import ModelLayers

LAYERS = 10


def core(batched: int = 2048, **options: Any) -> Any:
    scheduler = Of(max_num_batched_tokens=batched)
    vllm_config = Of(scheduler_config=scheduler)
    config = SegReuseConfig(**options)
    return Of(vllm_config=vllm_config, config=config, manager=None, group=Of(is_alone=True))


def plan(work: int = 0, active: int = 0, lora: int = 0, positions: Any = None) -> Any:
    return Of(
        lora_id=lora,
        mrope_positions=positions,
        active_tokens=active,
        layer_tokens=lambda layers: work,
    )


def is_spread(core: Any, plan: Any) -> bool:
    methods: Any = Of(layers=ModelLayers(LAYERS - 3, (), sharing=3))
    return in_scheduler._is_spread(core, methods, plan)


@pytest.fixture(params=[True, False])
def others(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether others run."""
    running: bool = request.param
    monkeypatch.setattr(
        in_scheduler.kv_cache_manager, "has_running_requests", lambda manager: running
    )
    return running


@pytest.mark.parametrize(
    ("given", "large"),
    [
        ({"work": 1024 * LAYERS}, False),
        ({"work": 1024 * LAYERS + 1}, True),
        ({"active": 2048}, False),
        ({"active": 2049}, True),
        ({"work": 10**6, "active": 10**6}, True),
        ({"work": 10**6, "lora": 1}, False),
        ({"work": 10**6, "positions": "of images"}, False),
    ],
    ids=str,
)
def test_a_large_plan_is_spread_while_others_run(given: Any, large: bool, others: bool) -> None:
    assert is_spread(core(), plan(**given)) == (large and others)
    several = core()
    several.group.is_alone = False
    assert not is_spread(several, plan(**given)), "vLLM frees blocks that the rest would write to"


@pytest.mark.parametrize(
    ("tokens", "work", "large"), [(5, 50, False), (5, 51, True), (0, 10**9, False)]
)
def test_the_option_says_what_is_large(tokens: int, work: int, large: bool, others: bool) -> None:
    assert is_spread(core(spread_tokens=tokens), plan(work)) == (large and others)


@pytest.mark.parametrize(
    ("is_cpu", "wanted", "batched", "tokens"),
    [
        (True, None, 2048, 128),
        (False, None, 2048, 512),
        (False, None, 511, 511),
        (True, 1, 2048, 1),
        (False, 3000, 2048, 2048),
        (False, 700, 2048, 700),
    ],
)
def test_plans_of_one_step_compute_as_much_as_the_device_does_at_once(
    is_cpu: bool, wanted: int | None, batched: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_scheduler, "current_platform", Of(is_cpu=lambda: is_cpu))
    assert in_scheduler._step_tokens(core(batched, max_step_tokens=wanted)) == tokens
