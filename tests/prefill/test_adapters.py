# SPDX-License-Identifier: Apache-2.0
"""Every token of a pass is computed with the adapter of its request."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm.lora.layers import LoRAMapping

from tests.prefill.tiny import LAYERS, SIZE, World, make_plan
from vllm_segreuse.plan import Boundary, Deviation, Fixed, Gather, Probed, ReusePlan, Stock

CHOICES: dict[str, dict[str, Any]] = {
    "fixed": {"program": Fixed()},
    "boundary": {"program": Boundary(1), "top_k": 3},
    "deviation": {"program": Deviation(1), "top_k": 3},
    "probed": {"program": Probed(Gather.SUM), "top_k": 3},
    "stock": {"program": Stock()},
}
STEP = LoRAMapping((7, 7), (7,), is_prefill=True)


class Manager:
    """vLLM's, with the adapters 1, 2 and 7 loaded."""

    def __init__(self) -> None:
        self.lora_index_to_id = [1, 2, 7]
        self._last_mapping = STEP
        self.most_tokens = 0

    @property
    def in_force(self) -> LoRAMapping:
        """The mapping that the next forward runs with."""
        return self._last_mapping

    def set_adapter_mapping(self, mapping: LoRAMapping) -> None:
        self._last_mapping = mapping
        if mapping is not STEP:
            self.most_tokens = max(self.most_tokens, len(mapping.index_mapping))


def plans_of(lora_ids: list[int], **recipe: Any) -> list[ReusePlan]:
    """Plans with blocks of their own, which reuse half of their tokens."""
    return [
        make_plan(
            f"plan {i}",
            0,
            [*range(0, 16, 2), 15],
            16,
            np.arange(1 + 4 * i, 5 + 4 * i),
            pieces=[(p, 1, 90 + p // SIZE, p % SIZE, 0) for p in range(1, 15, 2)],
            lora_id=lora_id,
            **recipe,
        )
        for i, lora_id in enumerate(lora_ids)
    ]


def checking(
    world: World, manager: Manager, lora_ids: list[int], computed: list[int]
) -> Callable[..., None]:
    """Called behind each layer: the mapping in force is that of the tokens' requests."""

    def check(index: int, positions: torch.Tensor, *_: torch.Tensor) -> None:
        tokens, _ = world.context
        of_tokens = [lora_ids[(slot // SIZE - 1) // 4] for slot in tokens.slots.tolist()]
        assert list(manager.in_force.index_mapping) == of_tokens
        computed.append(len(positions))

    return check


def test_keys_and_values_that_are_compared_have_the_adapter_of_their_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No layer is run as far as its output there."""
    manager = Manager()
    world = World(monkeypatch, lora_manager=manager, max_chunk_tokens=5)
    keys_and_values, seen = world.stack.keys_and_values, []

    def note(index: int, *given: Any) -> Any:
        if index == 1:  # the boundary; the last layer is written in the same way
            seen.extend(manager.in_force.index_mapping)
        return keys_and_values(index, *given)

    monkeypatch.setattr(world.stack, "keys_and_values", note)
    world.prefill.run(plans_of([1, 0, 2], **CHOICES["deviation"]))
    assert seen == [1] * 16 + [0] * 16 + [2] * 16


def test_spoilt_plans_are_computed_in_full_with_their_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Together in one list, but not in one chunk."""
    manager = Manager()
    world = World(monkeypatch, lora_manager=manager)
    lora_ids = [1, 0, 2]
    for cache in world.caches:
        cache[90:] = torch.nan
    world.spoil = checking(world, manager, lora_ids, [])
    report = world.prefill.run(plans_of(lora_ids))
    assert report.not_finite == ["plan 0", "plan 1", "plan 2"]


@pytest.mark.parametrize("recipe", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("lora_ids", [[1, 0, 2, 1], [2, 2]], ids=str)
@pytest.mark.parametrize("chunk", [1000, 5])
def test_every_token_has_the_adapter_of_its_request(
    recipe: dict[str, Any], lora_ids: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager()
    world = World(monkeypatch, lora_manager=manager, max_chunk_tokens=chunk)
    computed: list[int] = []
    world.spoil = checking(world, manager, lora_ids, computed)
    for _ in world.prefill.compute(world.prefill.prepare(plans_of(lora_ids, **recipe))):
        assert manager.in_force is STEP, "between chunks the step's mapping is in force"
    assert sum(computed) >= 8 * len(lora_ids) * (LAYERS - 1)
    assert manager.in_force is STEP
    assert manager.most_tokens <= chunk, "vLLM has room for so many"


def test_the_step_gets_its_mapping_back_if_the_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager()
    world = World(monkeypatch, lora_manager=manager)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    world.spoil = fail
    with pytest.raises(ArithmeticError):
        world.prefill.run(plans_of([1, 2]))
    assert manager.in_force is STEP


def test_a_plan_in_full_keeps_its_adapter() -> None:
    assert [plan.in_full().lora_id for plan in plans_of([1, 0])] == [1, 0]
