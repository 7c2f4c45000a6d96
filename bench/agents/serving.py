# SPDX-License-Identifier: Apache-2.0
"""Traces asked of a real server over HTTP, under one arm after the other.

Steps are asked behind the right history, so that every arm gets the very same prompts; or freely:
the model's own text is the history, and the tools that it names are called. All caches are emptied
before each trace: what an arm finds, it has computed itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.agents import scoring
from bench.agents.arms import Arm
from bench.agents.completions import Answered, Completions, serving
from bench.agents.traces import Trace, Writer
from examples.agents import react
from examples.agents.tools import Tools

BLOCK_TOKENS = 32
MAX_MODEL_LEN = 2560
KV_BLOCKS = 82
"""Of the server: a little more than one long history. Those of three users do not fit."""
SPARE_TOKENS = 6
"""A step may say so many tokens more than what is right."""
FREE_TOKENS = 64
FREE_STEPS = 10
_FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_TOKENS)),
    *("--num-gpu-blocks-override", str(KV_BLOCKS), "--max-num-seqs", "4"),
)


@dataclass(frozen=True)
class Taken:
    """A step under an arm: what was asked, what came of it, and 1.0 if it was right."""

    kind: str
    trace: int
    conversation: int
    step: int
    arm: str
    answered: Answered
    score: float


@dataclass(frozen=True)
class Free:
    """A conversation that the model led itself.

    Attributes:
        kind, trace, conversation, arm: which.
        calls, good_calls: of tools, and those without an error. Text without a call and without
            an answer counts as a call.
        success: whether the answer was right.
        total_s: of all requests.
    """

    kind: str
    trace: int
    conversation: int
    arm: str
    calls: int
    good_calls: int
    success: float
    total_s: float


@contextmanager
def asking(model: Path, options: Mapping[str, Any], dtype: str, writer: Writer) -> Iterator[Client]:
    """A server with these options, and a client of it.

    Args:
        model: its folder.
        options: of segment reuse.
        dtype: in which the model computes, vLLM's option.
        writer: of the prompts.

    Raises:
        ServerError: it does not start.
    """
    with serving(model, options, [*_FLAGS, "--dtype", dtype], {}) as server:
        yield Client(server, writer)


class Client(Completions):
    """Asks one server."""

    def __init__(self, server: Any, writer: Writer) -> None:
        super().__init__(server, MAX_MODEL_LEN)
        self._writer = writer

    def trace(
        self, trace: Trace, arm: Arm, temperature: float = 0.0, seed: int | None = None
    ) -> list[Taken]:
        """Every step of a trace, behind the right history.

        Raises:
            BenchError: a prompt is too long, or the connector does not answer.
        """
        self.reset()
        space = f"{trace.kind} {trace.number} {arm.name} {temperature} {seed}"
        taken = []
        for number, request in enumerate(trace.requests):
            label = trace.label(request)
            answered = self.ask(
                self._writer.request(trace, request),
                arm.body(space, number),
                # Not until a stop string: vLLM answers without a report then.
                most=self._writer.measure(label.label) + SPARE_TOKENS,
                temperature=temperature,
                seed=seed,
            )
            score = scoring.step(answered.said, label)
            at = (trace.kind, trace.number, request.conversation, request.step, arm.name)
            taken.append(Taken(*at, answered, score))
        return taken

    def free(self, trace: Trace, conversation: int, arm: Arm) -> Free:
        """A conversation as the model leads it."""
        self.reset()
        told = trace.conversations[conversation]
        at = (trace.kind, trace.number, conversation, arm.name)
        tools = Tools(trace.shop.articles, f"free {trace.kind} {trace.number} {conversation}")
        space, history, calls, good, seconds = f"free {at}", "Thought:", 0, 0, 0.0
        for step in range(FREE_STEPS):
            prompt = self._writer.prompt(told, history)
            if len(prompt) + FREE_TOKENS > MAX_MODEL_LEN:
                break
            answered = self.ask(prompt, arm.body(space, step), FREE_TOKENS, stop=react.STOP)
            seconds += answered.total_s
            answer = react.answer(answered.said)
            if answer is not None:
                right = scoring.answer(answer, told.episode.answer)
                return Free(*at, calls, good, right, seconds)
            calls += 1
            action = react.action(answered.said)
            if action is None:
                break
            observation = tools.call(*action)
            good += "error" not in json.loads(observation)
            history += f"{react.turn(answered.said)}\nObservation: {observation}\nThought:"
        return Free(*at, calls, good, 0.0, seconds)
