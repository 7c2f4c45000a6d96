# SPDX-License-Identifier: Apache-2.0
"""How far an arm's distributions are from those of full prefill, at the edit and one turn later.

The same conversations as over HTTP, in this process: the arm is made to say what full prefill says,
and the logits of each token are compared over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from bench import harness
from bench.agents.arms import Arm
from bench.edits.conversations import Conversation
from bench.edits.edits import Edit
from bench.edits.writing import Writer

SAID_TOKENS = 8
TURNS = 2


@dataclass(frozen=True)
class Apart:
    """One question under an arm.

    Attributes:
        edit, conversation, arm: which.
        turn: 0 at the edit.
        first_kl: divergence of the first token's distribution, in nats.
        agreement: share of full prefill's tokens that would have been chosen.
    """

    edit: str
    conversation: int
    arm: str
    turn: int
    first_kl: float
    agreement: float


def measure(
    lab: Any, before: Conversation, edit: Edit, arms: Sequence[Arm], writer: Writer
) -> Iterator[Apart]:
    """A conversation under every arm, each in a namespace of its own.

    Args:
        lab: `bench.english.engine.Lab`.
        before: the conversation as it is before the edit.
        edit: of the conversation.
        arms: those that reuse segments.
        writer: of the prompts.

    Raises:
        BenchError: the connector does not run, or the prefix cache could not be reset.
    """
    from bench.english.tape import divergences, favourites

    after = edit.change(before, Random(f"{edit.name} {before.number}"))
    prompts = [
        writer.prompt(after, after.asked(turn), edit.keeps_thoughts) for turn in range(TURNS)
    ]
    full = [
        lab.ask(prompt, SAID_TOKENS, None, salt=f"full {edit.name} {before.number} {turn}")
        for turn, prompt in enumerate(prompts)
    ]
    history = writer.history(before, edit.keeps_thoughts)[-1:]  # it begins with the others
    if edit.retries:
        history.append(writer.prompt(before, before.asked(0), edit.keeps_thoughts))
    for arm in arms:
        space = f"{edit.name} {before.number} {arm.name}"
        extra = arm.extra_args(space)
        for prompt in history:
            lab.ask(prompt, 1, extra, salt=space)
        for turn, prompt in enumerate(prompts):
            mine = lab.ask(prompt, SAID_TOKENS, extra, forced=full[turn].tokens, salt=space)
            if mine.report is None:
                raise harness.BenchError(f"the arm {arm.name!r} has no report")
            said = zip(full[turn].tokens, favourites(mine.logits), strict=True)
            yield Apart(
                edit.name,
                before.number,
                arm.name,
                turn,
                divergences(full[turn].logits, mine.logits)[0],
                sum(a == b for a, b in said) / len(full[turn].tokens),
            )
        if not lab.llm.reset_prefix_cache():
            raise harness.BenchError("the prefix cache could not be reset: a request still runs")
