# SPDX-License-Identifier: Apache-2.0
"""Conversations asked of a real server over HTTP, under one arm after the other.

Every arm gets the same prompts, and computes all that it finds: caches are emptied before it. The
prompts of the tool loop come first, as an agent sends them. Then come the edit with a question, and
the later turns behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.agents.arms import Arm
from bench.agents.completions import Answered, Completions, serving
from bench.agents.tokens import Tokens
from bench.edits.conversations import LATER_TURNS, Conversation
from bench.edits.edits import Edit
from bench.edits.writing import Writer

MAX_MODEL_LEN = 16384
ANSWER_TOKENS = 8
"""Of every question: a price has three digits."""
_FLAGS = (
    *("--max-model-len", str(MAX_MODEL_LEN), "--block-size", "32", "--max-num-seqs", "2"),
    *("--dtype", "bfloat16"),
)


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
    """

    edit: str
    conversation: int
    arm: str
    turn: int
    ttft_s: float
    right: bool
    said: str
    tokens: Tokens


@contextmanager
def asking(model: Path, options: Mapping[str, Any], writer: Writer) -> Iterator[Client]:
    """A server with these options of segment reuse, and a client of it.

    Raises:
        ServerError: it does not start.
    """
    with serving(model, options, _FLAGS, {"VLLM_CPU_KVCACHE_SPACE": "2"}) as server:
        yield Client(server, writer)


@dataclass(frozen=True)
class Edited:
    """A conversation from its edit on.

    Attributes:
        after: as it is now.
        turn: asks a turn; 0 is the first one.
    """

    after: Conversation
    turn: Callable[[int], Answered]


class Client(Completions):
    """Asks one server."""

    def __init__(self, server: Any, writer: Writer) -> None:
        super().__init__(server, MAX_MODEL_LEN)
        self._writer = writer

    def conversation(self, before: Conversation, edit: Edit, arm: Arm) -> list[Asked]:
        """A conversation under an arm: its loop, the edit, and the later turns.

        Raises:
            BenchError: a prompt is too long, or the connector does not answer.
        """
        edited, asked = self.edited(before, edit, arm), []
        for turn in range(LATER_TURNS + 1):
            found = edited.turn(turn)
            at = (edit.name, before.number, arm.name, turn)
            right = edited.after.questions[turn].right in found.said
            asked.append(Asked(*at, found.ttft_s, right, found.said, found.tokens))
        return asked

    def edited(self, before: Conversation, edit: Edit, arm: Arm) -> Edited:
        """A conversation under an arm whose loop was served, from the edit on.

        Raises:
            BenchError: a prompt is too long, or the connector does not answer.
        """
        self.reset()
        space = f"{edit.name} {before.number} {arm.name}"
        if arm.prefix:
            for number, prompt in enumerate(self._writer.history(before, edit.keeps_thoughts)):
                self.ask(prompt, arm.body(space, f"step {number}"), 1)
            if edit.retries:
                self._turn(before, edit, 0, arm.body(space, "retried"))
        after = edit.change(before, Random(f"{edit.name} {before.number}"))
        return Edited(after, lambda turn: self._turn(after, edit, turn, arm.body(space, turn)))

    def _turn(
        self, conversation: Conversation, edit: Edit, turn: int, added: Mapping[str, Any]
    ) -> Answered:
        messages = conversation.asked(turn)
        prompt = self._writer.prompt(conversation, messages, edit.keeps_thoughts)
        return self.ask(prompt, added, ANSWER_TOKENS)
