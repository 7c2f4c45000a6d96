# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, on the scheduler's side: which image is which, and where plans end."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from segreuse_extras.images.ids import ImageIds, images_of
from tests.parts import parts_of
from tests.test_scheduler import OPTIONS, SIZE, World
from tests.tier.test_scheduler_side import Tiered
from vllm_segreuse.plan import ModelLayers, ReusePlan
from vllm_segreuse.scheduling.arrival import bypass_reason

PLACEHOLDER = 5
GRID = (3, 4)
FRONT, BEHIND, NEW = [*range(100, 110)], [*range(200, 212)], [7, 8, 9]
SHIFT = OPTIONS | {"segreuse_explain": True}


class Picture:
    """An image, by what vLLM calls it."""

    def __init__(self, identifier: str, grid: tuple[int, int] = GRID, **fields: Any) -> None:
        self.identifier, self.grid, self.fields = identifier, grid, fields

    def at(self, offset: int) -> MultiModalFeatureSpec:
        """As a request has it."""
        height, width = self.grid
        grid = torch.tensor(self.fields.get("thw", (1, 2 * height, 2 * width)))
        data: Any = {"image_grid_thw": SimpleNamespace(data=grid)}
        place = PlaceholderRange(offset, height * width, self.fields.get("is_embed"))
        modality = self.fields.get("modality", "image")
        data = self.fields.get("data", data)
        return MultiModalFeatureSpec(data, modality, self.identifier, place)


class Pictured(World):
    """A side whose model's images were proven."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.side.learn(ModelLayers(4, tuple(range(4))), {"images": 2})

    def arrive(self, *parts: Any, options: Any = SHIFT) -> Any:
        """A request of lists of tokens, and pictures."""
        tokens: list[int] = []
        features = []
        for part in parts:
            if isinstance(part, Picture):
                features.append(part.at(len(tokens)))
                part = [PLACEHOLDER] * (part.grid[0] * part.grid[1])
            tokens += part
        return self.add(tokens, options, mm_features=features)

    def ask(self, *parts: Any, options: Any = SHIFT) -> tuple[dict[str, Any], ReusePlan | None]:
        """What is reported of a request that runs alone, and its plan."""
        request = self.arrive(*parts, options=options)
        self.run(request)
        return self.report(request), next(iter(self.plans), None)


A, B = Picture("a"), Picture("b")


def pictured(**options: Any) -> Pictured:
    """An image between texts was computed."""
    world = Pictured(**options)
    world.ask(FRONT, A, BEHIND)
    return world


def test_an_image_that_was_seen_is_reused_wholly_and_never_computed() -> None:
    report, plan = pictured().ask(NEW, FRONT, A, BEHIND, [1])
    assert plan is not None
    assert report["bypass_reason"] is None
    assert (report["image_tokens"], report["reused_tokens"]) == (12, 32)  # whole blocks
    held = slice(len(NEW) + len(FRONT), len(NEW) + len(FRONT) + 12)
    assert plan.recipe.fixed[held].all()
    assert not plan.recipe.always[held].any()
    assert plan.recipe.fixed.sum() == 12
    # Three positions on in all rows; text behind the image has as many numbers less as in front.
    assert set(plan.pieces.turn.tolist()) == {3}
    assert plan.mrope_positions is not None
    assert plan.mrope_positions[:, held].tolist() == [
        [13] * 12,
        [13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15],
        [13, 14, 15, 16] * 3,
    ]
    assert plan.mrope_positions[:, held.stop].tolist() == [17] * 3


def test_text_behind_an_image_turns_by_its_numbers_and_not_by_its_index() -> None:
    _, plan = pictured().ask(NEW, BEHIND, [1])
    assert plan is not None
    # Its index was 22 and more, its number 14 and more: 12 tokens took 4 numbers.
    assert plan.pieces.position[0] == 22
    assert set(plan.pieces.turn.tolist()) == {3 - 14}


def test_another_image_of_the_same_size_is_another_image() -> None:
    report, plan = pictured().ask(NEW, FRONT, B, BEHIND, [1])
    assert plan is not None
    assert (report["image_tokens"], report["reused_tokens"]) == (0, len(FRONT) - 1)
    assert plan.stop == len(NEW) + len(FRONT) - 1
    assert plan.num_fixed == 0
    # And its own KV is found, not the other's.
    world = pictured()
    world.ask(NEW, B, BEHIND)
    _, first = world.ask([1, 2], A, [3])
    _, second = world.ask([1, 2], B, [3])
    assert first is not None
    assert second is not None
    assert not set(first.donor_blocks) & set(second.donor_blocks)


def test_the_same_image_at_another_resolution_is_another_image() -> None:
    for grid in ((4, 3), (2, 6), (3, 5)):
        report, _ = pictured().ask(NEW, FRONT, Picture("a", grid), BEHIND, [1])
        assert report["image_tokens"] == 0


def test_part_of_an_image_is_not_reused() -> None:
    world = pictured()
    [last] = [block for block in world.pool.blocks if block.block_id == 6]
    world.pool.evict_blocks({last.block_id})  # indices 20 to 23: the image ends at 22
    report, plan = world.ask(NEW, FRONT, A, BEHIND, [1])
    assert plan is not None
    assert (report["image_tokens"], plan.stop) == (0, len(NEW) + len(FRONT) - 1)


def test_nothing_behind_a_new_image_is_reused_and_the_report_says_so() -> None:
    report, _ = pictured().ask(NEW, FRONT, B, A, BEHIND, [1])
    assert report["image_tokens"] == 0
    *found, behind, last = report["explain"]
    assert [it["source"] for it in found] == ["new", "segment", "new"]
    assert behind == {"start": 13, "tokens": 36, "source": "new", "reason": "new_image"}
    assert last["reason"] == "last_token"
    assert sum(it["tokens"] for it in report["explain"]) == report["prompt_tokens"]


def test_other_namespaces_do_not_meet_over_images() -> None:
    for other in ({"extra_keys": "others"}, {"extra_keys": ["tests", "a"]}):
        report, plan = pictured().ask(NEW, FRONT, A, BEHIND, [1], options=SHIFT | other)
        assert (report["reused_tokens"], plan) == (0, None)


def test_text_is_reused_across_prompts_with_other_images_and_with_none() -> None:
    world = pictured()
    assert world.ask(NEW, FRONT, [1])[0]["reused_tokens"] == len(FRONT)
    world = Pictured()
    world.ask(FRONT, BEHIND)
    assert world.ask(NEW, FRONT, BEHIND, [1, 2], A, [3])[0]["reused_tokens"] == 20


NOT_REUSED = {
    "video": Picture("a", modality="video"),
    "audio": Picture("a", modality="audio", data=None),
    "elsewhere": Picture("a", data=None),
    "several frames": Picture("a", thw=(2, 6, 8)),
    "another number of tokens": Picture("a", thw=(1, 8, 8)),
    "text among its tokens": Picture("a", is_embed=torch.tensor([*[True] * 11, False])),
}


@pytest.mark.parametrize("case", NOT_REUSED)
def test_35_what_cannot_be_told_apart_runs_without_reuse(case: str) -> None:
    world = pictured()
    indexed = len(world.index)
    report, plan = world.ask(NEW, FRONT, A, NOT_REUSED[case], BEHIND, [1])
    assert (report["bypass_reason"], report["reused_tokens"], plan) == ("multimodal", 0, None)
    assert len(world.index) == indexed, "it donates nothing"


def test_images_that_were_not_proven_run_without_reuse() -> None:
    world = pictured()
    parts_of(world.side).feature["images"].learned(None)
    assert world.ask(NEW, FRONT, A, BEHIND, [1])[0]["bypass_reason"] == "multimodal"


def test_without_ids_left_there_is_no_reuse() -> None:
    request = Pictured().arrive(FRONT, A, B)
    ids = ImageIds(lambda: np.arange(-(1 << 31), -(1 << 31) + 12, dtype=np.int32), ids=20)
    images = images_of(request, 2, ids)
    assert images is None
    assert bypass_reason(request, images) == "multimodal"


@pytest.mark.parametrize(
    "options",
    [
        {"segreuse_policy": "cacheblend"},
        {
            "segreuse_policy": "sparsex",
            "segreuse_dense_layers": 1,
            "segreuse_recompute_ratio": 0.1,
        },
        {"segreuse_policy": "cacheblend", "segreuse_observe": True},
    ],
)
def test_policies_with_dense_layers_run_without_reuse_of_images(options: Any) -> None:
    world = pictured()
    report, plan = world.ask(NEW, FRONT, A, BEHIND, [1], options=SHIFT | options)
    assert (report["bypass_reason"], plan) == ("images_in_dense_layers", None)
    assert report["explain"][1]["source"] == "segment"
    report, plan = world.ask(NEW, FRONT, [1], options=SHIFT | options)
    assert report["bypass_reason"] in (None, "observed")


@pytest.mark.parametrize("policy", ["sparsex", "epic", "focus", "prophet", "peaks"])
def test_no_policy_computes_images(policy: str) -> None:
    options = SHIFT | {"segreuse_policy": policy, "segreuse_recompute_ratio": 1.0}
    options |= {"segreuse_dense_layers": 0}
    report, plan = pictured().ask(NEW, FRONT, A, BEHIND, [1], options=options)
    assert plan is not None
    assert report["image_tokens"] == 12
    assert plan.recipe.fixed.any()
    assert not (plan.recipe.fixed & (plan.recipe.always | plan.recipe.probes)).any()
    assert report["recomputed_tokens"] == 20


def test_the_exact_tier_supplies_images_with_the_prefix() -> None:
    world = pictured()
    [hole] = [block for block in world.pool.blocks if block.block_id == 1]
    world.pool.evict_blocks({hole.block_id})
    exact = SHIFT | {"segreuse_policy": "exact"}
    report, plan = world.ask(FRONT, A, BEHIND, options=exact)
    assert plan is not None
    assert (report["exact_tokens"], report["image_tokens"]) == (28, 12)
    assert set(plan.pieces.turn.tolist()) == {0}
    [middle] = [block for block in world.pool.blocks if block.block_id == 4]
    world.pool.evict_blocks({middle.block_id})
    report, plan = world.ask(FRONT, A, BEHIND, options=exact)
    assert report["image_tokens"] == 0
    assert plan is None or plan.stop < len(FRONT)


def test_blocks_of_images_that_are_reused_do_not_donate() -> None:
    world = pictured()
    indexed = len(world.index)
    world.ask(NEW, FRONT, A, [50, 51, 52], options=OPTIONS)
    assert len(world.index) == indexed


def test_a_preempted_prompt_keeps_its_images() -> None:
    world = pictured()
    request = world.arrive(NEW, FRONT, B, BEHIND)
    assert world.match(request, 0) == len(NEW) + len(FRONT) - 1
    request.append_output_token_ids([1, 2])
    assert world.match(request, 0) == len(NEW) + len(FRONT) - 1


def test_plans_of_prompts_with_images_are_done_at_once() -> None:
    world = pictured(spread_tokens=0)
    world.tables["another"] = [1]
    request = world.arrive(NEW, FRONT, A, BEHIND, [1])
    assert world.side.match(request, 0) == (35, False)


class TieredPictures(Tiered):
    """With a second tier, and images."""

    def __init__(self) -> None:
        super().__init__()
        self.side.learn(ModelLayers(4, tuple(range(4))), {"images": 2})

    arrive = Pictured.arrive


def test_the_second_tier_stores_text_in_front_of_images_only() -> None:
    world = TieredPictures()
    world.run(world.arrive(FRONT, A, BEHIND))
    world.end_step()
    orders = world.evict_all()
    assert orders is not None
    assert len(orders.blocks) == len(FRONT) // SIZE
    world.report(orders)
    request = world.arrive(NEW, FRONT, A, BEHIND, [1])
    world.run(request)
    [plan] = world.plans
    assert (plan.num_reused, plan.num_fixed) == (8, 0)


def test_text_behind_images_keeps_its_numbers_beside_records() -> None:
    """A record that is a parent links blocks of the pool again, as they were."""
    world = TieredPictures()
    world.run(world.arrive(FRONT, A, BEHIND))
    world.end_step()
    index = parts_of(world.side).index
    blocks = np.flatnonzero(index.nodes["born"][:64])
    before = {int(block): index.position_offsets_of(block[None]).tolist() for block in blocks}
    assert any(any(position_offsets) for position_offsets in before.values())
    catalogue = parts_of(world.side).tier.catalogue  # type: ignore[union-attr]
    for block in blocks.tolist():
        catalogue._link_block(block, SimpleNamespace(entry=-1))
        assert index.position_offsets_of(np.array([block])).tolist() == before[block]


def test_images_are_not_left_out_of_a_plan_that_would_be_less_work_without_them() -> None:
    """The pass would have to compute their tokens, of which it has no embeddings."""
    world = pictured()
    policy = {"extra_keys": "tests", "segreuse_policy": "focus", "segreuse_min_reused_tokens": 4}
    tracked = parts_of(world.side).planner.get(
        world.arrive(FRONT, A, BEHIND, options=policy).request_id
    )
    assert tracked is not None
    assert tracked.method.work is None
