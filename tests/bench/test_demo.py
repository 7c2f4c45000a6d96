# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench import demo

REPORT = {"policy": "sparsex", "reused_tokens": 8900, "recomputed_tokens": 890}


class _Server:
    """An OpenAI client and a server in one: streams two chunks, the last with the report."""

    def __init__(self, report: dict[str, Any] | None) -> None:
        self.report = report
        self.prompts: list[tuple[str, bool]] = []
        self.completions = SimpleNamespace(create=self._complete)
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._chat))

    def _complete(self, prompt: str, extra_body: dict[str, Any], **_: Any) -> Any:
        assert extra_body["extra_keys"] == demo.EXTRA_KEYS
        return SimpleNamespace(usage=SimpleNamespace(prompt_tokens=2225))

    def _chat(
        self, messages: list[dict[str, str]], extra_body: dict[str, Any] | None, **_: Any
    ) -> Any:
        self.prompts.append((str(messages), extra_body is not None))
        extra = {"kv_transfer_params": {"segreuse": self.report}} if extra_body else {}
        usage = SimpleNamespace(prompt_tokens=8960)
        yield SimpleNamespace(usage=None, choices=[], model_extra={})
        yield SimpleNamespace(usage=usage, choices=[], model_extra=extra if self.report else {})


def _converse(report: dict[str, Any] | None) -> tuple[_Server, list[demo.Asked]]:
    server = _Server(report)
    asked = demo.ask_all(Console(quiet=True), demo.Library(server, "model", policy=None))
    return server, asked


def test_last_line_counts_what_was_reused(capsys: pytest.CaptureFixture[str]) -> None:
    _, asked = _converse(REPORT)
    demo.show(Console(width=110), asked)
    *_, last = capsys.readouterr().out.splitlines()
    count = len(demo.QUESTIONS)
    assert last.startswith("segreuse demo ok: speedup=")
    assert last.endswith(f"x reused={8900 * count} of {8960 * count} prompt tokens")


def test_the_result_has_the_median_of_the_questions_and_their_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, asked = _converse(REPORT)
    speedups = [2.0, 3.0, 4.0, 6.0, 7.0, 90.0]
    timed = [
        row._replace(plain=row.plain._replace(ttft_s=by), reused=row.reused._replace(ttft_s=1.0))
        for row, by in zip(asked, speedups, strict=True)
    ]
    monkeypatch.setattr(demo, "converse", lambda *_: timed)
    assert demo.main(["--json", str(tmp_path / "demo.json")]) == 0
    assert "speedup=5.0x" in capsys.readouterr().out
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["suite"] == "demo"
    assert written["environment"]["commit"]
    assert written["summary"] == {
        "speedup": 5.0,
        "speedup_low": 2.0,
        "speedup_high": 90.0,
        "reused_share": 8900 / 8960,
        "questions": 6,
    }
    assert {row["execution"] for row in written["rows"]} == {"eager"}


def test_every_prompt_is_asked_both_ways_and_begins_anew() -> None:
    server, asked = _converse(REPORT)
    assert len(server.prompts) == 2 * len(demo.QUESTIONS)
    beginnings = {prompt[:80] for prompt, _ in server.prompts}
    assert len(beginnings) == len(server.prompts)
    first_ways = [with_reuse for _, with_reuse in server.prompts[::2]]
    assert first_ways.count(True) == first_ways.count(False)
    assert len({row.order for row in asked}) > 1


@pytest.mark.parametrize(
    ("report", "complaint"),
    [
        (None, "segment reuse is off"),
        (REPORT | {"reused_tokens": 0}, "too few were reused"),
    ],
)
def test_no_reuse_is_a_failure(report: dict[str, Any] | None, complaint: str) -> None:
    with pytest.raises(demo.DemoError, match=complaint):
        _converse(report)


def test_a_failure_is_one_sentence_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any) -> None:
        raise demo.DemoError("segment reuse is off")

    monkeypatch.setattr(demo, "converse", fail)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "segreuse demo failed: segment reuse is off\n"


def test_passages_come_with_every_supported_python() -> None:
    texts = dict(demo.shapes.passages())
    assert all(len(texts[topic]) > 4000 for topic in demo.TOPICS)
