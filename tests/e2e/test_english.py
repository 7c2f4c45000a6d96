# SPDX-License-Identifier: Apache-2.0
"""`bench english` on a real engine: a model with random weights, whose answers mean nothing.
And what `bench agents` measures in the same way."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.agents import arms as agents_arms
from bench.agents import distance, traces
from bench.agents.tokens import Tokens
from bench.english import demo, donors
from bench.english.arms import Arm, arm
from bench.english.engine import EXACT_DONORS, Lab, english_engine
from bench.english.records import Outcome
from bench.english.tasks import draw
from bench.quality import seeds
from bench.reuse.decoder import Decoder
from bench.reuse.ingestion import SOURCES
from bench.reuse.leads import lead, levelled_scores
from bench.reuse.records import Outcome as LabOutcome
from bench.reuse.scene import Scene, in_full
from bench.shapes import make_model
from tests.e2e.engine import quick_start
from vllm_segreuse.prefill.batch import Batch
from vllm_segreuse.prefill.programs import probed
from vllm_segreuse.prefill.selection import Choice, choose_tokens

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(
        "engines of a benchmark, of real language", instead="bench/test_english_run e2e/test_lab"
    ),
]

ARMS = [arm(name) for name in ("default", "shift", "all")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch:
        # The suite wants vLLM quiet, and vLLM reads that once: other modules look at its log.
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        options = {**EXACT_DONORS, "similarity": {"by_default": False}}
        with quick_start(), english_engine(make_model("llama"), 1, segreuse=options) as started:
            yield started


@pytest.mark.parametrize("kind", donors.DONORS)
def test_documents_are_reused_and_full_recomputation_is_full_prefill(lab: Lab, kind: str) -> None:
    drawn = draw("pronoun", 0, seeds.rng("tuning", "pronoun", 1), lab.prompts.measure)
    full = lab.full(drawn)
    assert 0 < len(full.logits) == full.outcome.tokens <= 32
    outcomes = lab.reuse(drawn, full, kind, ARMS, seeds.rng("tuning", kind, 0))
    for outcome in outcomes.values():
        assert outcome.reused > 0.9
        assert outcome.ttft_ms > 0
    assert outcomes["shift"].policy == "shift"
    assert outcomes["shift"].work < outcomes["default"].work < 0.6
    assert [*outcomes] == ["default", "shift", "all"]
    assert outcomes["all"].answer_kl < min(0.005, outcomes["shift"].answer_kl)
    assert outcomes["all"].work > 0.9


def test_arms_that_decode_together_answer_as_each_by_itself(lab: Lab) -> None:
    drawn = draw("needles", 0, seeds.rng("tuning", "needles", 2), lab.prompts.measure)
    full = lab.full(drawn)

    def ask(*arms: Arm) -> dict[str, Outcome]:
        return lab.reuse(drawn, full, "reversed", arms, seeds.rng("tuning", "reversed", 0))

    alone = {one.name: ask(one)[one.name] for one in ARMS}
    for name, outcome in ask(*ARMS).items():
        assert outcome.work == alone[name].work
        assert outcome.first_kl == pytest.approx(alone[name].first_kl, abs=1e-3)
        assert outcome.answer_kl == pytest.approx(alone[name].answer_kl, abs=1e-3)


def test_what_is_forced_is_what_free_decoding_says(lab: Lab) -> None:
    """One request gives the answer and its distributions: the second may be spared."""
    drawn = draw("logs", 0, seeds.rng("tuning", "logs", 1), lab.prompts.measure)
    full = lab.full(drawn)
    asked = lab.prompts.prompt(drawn.documents, drawn.question), drawn.answer_tokens, None
    again = lab.ask(*asked, forced=full.tokens, salt="again")
    assert again.tokens == full.tokens
    assert [int(one.argmax()) for one in again.logits] == list(full.tokens)
    other = [token + 1 for token in full.tokens]
    assert list(lab.ask(*asked, forced=other, salt="other").tokens) == other


def test_the_demo_shows_answers_of_a_knowledge_base(lab: Lab) -> None:
    asked = list(demo.converse(lab, 2))
    assert [one.example.task for one in asked] == [*demo.TASKS[:2]]
    for one in asked:
        assert [*one.outcomes] == ["full", "default", "shift"]
        assert one.outcomes["shift"].work < one.outcomes["default"].work < 0.6
        assert one.outcomes["default"].drift is not None
        assert max(map(len, demo.described(one).splitlines())) <= demo.WIDTH
    assert demo.summed_up(asked).startswith("segreuse demo ok: speedup=")


def test_similar_text_of_agents_is_reused_and_recomputing_it_is_full_prefill(lab: Lab) -> None:
    trace = traces.draw("clock", 0, "tuning")
    trace = replace(trace, requests=trace.requests[:6])  # two steps of each user
    arms = agents_arms.find(["content", "similar", "similar-all"])
    apart = [one for found in distance.measure(lab, trace, arms) for one in found]
    assert len(apart) == 18
    content, similar, everything = ([it for it in apart if it.arm == arm.name] for arm in arms)
    tokens = [sum((it.tokens for it in mine), Tokens()) for mine in (content, similar)]
    assert tokens[0].similar == 0 < tokens[1].similar
    assert tokens[0].equal > 0
    assert tokens[1].shares()["new"] < tokens[0].shares()["new"]
    assert max(it.answer_kl for it in everything) < 0.005
    assert max(it.answer_kl for it in similar) > max(it.answer_kl for it in everything)


def test_the_laboratory_without_an_engine_chooses_as_the_engine_does(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw("contracts", 0, seeds.rng("tuning", "contracts", 3), lab.prompts.measure)
    chosen: list[list[int]] = []

    def noted(batch: Batch, *args: Any) -> Choice:
        choice = choose_tokens(batch, *args)
        chosen.append((choice.chosen + batch.plans[0].start).tolist())
        return choice

    monkeypatch.setattr(probed, "choose_tokens", noted)
    full = lab.full(drawn)
    arms = {0.0: arm("shift"), 0.15: arm("focus:recompute_ratio=0.15")}
    rng = seeds.rng("tuning", "siblings", 0)
    outcomes = lab.reuse(drawn, full, "siblings", list(arms.values()), rng)
    mine = set(chosen[0])

    decoder = Decoder.load(make_model("llama"), torch.bfloat16)
    asked = in_full(decoder, lab.prompts, drawn)
    scene = Scene(decoder, asked, SOURCES["siblings"](decoder, lab.prompts, drawn, tuple, rng))
    assert asked.answer[0] == full.tokens[0]
    same = set(scene.best(levelled_scores(scene), len(mine)).tolist())
    assert len(mine & same) > 0.95 * len(mine)
    # Of how far they are off: bfloat16 rounds numbers of either in its own way.
    close = 0.2 * outcomes["shift"].first_kl
    for share, one in arms.items():
        named = lead("default" if share else "shift")
        answered = named.lead(scene, round(share * scene.num_reused))
        found = LabOutcome.of(asked, answered.logits, score=1.0)
        assert found.first_kl == pytest.approx(outcomes[one.name].first_kl, abs=close)
