# SPDX-License-Identifier: Apache-2.0
"""How far the distributions of an arm are from those of full prefill, over the whole vocabulary.

The same steps as `serving`, in this process, as `bench english` does it: the arm is made to say
what full prefill says, and its logits are compared at each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench import harness
from bench.agents import inside
from bench.agents.arms import Arm
from bench.agents.tokens import Tokens
from bench.agents.traces import Trace, Writer

STEP_TOKENS = 16
"""Tokens of full prefill's answer along which distributions are compared."""


@dataclass(frozen=True)
class Apart:
    """One step under an arm.

    Attributes:
        kind, trace, conversation, step, arm: which.
        first_kl: divergence of the first token's distribution, in nats.
        answer_kl: mean divergence along the answer.
        agreement: share of the answer's tokens that would have been chosen.
        tokens: of the prompt.
        in_full: whether a fallback computed it in full.
        accepted, rejected: similar segments, by the acceptance test.
    """

    kind: str
    trace: int
    conversation: int
    step: int
    arm: str
    first_kl: float
    answer_kl: float
    agreement: float
    tokens: Tokens
    in_full: bool
    accepted: int = 0
    rejected: int = 0


def measure(lab: Any, trace: Trace, arms: Sequence[Arm]) -> Iterator[list[Apart]]:
    """Every step of a trace under every arm, each arm in a namespace of its own.

    Args:
        lab: `bench.english.engine.Lab`.
        trace: what is asked.
        arms: those that reuse segments.

    Raises:
        BenchError: the connector does not run, or the prefix cache could not be reset.
    """
    from bench.english.tape import divergences, favourites

    writer = Writer(lab.llm.get_tokenizer())
    for number, request, prompt in inside.steps(lab, trace, writer):
        # A salt of its own: nobody finds its blocks.
        full = lab.ask(prompt, STEP_TOKENS, None, salt=f"{trace.kind} {trace.number} {number}")
        found = []
        for arm in harness.rotated(arms, number):
            mine = inside.under(lab, trace, arm, prompt, STEP_TOKENS, full.tokens)
            apart = divergences(full.logits, mine.logits)
            said = zip(full.tokens, favourites(mine.logits), strict=True)
            at = (trace.kind, trace.number, request.conversation, request.step, arm.name)
            one = Apart(
                *at,
                first_kl=apart[0],
                answer_kl=sum(apart) / len(apart),
                agreement=sum(a == b for a, b in said) / len(apart),
                tokens=Tokens.of(len(prompt), 0, mine.report),
                in_full=mine.report.get("in_full", False),
                accepted=mine.report.get("accepted_segments", 0),
                rejected=mine.report.get("rejected_segments", 0),
            )
            found.append(one)
        yield found
