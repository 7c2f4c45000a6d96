# SPDX-License-Identifier: Apache-2.0
"""`bench english` on a real engine: a model with random weights, whose answers mean nothing."""

from collections.abc import Iterator

import pytest

from bench.english import demo, donors
from bench.english.arms import arm
from bench.english.engine import Lab, english_engine
from bench.english.tasks import draw
from bench.quality import seeds
from bench.shapes import make_model

pytestmark = pytest.mark.e2e

ARMS = [arm(name) for name in ("default", "shift", "all")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch:
        # The suite wants vLLM quiet, and vLLM reads that once: other modules look at its log.
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        with english_engine(make_model("llama"), kv_space_gib=1) as started:
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


def test_what_is_forced_is_what_free_decoding_says(lab: Lab) -> None:
    """One request gives the answer and its distributions: the second may be spared."""
    drawn = draw("logs", 0, seeds.rng("tuning", "logs", 1), lab.prompts.measure)
    full = lab.full(drawn)
    again = lab._ask(drawn, None, forced=full.tokens, salt="again")
    assert again.tokens == full.tokens
    assert [int(one.argmax()) for one in again.logits] == list(full.tokens)
    other = [token + 1 for token in full.tokens]
    assert list(lab._ask(drawn, None, forced=other, salt="other").tokens) == other


def test_the_demo_shows_answers_of_a_knowledge_base(lab: Lab) -> None:
    asked = list(demo.converse(lab, 2))
    assert [one.example.task for one in asked] == [*demo.TASKS[:2]]
    for one in asked:
        assert [*one.outcomes] == ["full", "default", "shift"]
        assert one.outcomes["shift"].work < one.outcomes["default"].work < 0.6
        assert one.outcomes["default"].drift is not None
        assert max(map(len, demo.described(one).splitlines())) <= demo.WIDTH
    assert demo.summed_up(asked).startswith("segreuse demo ok: speedup=")
