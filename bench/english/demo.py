# SPDX-License-Identifier: Apache-2.0
"""`make demo ARGS="--model DIR"`: a model's answers in full and with reuse, side by side.

Documents are ingested into a knowledge base, as it is shipped. Each question is then answered by
full prefill, with the default policy, and with plain `shift`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from bench import harness
from bench.english.arms import DEFAULT, FULL, SHIFT, arm
from bench.english.command import require_model
from bench.english.donors import KNOWLEDGE
from bench.english.records import Outcome
from bench.english.run import Asks
from bench.english.tasks import draw
from bench.english.tasks.base import Example
from bench.quality import seeds

TASKS = ("one-hop", "pronoun", "contracts", "chat", "react", "two-hop")
NUMBER = 1000
"""Of the first example of each task: `bench english` never asks so many."""
ARMS = (arm(DEFAULT), arm(SHIFT))
WIDTH = 100
LEGEND = (
    "TTFT is the time to the first token. Work is the share of (token, layer) pairs that were "
    "computed. Drift estimates how far an answer is from that of full prefill."
)


class Asked(NamedTuple):
    """One question.

    Attributes:
        example: what was asked.
        prompt_tokens: length of the prompt.
        outcomes: by arm, full prefill first.
    """

    example: Example
    prompt_tokens: int
    outcomes: Mapping[str, Outcome]


def show(model: Path, questions: int) -> None:
    """Load a model, ask it, and print each question when its answers are there.

    Args:
        model: a Hugging Face folder.
        questions: how many, of each of `TASKS` in turn.

    Raises:
        BenchError: there is no model, it cannot be loaded, start-up refuses it, or nothing was
            reused.
    """
    require_model(model)
    from bench.english.engine import english_engine

    print(f"Loading {model} ...", flush=True)
    with english_engine(model) as lab:
        print(fill(LEGEND, WIDTH), flush=True)
        asked = []
        for one in converse(lab, questions):
            asked.append(one)
            print(f"\n{len(asked)}. {described(one)}", flush=True)
    print(f"\n{summed_up(asked)}")


def converse(lab: Asks, questions: int) -> Iterator[Asked]:
    """Ask questions, each in full and under every arm.

    Raises:
        BenchError: nothing was reused.
    """
    which = seeds.chosen()
    for index in range(questions):
        task, number = TASKS[index % len(TASKS)], NUMBER + index // len(TASKS)
        example = draw(task, number, seeds.rng(which, task, number), lab.prompts.measure)
        full = lab.full(example)
        rng = seeds.rng(which, f"{task} {KNOWLEDGE}", number)
        outcomes = lab.reuse(example, full, KNOWLEDGE, ARMS, rng)
        if not all(outcome.reused for outcome in outcomes.values()):
            raise harness.BenchError(f"no document of the question of {task} was reused")
        prompt = lab.prompts.prompt(example.documents, example.question)
        yield Asked(example, len(prompt), {FULL: full.outcome, **outcomes})


def described(asked: Asked) -> str:
    """A question and its answers, in lines of at most `WIDTH` characters."""
    example, outcomes = asked.example, asked.outcomes
    return "\n".join(
        [
            f"{example.task}: {len(example.documents)} documents, "
            f"{asked.prompt_tokens:,} prompt tokens",
            _wrapped("   ", example.question),
            _wrapped("   Right answer: ", ", ".join(example.answers)),
            f"   {'':8}{'TTFT':>9}{'work':>7}{'drift':>8}  answer",
            *(_line(name, outcome, outcomes[FULL]) for name, outcome in outcomes.items()),
        ]
    )


def summed_up(asked: Sequence[Asked]) -> str:
    """The closing line: right answers, and what the default spared."""
    right = ", ".join(
        f"{name} {sum(_is_right(one.outcomes[name]) for one in asked)}"
        for name in asked[0].outcomes
    )
    default = [one.outcomes[DEFAULT] for one in asked]
    speedup = harness.median(
        [one.outcomes[FULL].ttft_ms / one.outcomes[DEFAULT].ttft_ms for one in asked]
    )
    work = harness.median([one.work for one in default])
    return (
        f"segreuse demo ok: speedup={speedup:.1f}x work={work:.0%} (default, medians); "
        f"right of {len(asked)}: {right}"
    )


def _line(name: str, outcome: Outcome, full: Outcome) -> str:
    drift = "-" if outcome.drift is None else f"{outcome.drift:.3f}"
    said = outcome.said if outcome.said is not None else full.said
    mark = "right" if _is_right(outcome) else "wrong"
    head = f"   {name:8}{outcome.ttft_ms:>6.0f} ms{outcome.work:>7.0%}{drift:>8}  {mark}: "
    return _wrapped(head, said or "")


def _is_right(outcome: Outcome) -> bool:
    return outcome.score == 1


def _wrapped(head: str, text: str) -> str:
    """A text behind its head; what a terminal could take for a command is left out."""
    shown = "".join(char for char in " ".join(text.split()) if char.isprintable())
    return fill(shown or "(nothing)", WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
