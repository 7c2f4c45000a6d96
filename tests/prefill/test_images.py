# SPDX-License-Identifier: Apache-2.0
"""Passes over prompts with images: what the model is given, and what is never computed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.prefill.test_batch import CPU, plans
from tests.prefill.test_executor import NAN, RECIPES, pages, plan
from tests.prefill.tiny import LAYERS, SIZE, World
from vllm_segreuse.plan import Boundary, Image, Images, PlanOutcome, ReusePlan
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.selection import choose_tokens
from vllm_segreuse.prefill.tokens import Index

HELD = np.zeros(20, np.bool_)
HELD[2:7] = True  # within the first piece


def holding(**recipe: Any) -> ReusePlan:
    """A plan of 20 tokens behind a prefix hit of 4; those of an image are 6 to 10."""
    made = plan("one", 10, **recipe)
    return replace(made, recipe=made.recipe.fixing(HELD))


def test_the_model_is_given_numbers_where_any_prompt_has_images() -> None:
    text, pictured, third = plans()
    numbers = Images([Image(7, 2, 1)]).mrope_positions(pictured.start, pictured.stop + 1)
    pictured = replace(pictured, mrope_positions=numbers)
    batch = Batch([text, pictured, third], SIZE, CPU)
    indices = batch.tokens.positions
    first, stop = batch.bounds[1:3]
    assert batch.tokens.mrope_positions is not None
    for row, expected in zip(batch.tokens.mrope_positions, numbers, strict=True):
        assert row[:first].tolist() == indices[:first].tolist()
        assert row[first:stop].tolist() == expected[: stop - first].tolist()
        assert row[stop:].tolist() == indices[stop:].tolist()
    assert batch.tokens.mrope_positions.dtype == torch.int64
    some = batch.tokens.take(Index.known(np.array([0, first + 1, first + 3]), CPU))
    assert (
        some.rotary_positions.tolist()
        == batch.tokens.mrope_positions[:, [0, first + 1, first + 3]].tolist()
    )
    # Slots, and what may be attended to, go by the index.
    assert some.positions.tolist() == indices[[0, first + 1, first + 3]].tolist()


def test_prompts_of_text_have_one_row() -> None:
    tokens = Batch(plans(), SIZE, CPU).tokens
    assert tokens.mrope_positions is None
    assert tokens.rotary_positions is tokens.positions


def test_no_token_of_an_image_is_chosen_whatever_its_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_segreuse.prefill.selection.get_tp_group",
        lambda: type("Alone", (), {"world_size": 1})(),
    )
    made = holding(program=Boundary(), top_k=5)
    batch = Batch([made], SIZE, CPU)
    scores = torch.zeros(len(batch.tokens))
    scores[: len(HELD)][torch.from_numpy(HELD)] = 9.0
    chosen = choose_tokens(batch, scores).chosen
    assert len(chosen) == made.recipe.top_k > 0
    assert not HELD[chosen.numpy()[chosen.numpy() < len(HELD)]].any()


@pytest.mark.parametrize("name", ["fixed", "boundary", "sum", "peak", "stock"])
def test_what_is_computed_again_in_full_leaves_images_as_they_were_moved(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = holding(**RECIPES[name])
    clean = World(monkeypatch)
    clean.prefill.run([made])
    world = World(monkeypatch)
    # A token that the image does not contain: 5, the first of the piece.
    donor = int(made.pieces.block[0])
    world.caches[0][donor, 0, :, 0] = NAN
    report = world.prefill.run([made])
    assert report.not_finite == ["one"]
    if made.reports:
        assert report.outcomes["one"] == PlanOutcome(made.num_tokens - 5)
    held = np.flatnonzero(HELD) + made.start
    for layer in range(LAYERS):
        one, other = pages(clean, made)[layer], pages(world, made)[layer]
        for position in held:
            block, offset = divmod(int(position), SIZE)
            assert torch.equal(one[block, :, :, offset], other[block, :, :, offset])
        assert other.isfinite().all()
