# SPDX-License-Identifier: Apache-2.0
"""Documents computed alone that vLLM has evicted come back from the second tier, not by prefill."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from segreuse_extras.trained.cold_documents import PREFIX
from tests.e2e.engine import BLOCK_SIZE, Answer, Engine, Prompts, engine
from tests.e2e.isolated_models import Reference, make_isolated, prompt_of
from tests.e2e.stepping import drain
from tests.e2e.test_tier import ARGUMENTS, IDLE, NOISE, counts, evict
from tests.e2e.test_tier_restart import wait_for_files
from vllm_segreuse.scheduling.reporting import Accounts
from vllm_segreuse.scheduling.tracked import Report
from vllm_segreuse.serve.offline import KnowledgeBase

LINK_TOKENS = 1
MINE = {"extra_keys": ["mine"]}
LENGTHS = (70, 3 * BLOCK_SIZE - 2, 41)

pytestmark = pytest.mark.slow(
    "from the second tier", instead="e2e/test_isolated_documents e2e/test_tier"
)


class Asker:
    """Prompts about the same documents, and what computing these has cost."""

    def __init__(self) -> None:
        self.reference = Reference(make_isolated(LINK_TOKENS), "float32")
        self.text = Prompts(8000, seed=21)
        self.documents = [self.text.tokens(length) for length in LENGTHS]
        self.alone: list[Report] = []

    def ask(self, running: Engine, *numbers: int, options: dict[str, Any] = MINE) -> Answer:
        self.alone.clear()
        documents = [self.documents[number] for number in numbers]
        layout = self.reference.layout
        prompt = prompt_of(layout, self.text.tokens(9), documents, self.text.tokens(12))
        (answer,) = running.ask(prompt, options=options, max_tokens=32, ignore_eos=True)
        found = [step[token] for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        wanted = self.reference.logprobs(prompt, answer.token_ids)
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) <= NOISE
        assert answer.report["reused_tokens"] == sum(map(len, documents)) + 2 * len(documents)
        return answer


@pytest.fixture
def asker(monkeypatch: pytest.MonkeyPatch) -> Asker:
    made, admitted = Asker(), Accounts.admitted

    def note(self: Accounts, tracked: Any, request: Any, report: Report) -> None:
        if request.request_id.startswith(PREFIX):
            made.alone.append(report)
        admitted(self, tracked, request, report)

    monkeypatch.setattr(Accounts, "admitted", note)
    return made


@contextmanager
def started(**tier: object) -> Iterator[Engine]:
    options = {"tier": {"host_gib": 0.008, **tier}}
    model = str(make_isolated(LINK_TOKENS))
    with engine("qwen3", model=model, segreuse=options, **ARGUMENTS) as running:
        yield running
        drain(running)
        assert counts(running) | IDLE == counts(running), "rows are still held"


def padded(*numbers: int) -> int:
    """Tokens of documents with start, end and padding: whole blocks."""
    return sum(-(-(LENGTHS[number] + 2) // BLOCK_SIZE) * BLOCK_SIZE for number in numbers)


def test_evicted_documents_are_restored_from_host_memory(asker: Asker) -> None:
    with started() as running:
        asker.ask(running, 0, 1)
        assert [report.tiered_tokens for report in asker.alone] == [0, 0]
        evict(running, asker.text)
        asker.ask(running, 2, 1, 0)
        restored = sum(report.tiered_tokens for report in asker.alone)
        assert (len(asker.alone), restored) == (3, padded(0, 1)), "one of the three was never there"
        assert all(report.recomputed_tokens == 0 for report in asker.alone)
        evict(running, asker.text)
        asker.ask(running, 1, options={"extra_keys": ["others"]})
        assert [report.tiered_tokens for report in asker.alone] == [padded(1)], "whoever asks"
        evict(running, asker.text)
        asker.ask(running, 1, options={})
        assert [report.tiered_tokens for report in asker.alone] == [0], "but not without keys"
        running.check_idle()


def test_documents_of_a_knowledge_base_outlive_the_engine(asker: Asker, tmp_path: Path) -> None:
    files = {"path": str(tmp_path / "tier"), "disk_gib": 0.1, "wait_ms": 60_000}
    handbook = {"extra_keys": ["handbook"]}
    with started(**files) as running:
        base = KnowledgeBase(running.llm, "handbook")
        base.add({str(number): tokens for number, tokens in enumerate(asker.documents)})
        asker.ask(running, 1, 0, options=handbook)
        assert not asker.alone, "they are warm"
        wait_for_files(running, asker.text)
    with started(**files) as running:
        asker.ask(running, 0, 2, options=handbook)
        assert sum(report.tiered_tokens for report in asker.alone) == padded(0, 2)
