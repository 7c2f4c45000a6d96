# SPDX-License-Identifier: Apache-2.0
"""Models trained on documents computed alone, against full prefill and against policies.

The lab's model is asked in full and under policies, on documents that were computed in other
prompts. The models trained from it that are in `models/` are asked the same examples, documents
computed alone; so is the lab's model itself, as `untrained`. `link5` and `anchors50` are part of
the repository; their READMEs say how `link0`, `link1` and `anchors75` are trained. Of `anchors50`
and `anchors75`, anchors stand for documents, half or a quarter as long; `keep50` and `keep25` are
the lab's model with that share of each document's tokens. `NAME_kv` is what is held of their KV.
All through the engine, in float32, on seeds that no training has seen. `max_logprob_difference` is
how far 32 served words are from the same model in plain torch with the mask written out, at most.

`ttft_saving_5k`: a prompt with ten documents of 500 tokens, known and in a new order, on the
8-layer shape with random weights; 1 less the ratio of medians, standard decoding in the same
engine, the two in turn. `BENCH_QUALITY_SEEDS=tuning` asks other examples, as in `bench quality`.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import engine, harness, shapes
from bench.quality import language, seeds
from bench.quality.condensed import AnchorReference, Condensed, Dropped
from bench.quality.engine import FULL, Arm, lab_engine
from bench.quality.isolated import (
    Asked,
    Isolated,
    Reference,
    generate_all,
    isolated_engine,
    layout_of,
    outcome,
    prompt_of,
    untrained,
)
from bench.quality.link_figures import figures
from bench.quality.tasks import Example, example
from segreuse_extras.trained.layout import Names
from vllm_segreuse.model.documents import KEY

MODELS = harness.REPOSITORY / "models"
TRAINED = ("link0", "link1", "link5")
CONDENSED = ("anchors50", "anchors75")
DROPPED = {"keep50": 0.5, "keep25": 0.25}
"""Share of the tokens that is kept of each document, by arm."""

ARMS = (
    FULL,
    Arm("shift", {"policy": "shift"}),
    Arm("focus", {"policy": "focus", "recompute_ratio": 0.1}),
    Arm("hybrid", {"policy": "sparsex", "dense_layers": 5, "recompute_ratio": 0.15}),
)
TASKS = ("vt", "two-hop qa", "mq-niah", "chat memory", "debate")
"""Those that are about single facts; counting is about the whole text, and was not trained."""
PROMPT_TOKENS = 320
"""Little more than what was trained on."""
DOCUMENTS = 3
"""Each longer than two blocks: policies find a document by whole blocks."""

BATCH = 80
DTYPE = "float32"
COLUMNS = (
    *("task", "policy", "samples", "accuracy", "low", "high", "difference"),
    *("p_holm", "verdict", "work", "ttft_ms"),
)

SPEED_DOCUMENTS = 10
SPEED_DOCUMENT_TOKENS = 500
SPEED_LINKS = 5


@dataclass(frozen=True)
class Load:
    """How much is asked.

    Attributes:
        samples: examples of each task.
        compared: examples whose log-probabilities are compared with the reference, for each model.
        timed: examples asked one after the other, for the time to the first token.
        rounds: of the two ways to the first token of 5,000 tokens.
    """

    samples: int
    compared: int
    timed: int
    rounds: int


FULL_LOAD = Load(100, 10, 20, 7)
QUICK_LOAD = Load(6, 2, 6, 6)


def run(quick: bool) -> harness.SuiteResult:
    """All arms (`quick`: 6 examples of each task)."""
    load = QUICK_LOAD if quick else FULL_LOAD
    which = seeds.chosen()
    drawn = draw_all(which, load.samples)
    answers = _of_policies(drawn, load.timed)
    with tempfile.TemporaryDirectory() as folder:
        models = {"untrained": untrained(Path(folder))}
        models |= bundled()
        worst, held = 0.0, {}
        for name, model in models.items():
            asks = Condensed if name in CONDENSED else Isolated
            with isolated_engine(model, asks, dtype=DTYPE) as served:
                answers[name], difference = _of_model(served, model, name, drawn, load)
                if isinstance(served, Condensed):
                    held[f"{name}_kv"] = round(served.documents.held_share, 4)
            worst = max(worst, difference)
        for name, keep in DROPPED.items():
            with lab_engine(dtype=DTYPE) as lab:
                dropped = Dropped(lab.llm, keep)
                answers[name] = [
                    one
                    for examples, is_timed in batches(drawn, load.timed, name)
                    for one in dropped.ask(examples, is_timed)
                ]
                held[f"{name}_kv"] = round(dropped.documents.held_share, 4)
        saving = first_token_saving(Path(folder), load.rounds)
    rows, summary = figures([(one.task, one.kind) for one in drawn], answers)
    rows += saving["rows"]
    summary |= {**saving["summary"], **held, "max_logprob_difference": worst, "seeds": which}
    return {"rows": rows, "summary": summary}


def bundled() -> dict[str, Path]:
    """Folders of the trained models that there are, by name."""
    folders = {name: MODELS / name for name in (*TRAINED, *CONDENSED)}
    return {name: path for name, path in folders.items() if path.is_dir()}


def draw_all(which: str, samples: int) -> list[Example]:
    """Examples of all tasks, the same for every arm."""
    return [
        example(task, seeds.rng(which, f"link {task}", number), PROMPT_TOKENS, DOCUMENTS)
        for number in range(samples)
        for task in TASKS
    ]


def batches(
    drawn: Sequence[Example], timed: int, name: str
) -> Iterator[tuple[Sequence[Example], bool]]:
    """Examples to be asked together, and whether one after the other; `timed` ones come first."""
    cuts = [0, *range(timed, len(drawn), BATCH), len(drawn)]
    for start, stop in harness.progress(list(pairwise(cuts)), name):
        yield drawn[start:stop], start == 0


def _of_policies(drawn: Sequence[Example], timed: int) -> dict[str, list[Asked]]:
    """Of the lab's model, by arm."""
    found: dict[str, list[Asked]] = {arm.name: [] for arm in ARMS}
    with lab_engine(dtype=DTYPE) as lab:
        for number, (examples, is_timed) in enumerate(batches(drawn, timed, "models/lab")):
            keys = [{"extra_keys": [f"example {number} {i}"]} for i in range(len(examples))]
            contexts = [
                (language.encode(context), given)
                for example, given in zip(examples, keys, strict=True)
                for context in example.contexts
            ]
            prompts, theirs = [list(part) for part in zip(*contexts, strict=True)]
            generate_all(lab.llm, prompts, [1] * len(prompts), theirs)
            # A full prefill leaves blocks behind that prefix caching finds: it comes last.
            for arm in (*harness.rotated(ARMS[1:], number), FULL):
                found[arm.name] += _of_arm(lab.llm, arm, examples, keys, is_timed)
            if not lab.llm.reset_prefix_cache():
                raise harness.BenchError("the prefix cache could not be reset")
    return found


def _of_arm(
    llm: Any,
    arm: Arm,
    examples: Sequence[Example],
    keys: Sequence[Mapping[str, Any]],
    is_timed: bool,
) -> list[Asked]:
    prompts = [language.encode(example.prompt) for example in examples]
    given = [None if arm.options is None else {**key, **arm.extra_args} for key in keys]
    words = [len(example.answer) for example in examples]
    found = []
    answers = generate_all(llm, prompts, words, given, is_timed)
    for asked, prompt, (output, ms) in zip(examples, prompts, answers, strict=True):
        work = 1.0
        if arm.options is not None:
            told = (output.kv_transfer_params or {}).get("segreuse")
            timed = engine.Timed(ms or 0, 0, output.num_cached_tokens, told)
            report = engine.require_reuse(timed, arm.options["policy"], len(prompt) // 4)
            work = report["computed_share"]
        elif output.num_cached_tokens:
            raise harness.BenchError(f"{output.num_cached_tokens} tokens of a full prefill cached")
        found.append(outcome(asked, output, ms, work))
    return found


def _of_model(
    served: Isolated, model: Path, name: str, drawn: Sequence[Example], load: Load
) -> tuple[list[Asked], float]:
    """Of a model with documents computed alone, and its distance from the reference."""
    reference = (AnchorReference if isinstance(served, Condensed) else Reference)(model)
    found: list[Asked] = []
    for examples, is_timed in batches(drawn, load.timed, name):
        found += served.ask(examples, is_timed)
    return found, max(served.difference(one, reference) for one in drawn[: load.compared])


def first_token_saving(folder: Path, rounds: int) -> harness.SuiteResult:
    """Time to the first token of about 5,000 tokens of documents, both ways."""
    model = _speed_model(folder / "speed")
    layout = layout_of(model)
    draw = random.Random(0)
    taken: dict[str, list[float]] = {"full": [], "link": []}

    def fresh(count: int) -> list[int]:
        return draw.choices(range(300, shapes.VOCAB_SIZE - 100), k=count)

    documents = [fresh(SPEED_DOCUMENT_TOKENS) for _ in range(SPEED_DOCUMENTS)]
    keys = {"extra_keys": ["bench-link"]}
    with engine.engine(model, segreuse=True, max_model_len=8192, enforce_eager=True) as llm:
        for turn in harness.progress(range(rounds + 1), "first token"):
            order = draw.sample(documents, len(documents))
            linked = prompt_of(layout, fresh(37), order, fresh(64))
            plain = [*fresh(37), *(token for one in order for token in one), *fresh(64)]
            ways: Sequence[tuple[str, list[int], Mapping[str, Any] | None]] = (
                ("full", plain, None),
                ("link", linked, keys),
            )
            for way, prompt, given in harness.rotated(ways, turn):
                timed = engine.first_token(llm, prompt, given)
                if way == "link":
                    engine.require_reuse(timed, "link", SPEED_DOCUMENTS * SPEED_DOCUMENT_TOKENS)
                if turn > 0:  # the first computes the documents
                    taken[way].append(timed.ms)
    rows = [
        {
            "shape": "bench8",
            "mode": way,
            "document_tokens": SPEED_DOCUMENTS * SPEED_DOCUMENT_TOKENS,
            "link_tokens": SPEED_LINKS if way == "link" else 0,
            "median_ms": harness.median(times),
            "min_ms": min(times),
            "max_ms": max(times),
            "rounds": len(times),
        }
        for way, times in taken.items()
    ]
    ratios = [mine / full for full, mine in zip(taken["full"], taken["link"], strict=True)]
    low, high = harness.median_interval(ratios)
    summary: dict[str, float | str] = {
        "ttft_saving_5k": round(1 - harness.median(ratios), 4),
        "ttft_saving_5k_low": round(1 - high, 4),
        "ttft_saving_5k_high": round(1 - low, 4),
    }
    return {"rows": rows, "summary": summary}


def _speed_model(folder: Path) -> Path:
    """The 8-layer shape, its last tokens those of the layout."""
    shutil.copytree(shapes.make_model("bench8"), folder)
    names = Names(
        link_tokens=SPEED_LINKS,
        max_documents=SPEED_DOCUMENTS,
        document_start="<|kv_start|>",
        document_end="<|kv_end|>",
        link_token="<|link_{document}_{index}|>",
    )
    shapes._write_tokenizer(folder, names.texts)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {KEY: names.block()}))
    return folder


def shown(result: harness.SuiteResult) -> harness.SuiteResult:
    """What of a result fits a terminal's width."""
    rows = [{key: row[key] for key in COLUMNS if key in row} or row for row in result["rows"]]
    return {"rows": rows, "summary": result["summary"]}


def write_html(file: Path, where: dict[str, object], result: harness.SuiteResult) -> None:
    """The run as one page."""
    from bench.quality import link_page

    link_page.write(file, where, result)
