# SPDX-License-Identifier: Apache-2.0
"""`bench link`: figures are what they say, and prompts are laid out as models were trained."""

import json
from pathlib import Path

import pytest

from bench.harness import BenchError
from bench.quality import isolated, language, link_page, seeds
from bench.quality.isolated import Asked, Isolated, layout_of, prompt_of, untrained
from bench.quality.link_figures import ALL, figures
from bench.suites import link
from segreuse_extras.trained.layout import Layout

KINDS = [("vt", "hop 1"), ("vt", "hop 2")] * 100 + [("debate", "majority")] * 100
FULL = [Asked(1.0, 1.0, 4.0)] * 300
HALF = [Asked(float(number % 2), 0.1, None) for number in range(300)]
ANSWERS = {"full": FULL, "untrained": HALF, "link0": HALF, "link1": FULL, "link5": FULL}


def test_models_are_asked_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert link.bundled().keys() >= {"link5", "anchors50"}
    monkeypatch.setattr(link, "MODELS", tmp_path)
    assert link.bundled() == {}
    (tmp_path / "link0").mkdir()
    assert link.bundled() == {"link0": tmp_path / "link0"}


def test_arms_are_compared_with_full_prefill_and_in_their_order() -> None:
    rows, summary = figures(KINDS, ANSWERS)
    by_name = {(row["task"], row["policy"]): row for row in rows}
    whole = by_name[ALL, "link0"]
    assert (whole["samples"], whole["accuracy"], whole["difference"]) == (300, 0.5, -0.5)
    assert whole["verdict"] == "lower"
    assert (whole["ttft_ms"], by_name[ALL, "link5"]["ttft_ms"]) == (None, 4.0)
    assert by_name["vt, hop 1", "link0"]["accuracy"] == 0.0
    assert by_name["vt, hop 2", "link0"]["accuracy"] == 1.0
    assert "difference" not in by_name[ALL, "full"]
    assert summary["link1_less_link0"] == 0.5
    assert summary["link1_less_link0_verdict"] == "higher"
    assert summary["link5_less_link1_verdict"] == "equivalent"
    assert summary["link0_less_untrained_low"] < 0 < summary["link0_less_untrained_high"]
    assert summary["link0_low"] < summary["link0"] == 0.5 < summary["link0_high"]
    assert summary["comparisons"] == 4 * 5 + 3


def test_examples_are_those_of_their_seeds() -> None:
    drawn = link.draw_all("tuning", 2)
    assert [one.task for one in drawn] == [*link.TASKS, *link.TASKS]
    assert drawn == link.draw_all("tuning", 2)
    others = link.draw_all("reporting", 2)
    assert not {one.documents for one in drawn} & {one.documents for one in others}
    assert all(len(one.documents) == link.DOCUMENTS for one in drawn)
    assert seeds.SETS["tuning"] != seeds.SETS["reporting"]


def test_a_prompt_is_laid_out_with_links_behind_each_document() -> None:
    layout = Layout(90, 91, ((92, 93), (94, 95)))
    prompt = prompt_of(layout, [1], [[2, 3], [90, 4]], [5])
    assert prompt == [1, 90, 2, 3, 91, 92, 93, 90, 4, 91, 94, 95, 5]
    assert [tuple(span) for span in layout.spans(prompt)] == [(1, 5), (7, 10)]


def test_the_untrained_model_has_the_layout_with_words_it_knows(tmp_path: Path) -> None:
    layout = layout_of(untrained(tmp_path))
    assert (layout.start, layout.end) == tuple(language.encode(["<doc>", "<eos>"]))
    example = link.draw_all("tuning", 1)[0]
    documents = [language.encode(document) for document in example.documents]
    prompt = prompt_of(layout, language.encode(example.prefix), documents, [7])
    assert len(layout.spans(prompt)) == link.DOCUMENTS


def test_a_model_that_says_no_layout_is_refused() -> None:
    with pytest.raises(BenchError, match="was not trained on documents computed alone"):
        layout_of(isolated.MODEL)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match=r"docs/trained-models\.md"),
        isolated.isolated_engine(tmp_path, Isolated),
    ):
        pass


def test_examples_that_are_timed_come_first_one_by_one() -> None:
    drawn = link.draw_all("tuning", 20)
    parts = list(link.batches(drawn, 6, "x"))
    assert [len(part) for part, _ in parts] == [6, link.BATCH, len(drawn) - 6 - link.BATCH]
    assert [is_timed for _, is_timed in parts] == [True, False, False]


def test_the_page_shows_every_arm(tmp_path: Path) -> None:
    rows, summary = figures(KINDS, ANSWERS)
    where = {"date": "2026", "cpu": "C", "cores": 2, "vllm": "0", "commit": "abc"}
    result = {"rows": [*rows, {"mode": "full"}], "summary": summary | {"seeds": "tuning"}}
    link_page.write(tmp_path / "page.html", where, json.loads(json.dumps(result)))
    page = (tmp_path / "page.html").read_text()
    assert all(f">{arm}<" in page for arm in ANSWERS)
    assert "n = 300" in page
