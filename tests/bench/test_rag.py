# SPDX-License-Identifier: Apache-2.0
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import shapes
from bench.harness import BenchError
from bench.suites import rag
from examples.rag import library
from examples.rag.chat import Answer
from tests.knowledge.served import FAULT, TOKEN, Served
from tests.knowledge.served import served as serving

REPORT = {"policy": "sparsex", "prefix_tokens": 0, "reused_tokens": 10**6, "recomputed_tokens": 9}


class _Served:
    """In the place of a server: real routes of knowledge bases, and a stub of the OpenAI client."""

    def __init__(self, bases: Served) -> None:
        self.url, self.model_name = bases.url, "m"
        self.sent: list[dict[str, Any]] = []
        self.report: dict[str, Any] | None = REPORT
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def __enter__(self) -> "_Served":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to stop."""

    def client(self, **options: Any) -> "_Served":
        return self

    def _create(self, messages: Any, extra_body: dict[str, Any], **_: Any) -> Iterator[Any]:
        self.sent.append({"messages": messages, **extra_body})
        report = {"kv_transfer_params": {"segreuse": self.report}} if self.report else {}
        yield SimpleNamespace(usage=None, choices=[], model_extra={})
        yield SimpleNamespace(
            usage=SimpleNamespace(prompt_tokens=3000),
            choices=[],
            model_extra=report if "extra_keys" in extra_body else {},
        )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer that takes every word for a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def bases() -> Iterator[Served]:
    with serving() as bases:
        yield bases


@pytest.fixture
def served(bases: Served, model: Path, monkeypatch: pytest.MonkeyPatch) -> _Served:
    served = _Served(bases)
    monkeypatch.setattr(shapes, "make_model", lambda name: model)
    monkeypatch.setattr(rag, "Server", lambda *args, **options: served)
    monkeypatch.setattr(rag.secrets, "token_hex", lambda: TOKEN)
    return served


def test_summary_has_the_documented_figures(served: _Served, bases: Served) -> None:
    result = rag.run(quick=True)
    assert list(result["summary"])[:3] == ["ttft_ratio_p50", "ttft_ratio_p99", "reused_share"]
    assert result["summary"]["reused_share"] == 1, "never more than the passages"
    assert [row["arm"] for row in result["rows"]] == ["plain", "reuse"]
    topics = library.python_topics().values()
    short = [text for text in topics if len(text) <= rag.QUICK.longest_document_chars]
    assert result["summary"]["documents"] == len(short) > 30
    assert len(bases.engine.pool.warm()) == len(set(short)), "equal texts are stored once"


def test_both_arms_send_the_same_prompts_and_take_turns(served: _Served) -> None:
    rag.run(quick=True)
    measured = served.sent[2 * rag.CONCURRENCY :]
    by_arm = {
        arm: [str(body["messages"]) for body in measured if options.items() <= body.items()]
        for arm, options in rag.ARMS.items()
    }
    assert sorted(by_arm["plain"]) == sorted(by_arm["reuse"])
    assert len(set(by_arm["plain"])) == rag.QUICK.questions
    arms = ["plain" if "cache_salt" in body else "reuse" for body in measured]
    assert [arm for arm, _ in itertools.groupby(arms)] == ["plain", "reuse", "plain"]
    # What warms up must not be found again by the prefix cache.
    assert not any("Warm up." in prompt for prompt in by_arm["plain"])
    assert all("Warm up." in str(body["messages"]) for body in served.sent[: 2 * rag.CONCURRENCY])


def test_prompts_hold_eight_passages_in_random_order(model: Path) -> None:
    documents = library.python_topics()
    prompts = rag.prompts_of(model, documents, library.questions())
    found = library.Library(documents)
    ranked = [found.search(question, rag.PASSAGES) for question in library.questions()]
    for prompt, passages in zip(prompts, ranked, strict=True):
        content = prompt.messages[1]["content"]
        assert len(passages) == rag.PASSAGES
        assert all(passage.text in content for passage in passages)
        assert prompt.passage_tokens == sum(len(passage.text.split()) for passage in passages)
    first = [
        prompt.messages[1]["content"].startswith(p[0].text)
        for prompt, p in zip(prompts, ranked, strict=True)
    ]
    assert 0 < sum(first) < len(first) // 2


def test_ratios_are_of_percentiles_and_the_share_of_passage_tokens() -> None:
    prompts = [rag.Prompt([], 100)] * 50
    plain = [Answer(float(n), 150, "", None) for n in range(1, 51)]
    report = REPORT | {"reused_tokens": 90, "recomputed_tokens": 18}
    reuse = [Answer(n / 4, 150, "", report) for n in range(1, 51)]
    ingested = rag.Ingested(10, 5000, 2.0)
    answers = {"plain": plain, "reuse": reuse}
    summary = rag.result_of(rag.FULL, ingested, prompts, answers)["summary"]
    assert summary["ttft_ratio_p50"] == pytest.approx(0.25)
    assert summary["ttft_ratio_p99"] == pytest.approx(0.25)
    assert summary["reused_share"] == pytest.approx(0.9)
    assert summary["recomputed_share"] == pytest.approx(0.2)
    assert summary["ingest_tokens_per_s"] == 2500
    # One slow answer in fifty is the 99th percentile's business, not the median's.
    reuse[7] = reuse[7]._replace(ttft_s=400.0)
    summary = rag.result_of(rag.FULL, ingested, prompts, answers)["summary"]
    assert summary["ttft_ratio_p50"] < 0.27
    assert summary["ttft_ratio_p99"] > 3


def test_a_request_without_report_is_refused(served: _Served) -> None:
    served.report = None
    with pytest.raises(BenchError, match="'reuse' was reported as None"):
        rag.run(quick=True)


def test_documents_that_cannot_be_reused_are_refused(
    served: _Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "python_topics", lambda: {"a": FAULT} | {"b": "x\n\n" * 99})
    with pytest.raises(
        BenchError, match=r"1 of 2 documents cannot be reused .* a is failed \(it could not"
    ):
        rag.run(quick=True)


def test_a_server_without_knowledge_bases_is_an_error(served: _Served, bases: Served) -> None:
    bases.failures = [404]
    with pytest.raises(BenchError, match="has no knowledge bases"):
        rag.run(quick=True)
