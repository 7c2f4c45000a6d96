# SPDX-License-Identifier: Apache-2.0
"""Segments that a question looks up are read again: against a model that is computed in order, and
against plans in which these segments were never reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from segreuse_extras.states.again import ReadAgain
from segreuse_extras.states.layers import HeldStates, StateLayers
from segreuse_extras.states.messages import CaptureOrder, Placed
from segreuse_extras.states.prefill import CarriedOut, StatesPrefill
from segreuse_extras.states.question import Question
from tests.states.toy import BLOCK, REQUEST, VOCABULARY, Toy, plan_of
from vllm_segreuse.plan import ModelLayers, Pieces, Recipe, ReusePlan, fates_of

A, B, C = 0, 1, 2
LENGTHS = 20, 18, 14
GAPS = 6, 0, 7, 0
"""New text in front of A, between A and B, between B and C, and behind."""
QUESTION = 9
DONOR, OWN = np.arange(1, 20, dtype=np.int32), np.arange(24, 40, dtype=np.int32)[::-1].copy()


class Prompt:
    """Three documents that were read elsewhere, and a question."""

    def __init__(self, max_tokens: int = 1000) -> None:
        rng = np.random.default_rng(2)

        def text(count: int) -> np.ndarray:
            return rng.integers(0, VOCABULARY, count, dtype=np.int32)

        self.toy = Toy(max_tokens)
        documents = [text(length) for length in LENGTHS]
        parts, self.segments, at = [], [], 0
        for number, document in enumerate(documents):
            parts += [text(GAPS[number]), document]
            first = at + GAPS[number]
            at = first + len(document)
            self.segments.append(Placed(number, first, at))
        self.stop = at
        self.tokens = np.concatenate([*parts, text(QUESTION)])
        self._donate(documents, text)

    def _donate(self, documents: list[np.ndarray], text: Any) -> None:
        """Read the documents in another order, behind other text; their maps are noted."""
        parts, orders, self.at, at = [], [], {}, 0
        for number in (C, A, B):
            parts += [text(11), documents[number]]
            first = at + 11
            at = first + LENGTHS[number]
            self.at[number] = first
            orders.append(CaptureOrder(number, REQUEST, first, at))
        tokens = np.concatenate(parts)
        self.toy.run(plan_of(tokens, DONOR, at, Pieces.from_table([])), (), orders)
        assert self.toy.captures.take() is not None
        assert len(self.toy.captures.maps) == len(documents)

    def pieces(self, numbers: Sequence[int] = (A, B, C)) -> Pieces:
        rows = list[list[int]]()
        for number in numbers:
            first, stop = self.segments[number][1:]
            source = self.at[number]
            while first < stop:
                length = min(stop - first, BLOCK - source % BLOCK)
                block = int(DONOR[source // BLOCK])
                rows.append([first, length, block, source % BLOCK, source])
                first, source = first + length, source + length
        return Pieces.from_table(rows)

    def reading(
        self,
        may: Sequence[int],
        budget: int,
        most: int | None = None,
        start: int = 0,
        **more: Any,
    ) -> ReusePlan:
        """A plan that may read some of the documents again."""
        pieces = self.pieces()
        reused = pieces.reused(start, self.stop)
        spared = reused.copy()
        for number in may:
            _, first, stop = self.segments[number]
            spared[first - start : stop - start] = False
        recipe = Recipe.of(ReadAgain(budget), fates_of(~reused, None, spared), most or budget)
        return plan_of(self.tokens, OWN, self.stop, pieces, recipe, start, **more)

    def without(self, read: Sequence[int]) -> tuple[list[torch.Tensor], HeldStates]:
        """What is left where some of the documents are not reused at all: they are new text."""
        numbers = [number for number in (A, B, C) if number not in read]
        plan = plan_of(self.tokens, OWN, self.stop, self.pieces(numbers))
        _, states = self.toy.run(plan, [self.segments[number] for number in numbers])
        return self.toy.kv(OWN, 0, self.stop), states


def assert_equal(
    found: tuple[list[torch.Tensor], HeldStates],
    expected: tuple[list[torch.Tensor], HeldStates],
    tolerance: float = 1e-4,
) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    for held, wanted in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(held, wanted, rtol=tolerance, atol=tolerance)


def carried_out(prompt: Prompt, plan: ReusePlan) -> Any:
    for layer in prompt.toy.attention:
        layer.slots[torch.from_numpy(OWN).long()[:, None] * BLOCK + torch.arange(BLOCK)] = 0
    if plan.start:
        prompt.toy.read_prefix(prompt.tokens[: plan.start], OWN)
    report, states = prompt.toy.run(plan, prompt.segments)
    assert not report.not_finite
    return report.outcomes[REQUEST], (prompt.toy.kv(OWN, 0, prompt.stop), states)


NEW = sum(GAPS)
CASES: list[tuple[tuple[int, ...], int]] = [
    ((A,), GAPS[1] + GAPS[2]),
    ((B,), GAPS[2]),
    ((C,), 0),
    ((A, C), GAPS[1] + GAPS[2]),
    ((B, C), GAPS[2]),
    ((A, B, C), GAPS[1] + GAPS[2]),
]


@pytest.mark.parametrize(("max_tokens", "start"), [(1000, 0), (6, 0), (1000, 3), (1000, GAPS[0])])
@pytest.mark.parametrize(("read", "twice"), CASES)
def test_what_is_read_again_is_as_if_it_had_not_been_reused(
    read: tuple[int, ...], twice: int, max_tokens: int, start: int
) -> None:
    prompt = Prompt(max_tokens)
    count = sum(LENGTHS[number] for number in read)
    plan = prompt.reading(read, count, start=start, explains=True)
    outcome, found = carried_out(prompt, plan)
    assert_equal(found, prompt.without(read))
    assert outcome.computed == NEW + count - start
    assert outcome.again == twice
    positions = {p for number in read for p in range(*prompt.segments[number][1:])}
    assert positions <= {*outcome.positions}
    assert len(outcome.positions) == outcome.computed
    with pytest.raises(AssertionError):
        assert_equal(found, prompt.without([]))


def test_all_read_again_is_reading_in_order() -> None:
    prompt = Prompt()
    _, found = carried_out(prompt, prompt.reading((A, B, C), sum(LENGTHS)))
    whole = plan_of(prompt.tokens, OWN, prompt.stop, Pieces.from_table([]))
    _, states = prompt.toy.run(whole)
    assert_equal(found, (prompt.toy.kv(OWN, 0, prompt.stop), states))


def test_nothing_that_fits_leaves_what_shift_does() -> None:
    """The question's own state is lost."""
    prompt = Prompt()
    outcome, found = carried_out(prompt, prompt.reading((A, B, C), 5, min(LENGTHS) - 1))
    assert (outcome.computed, outcome.again, outcome.positions) == (NEW, 0, None)
    assert_equal(found, prompt.without([]), 0.0)


def test_the_question_looks_up_by_all_layers_and_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is one document's; which one, attention alone says: as much as the model itself
    pays where the question is new text of a plan."""
    prompt, asked = Prompt(max_tokens=4), list[list[float]]()
    to, compute = Question.to, StatesPrefill.compute_stretch

    def noted(question: Question, segments: Sequence[Placed]) -> list[float]:
        asked.append(to(question, segments))
        return asked[-1]

    monkeypatch.setattr(Question, "to", noted)
    outcome, _ = carried_out(prompt, prompt.reading((A, B, C), max(LENGTHS), explains=True))
    [paid] = asked

    def only_of_the_question(prefill: Any, plan: Any, first: int, stop: int, *more: Any) -> bool:
        for layer in prompt.toy.attention:
            layer.impl.paid.zero_()
        return compute(prefill, plan, first, stop, *more)

    monkeypatch.setattr(StatesPrefill, "compute_stretch", only_of_the_question)
    whole = plan_of(prompt.tokens, OWN, len(prompt.tokens), prompt.pieces())
    prompt.toy.run(whole, prompt.segments)
    by_position = sum(layer.impl.paid for layer in prompt.toy.attention)
    expected = [float(by_position[it.first : it.stop].sum()) for it in prompt.segments]
    np.testing.assert_allclose(paid, expected, rtol=1e-4)
    best = prompt.segments[int(np.argmax(paid))]
    assert {*range(best.first, best.stop)} <= {*outcome.positions}
    assert outcome.computed == NEW + best.stop - best.first


def test_the_last_tokens_of_a_long_question_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt(max_tokens=4)
    monkeypatch.setattr("segreuse_extras.states.question.QUESTION_TOKENS", 3)
    found = list[Question]()
    choose = Question.to
    monkeypatch.setattr(Question, "to", lambda *it: found.append(it[0]) or choose(*it))
    carried_out(prompt, prompt.reading((A, B, C), max(LENGTHS)))
    [question] = found
    heads = sum(layer.num_heads for layer in prompt.toy.attention)
    assert question.is_sound
    assert float(question.paid.sum()) == pytest.approx(3 * heads, rel=1e-4)


def test_what_is_no_number_once_it_is_read_again() -> None:
    """What was moved is one."""
    prompt = Prompt()
    segment = prompt.segments[B]
    inside = prompt.tokens[segment.first : segment.stop]
    [token, *_] = (
        set(inside.tolist())
        - {*prompt.tokens[: segment.first].tolist()}
        - {*prompt.tokens[segment.stop :].tolist()}
    )
    prompt.toy.embedding[token] = torch.nan
    shift = plan_of(prompt.tokens, OWN, prompt.stop, prompt.pieces())
    assert not prompt.toy.run(shift, prompt.segments)[0].not_finite
    report, _ = prompt.toy.run(prompt.reading((B,), LENGTHS[B]), prompt.segments)
    assert report.not_finite == [REQUEST]


def test_a_layer_that_was_not_asked_costs_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = Prompt()
    monkeypatch.setattr(Question, "chunk_of", lambda *_: None)
    report, _ = prompt.toy.run(prompt.reading((A, B, C), 30), prompt.segments)
    assert report.not_finite == [REQUEST]


def test_what_is_no_number_is_computed_in_full_with_the_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt, finite, carry_out = Prompt(), list[bool](), StatesPrefill.carry_out

    def noted(prefill: StatesPrefill, plan: ReusePlan) -> CarriedOut:
        carried = carry_out(prefill, plan)
        finite.append(carried.finite)
        return carried

    monkeypatch.setattr(StatesPrefill, "carry_out", noted)
    assert prompt.stop % BLOCK, "the question begins in the plan's last block"
    for layer in prompt.toy.attention:
        layer.slots[DONOR[prompt.at[A] // BLOCK] * BLOCK + prompt.at[A] % BLOCK] = torch.nan
    report, states = prompt.toy.run(prompt.reading((B,), LENGTHS[B]), prompt.segments)
    assert finite == [False, True]
    assert report.not_finite == [REQUEST]
    assert report.outcomes[REQUEST].computed == prompt.stop
    assert report.outcomes[REQUEST].again == 0
    kv = prompt.toy.kv(OWN, 0, prompt.stop)
    behind = prompt.toy.kv(OWN, prompt.stop, len(prompt.tokens))
    assert all(it.isfinite().all() for it in behind)
    whole = plan_of(prompt.tokens, OWN, prompt.stop, Pieces.from_table([]))
    _, expected = prompt.toy.run(whole)
    assert_equal((kv, states), (prompt.toy.kv(OWN, 0, prompt.stop), expected))


def test_maps_are_noted_once_and_not_of_a_question_that_vllm_reads() -> None:
    prompt = Prompt()
    between = CaptureOrder(7, REQUEST, prompt.segments[B].stop, prompt.segments[C].first)
    asked = CaptureOrder(8, REQUEST, prompt.stop, len(prompt.tokens))
    shift = plan_of(prompt.tokens, OWN, prompt.stop, prompt.pieces())
    prompt.toy.run(shift, prompt.segments, [between])
    prompt.toy.captures.take()
    expected = prompt.toy.captures.maps.pop(7)
    again = prompt.reading((A, B), LENGTHS[A] + LENGTHS[B])
    prompt.toy.run(again, prompt.segments, [between, asked])
    found = prompt.toy.captures.take()
    assert found is not None
    assert (found.complete, found.failed) == ((7,), ())
    for mine, theirs in zip(prompt.toy.captures.maps[7], expected, strict=True):
        assert torch.equal(mine.added, theirs.added)
    # As vLLM's forward does.
    prompt.toy.prefill.compute_stretch(again, prompt.stop, len(prompt.tokens))
    found = prompt.toy.captures.take()
    assert found is not None
    assert found.complete == (8,)


def test_a_wrong_state_in_front_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above notice what they are about."""
    prompt = Prompt()
    monkeypatch.setattr(StateLayers, "restore", lambda *_: None)
    _, found = carried_out(prompt, prompt.reading((B,), LENGTHS[B]))
    with pytest.raises(AssertionError):
        assert_equal(found, prompt.without([B]))


def test_the_report_counts_what_is_computed_twice() -> None:
    prompt = Prompt()
    plan = prompt.reading((A, B, C), 20, explains=True)
    outcome, _ = carried_out(prompt, plan)
    layers = ModelLayers.of_full_attention(4)
    read = outcome.computed - NEW
    assert plan.recomputed_after(outcome) == read
    computed = NEW + read + outcome.again + 2 * QUESTION
    share = plan.computed_share(layers, len(prompt.tokens), outcome)
    assert share == round(computed / len(prompt.tokens), 4)
    assert plan.active_tokens == 2 * NEW + 20 + QUESTION
