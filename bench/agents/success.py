# SPDX-License-Identifier: Apache-2.0
"""Whether steps are as often right under an arm as under full prefill.

The same steps as `serving`, in this process and without a clock, so that many can be asked: each
behind the right history, greedy, by full prefill and under every arm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench import harness
from bench.agents import inside, scoring
from bench.agents.arms import Arm
from bench.agents.serving import SPARE_TOKENS
from bench.agents.tokens import Tokens
from bench.agents.traces import Trace, Writer


@dataclass(frozen=True)
class Paired:
    """One step by full prefill and under an arm.

    Attributes:
        kind, trace, conversation, step, arm: which.
        full: score of full prefill's answer.
        score: of the arm's.
        same: whether they say the same.
        tokens: of the prompt, under the arm.
    """

    kind: str
    trace: int
    conversation: int
    step: int
    arm: str
    full: float
    score: float
    same: bool
    tokens: Tokens


def measure(lab: Any, trace: Trace, arms: Sequence[Arm]) -> Iterator[list[Paired]]:
    """Every step of a trace under every arm, each arm in a namespace of its own.

    Full prefill finds the prefixes that it has computed itself, which changes nothing but its time.

    Args:
        lab: `bench.english.engine.Lab`.
        trace: what is asked.
        arms: those that reuse segments.

    Raises:
        BenchError: the connector does not run, or the prefix cache could not be reset.
    """
    tokenizer = lab.llm.get_tokenizer()
    writer = Writer(tokenizer)

    def said(answered: Any) -> str:
        return str(tokenizer.decode(answered.tokens, skip_special_tokens=True))

    for number, request, prompt in inside.steps(lab, trace, writer):
        label = trace.label(request)
        most = writer.measure(label.label) + SPARE_TOKENS
        full = lab.ask(prompt, most, None, salt=f"{trace.kind} {trace.number}")
        found = []
        for arm in harness.rotated(arms, number):
            mine = inside.under(lab, trace, arm, prompt, most)
            one = Paired(
                *(trace.kind, trace.number, request.conversation, request.step, arm.name),
                full=scoring.step(said(full), label),
                score=scoring.step(said(mine), label),
                same=full.tokens == mine.tokens,
                tokens=Tokens.of(len(prompt), mine.cached_tokens, mine.report),
            )
            found.append(one)
        yield found
