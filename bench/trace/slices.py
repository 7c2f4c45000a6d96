# SPDX-License-Identifier: Apache-2.0
"""Requests of a trace as prompts of token ids: equal parts are equal tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness import BenchError
from segreuse_tools.estimate.request_log import LeftOut, LogError
from segreuse_tools.estimate.traces.reading import Trace
from segreuse_tools.estimate.traces.request import PromptPart, TraceRequest, tokens_of

FIRST_TEXT_TOKEN = 300
"""Below are special tokens and single bytes of the models of `bench.shapes`."""


@dataclass(frozen=True)
class TracePrompt:
    """A request as a server gets it.

    Attributes:
        tokens: ids.
        parts: that they stand for.
        answer_tokens: to generate; at least one.
        time_s: when it is sent, counted from the slice's first.
    """

    tokens: list[int]
    parts: tuple[PromptPart, ...]
    answer_tokens: int
    time_s: float


@dataclass(frozen=True)
class Slice:
    """Which requests of a trace, and what is made of them.

    Attributes:
        start, count: in the order of their times.
        token_scale: tokens of a part, of those in the trace.
        most_answer_tokens: of a request.
        vocabulary: ids from `FIRST_TEXT_TOKEN` up to here are text.
    """

    start: int
    count: int
    token_scale: float
    most_answer_tokens: int
    vocabulary: int

    def prompts(self, path: Path) -> list[TracePrompt]:
        """Its prompts.

        Raises:
            BenchError: the file is no trace of ids, or has too few requests.
        """
        try:
            requests = Trace(path, LeftOut(strict=False)).requests()
            found = list(itertools.islice(requests, self.start, self.start + self.count))
        except LogError as error:
            raise BenchError(str(error)) from error
        if len(found) < self.count:
            raise BenchError(f"{path} has {len(found)} requests behind the first {self.start}")
        return [*self._made(found)]

    def _made(self, requests: list[TraceRequest]) -> Iterator[TracePrompt]:
        first = requests[0].time_s or 0.0
        for request in requests:
            parts = tuple(
                replace_tokens(part, max(1, round(part.tokens * self.token_scale)))
                for part in request.parts
            )
            answer = min(max(1, request.output_tokens), self.most_answer_tokens)
            time_s = max(0.0, (request.time_s or 0.0) - first)
            yield TracePrompt(self._ids(parts), parts, answer, time_s)

    def _ids(self, parts: tuple[PromptPart, ...]) -> list[int]:
        size = self.vocabulary - FIRST_TEXT_TOKEN
        return (tokens_of(parts) % size + FIRST_TEXT_TOKEN).tolist()


def replace_tokens(part: PromptPart, tokens: int) -> PromptPart:
    """The same part with another length: its first tokens stay."""
    return part._replace(tokens=tokens)


def at_a_time(prompts: list[TracePrompt], count: int) -> list[list[TracePrompt]]:
    """Turns of so many prompts, in order, with times counted from the first of each."""
    turns = []
    for at in range(0, len(prompts), count):
        some = prompts[at : at + count]
        began = some[0].time_s
        turns.append([replace(prompt, time_s=prompt.time_s - began) for prompt in some])
    return turns
