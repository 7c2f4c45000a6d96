# SPDX-License-Identifier: Apache-2.0
"""Conversations asked of a real server over HTTP, under one arm after the other.

Every arm gets the same prompts. The prompts of the tool loop come first, as an agent sends them.
Then come the edit with a question, and the later turns behind it. An arm computes the loop of a
conversation once, for all edits: what one edit leaves no other finds in the prefix cache, but for
arms that reuse segments, which have a namespace for each edit. The loop's last prompt, which the
prefix cache knows, makes the loop known there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.agents.arms import Arm
from bench.agents.completions import Completions, serving
from bench.agents.tokens import Tokens
from bench.edits.conversations import LATER_TURNS, Conversation
from bench.edits.distance import MOST_LOGPROBS, Likeliest
from bench.edits.edits import Edit
from bench.edits.writing import Writer

MAX_MODEL_LEN = 16384
ANSWER_TOKENS = 5
"""Of every question: a price has three digits."""
COMPARED = (0, 1, LATER_TURNS)
"""Turns whose distributions are asked for."""
_FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", "32", "--max-num-seqs", "2"),
    *("--dtype", "bfloat16", "--max-logprobs", str(MOST_LOGPROBS)),
)
_KV_GIB = 6
"""Room for all edits of a conversation of a model with 1.5B parameters."""


@dataclass(frozen=True)
class Asked:
    """One question.

    Attributes:
        edit, conversation, arm: which.
        turn: 0 at the edit, then those behind it.
        ttft_s: seconds to the first token.
        right: whether the answer contains the right one.
        said: the answer.
        tokens: of the prompt.
        likeliest: first tokens of the answer, as the server sees them afterwards; none of turns
            that are not compared.
    """

    edit: str
    conversation: int
    arm: str
    turn: int
    ttft_s: float
    right: bool
    said: str
    tokens: Tokens
    likeliest: Likeliest


@contextmanager
def asking(model: Path, options: Mapping[str, Any], writer: Writer) -> Iterator[Client]:
    """A server with these options of segment reuse, and a client of it.

    Raises:
        ServerError: it does not start.
    """
    with serving(model, options, _FLAGS, {"VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB)}) as server:
        yield Client(server, writer)


@dataclass(frozen=True)
class Edited:
    """A conversation from its edit on.

    Attributes:
        after: as it is now.
        prompt: tokens of a turn; 0 is the first one.
        body: what is added to its request.
    """

    after: Conversation
    prompt: Callable[[int], list[int]]
    body: Callable[[int], Mapping[str, Any]]


class Client(Completions):
    """Asks one server."""

    def __init__(self, server: Any, writer: Writer) -> None:
        super().__init__(server, MAX_MODEL_LEN)
        self._writer = writer
        self._served: set[str] = set()

    def reset(self) -> None:
        """Nothing is cached afterwards."""
        super().reset()
        self._served.clear()

    def conversation(self, before: Conversation, edit: Edit, arm: Arm) -> list[Asked]:
        """A conversation under an arm: its loop, the edit, and the later turns.

        A turn's distribution is asked for when the turn is over, so that it takes no part in the
        times: it is that of the text that the turn has left, but for the last block.

        Raises:
            BenchError: a prompt is too long, or the connector does not answer.
        """
        edited, asked = self.edited(before, edit, arm), []
        for turn in range(LATER_TURNS + 1):
            prompt, body = edited.prompt(turn), edited.body(turn)
            found = self.ask(prompt, body, ANSWER_TOKENS)
            likeliest: Likeliest = {}
            if turn in COMPARED:
                likeliest = self.likeliest(prompt, body, MOST_LOGPROBS)
            at = (edit.name, before.number, arm.name, turn)
            right = edited.after.questions[turn].right in found.said
            asked.append(Asked(*at, found.ttft_s, right, found.said, found.tokens, likeliest))
        return asked

    def edited(self, before: Conversation, edit: Edit, arm: Arm) -> Edited:
        """A conversation under an arm whose loop was served, from the edit on.

        Raises:
            BenchError: a prompt is too long, or the connector does not answer.
        """
        salt = f"{before.number} {arm.name}"
        space = salt if arm.options is None else f"{salt} {edit.name}"
        history = self._writer.history(before, edit.keeps_thoughts) if arm.prefix else []
        for served, prompts in ((salt, history), (space, history[-1:])):
            if served not in self._served:
                for number, prompt in enumerate(prompts):
                    self.ask(prompt, _body(arm, salt, served, f"step {number}"), 1)
            self._served.add(served)
        if arm.prefix and edit.retries:
            retried = self._writer.turn(before, 0, edit.keeps_thoughts)
            self.ask(retried, _body(arm, salt, space, "retried"), ANSWER_TOKENS)
        after = edit.change(before, Random(f"{edit.name} {before.number}"))
        return Edited(
            after,
            lambda turn: self._writer.turn(after, turn, edit.keeps_thoughts),
            lambda turn: _body(arm, salt, space, f"{edit.name} {turn}"),
        )


def _body(arm: Arm, salt: str, space: str, request: str) -> Mapping[str, Any]:
    """What is added to a request of a namespace; vLLM's prefix cache ends at the salt."""
    return {"cache_salt": salt, **arm.body(space, request)}
