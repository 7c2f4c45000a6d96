# SPDX-License-Identifier: Apache-2.0
"""The bundled model: it solves its tasks in full, plain reuse breaks it, and policies mend it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import yaml

from bench.quality import page
from bench.quality.condensed import Dropped
from bench.quality.engine import FULL, MODEL, Arm, Lab, lab_engine
from bench.quality.tasks import example
from bench.quality.workers import Alone, Workers
from bench.suites import link, quality
from segreuse_tools.calibrate.search import divergence
from tests.e2e.engine import quick_start

pytestmark = pytest.mark.e2e

SHIFT = Arm("shift", {"policy": "shift"})
FOCUS = Arm("focus", {"policy": "focus", "recompute_ratio": 0.1})


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with quick_start(), lab_engine() as started:
        yield started


def test_hops_across_documents_need_recomputation(lab: Lab) -> None:
    asked = [example("vt", Random(seed), tokens=1024) for seed in range(40)]
    hops = [drawn for drawn in asked if drawn.kind != "hop 1"][:8]
    scores = {arm.name: 0.0 for arm in (FULL, SHIFT, FOCUS)}
    apart = dict(scores)
    for drawn in hops:
        outcomes = lab.ask(drawn, [FULL, SHIFT, FOCUS])
        for name, outcome in outcomes.items():
            scores[name] += outcome.score / len(hops)
            apart[name] += divergence(outcomes["full"].first, outcome.first) / len(hops)
            if name != "full":
                assert outcome.reused > 0.9
                assert outcome.work < 0.25
    assert scores["full"] == 1
    assert scores["shift"] <= 0.25
    assert apart["shift"] > 1
    assert scores["focus"] == 1
    assert apart["focus"] < 0.05


def test_a_run_becomes_a_page(lab: Lab, tmp_path: Path) -> None:
    arms = (FULL, SHIFT, quality.Arm("hybrid", {"policy": "sparsex", "dense_layers": 2}))
    load = quality.Load(("vt",), 3, arms)
    results = quality.ask_all(Alone(lab), load)
    rows, summary = quality.figures(results, arms)
    assert {row["samples"] for row in rows if row["task"] == "vt"} == {3}
    drawn = results["vt"][0][0]
    computed = lab.computed_tokens(drawn, list(arms))
    counts = computed["hybrid"]
    assert (counts[:2, :-1] == 1).all(), "dense layers compute every token once"
    assert counts[2:].sum() < counts[:2].sum()
    where = {"date": "-", "cpu": "-", "cores": 2, "vllm": "-", "commit": "-"}
    file = tmp_path / "page.html"
    page.write(file, where, {"rows": rows, "summary": summary}, drawn, computed)
    text = file.read_text()
    assert text.count("<svg") == 2
    for row in rows:
        assert f"{row['accuracy']:.3f}" in text


@pytest.mark.slow("two engines of a benchmark", instead="e2e/test_lab")
def test_engines_side_by_side_answer_as_one_does(lab: Lab) -> None:
    load = quality.Load(("vt", "fwe"), 2, (FULL, SHIFT))
    with Workers() as workers:
        together = quality.ask_all(workers, load)
    one_by_one = quality.ask_all(Alone(lab), load)
    assert together.keys() == one_by_one.keys() == set(load.tasks)
    for task, asked in together.items():
        assert [drawn for drawn, _ in asked] == [drawn for drawn, _ in one_by_one[task]]
        for (_, theirs), (_, ours) in zip(asked, one_by_one[task], strict=True):
            assert [theirs[a.name].score for a in load.arms] == [
                ours[a.name].score for a in load.arms
            ]


@pytest.mark.slow("a figure of the lab", instead="e2e/test_compressed")
def test_half_of_each_document_is_kept(lab: Lab) -> None:
    drawn = link.draw_all("tuning", 1)
    dropped = Dropped(lab.llm, 0.5)
    found = dropped.ask(drawn)
    assert 0.5 <= dropped.documents.held_share < 0.53
    assert all(one.work < 0.3 for one in found)


@pytest.mark.slow(
    "a program and an engine of its own", instead="calibrate/test_cli e2e/test_policies"
)
def test_calibration_picks_what_holds_on_other_prompts(tmp_path: Path) -> None:
    lines = []
    for seed in range(12):
        drawn = example("vt", Random(seed), tokens=512)
        parts = {
            "prefix": " ".join(drawn.prefix),
            "segments": [" ".join(document) for document in drawn.documents],
            "suffix": " ".join(drawn.suffix),
        }
        lines.append(json.dumps(parts))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "segreuse.yaml"
    prompts.write_text("\n".join(lines))
    command = [sys.executable, "-m", "segreuse_tools", "calibrate", str(MODEL)]
    command += ["--prompts", str(prompts), "--out", str(out), "--max-kl", "1.5"]
    command += ["--min-agreement", "0.6", "--enforce-eager", "--block-size", "32"]
    done = subprocess.run(
        [*command, "--max-model-len", "2048"],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert yaml.safe_load(out.read_text())["policy"] != "shift"
    assert "on the prompts it was not chosen by " in done.stdout
