# SPDX-License-Identifier: Apache-2.0
"""Conversations as prompts, by the template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from bench.edits.conversations import Conversation, Message, results

TEMPLATE = Path(__file__).parent / "template.jinja"


class Writer:
    """Prompts as token ids.

    Args:
        tokenizer: of the model, from transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        environment = Environment(keep_trailing_newline=True)
        environment.filters["tojson"] = json.dumps
        self._template = environment.from_string(TEMPLATE.read_text())

    def measure(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._encoded(text))

    def text(
        self, conversation: Conversation, messages: Sequence[Message], keeps_thoughts: bool
    ) -> str:
        """A prompt as text."""
        return self._template.render(
            messages=messages, tools=conversation.tools, keep_thoughts=keeps_thoughts
        )

    def turn(self, conversation: Conversation, turn: int, keeps_thoughts: bool) -> list[int]:
        """The prompt of a question, with the beginning of its answer."""
        text = self.text(conversation, conversation.asked(turn), keeps_thoughts)
        return self._encoded(text + conversation.questions[turn].begun)

    def history(self, conversation: Conversation, keeps_thoughts: bool) -> list[list[int]]:
        """The prompts of the tool loop, in order: each step's, and one with all of the loop."""
        ends = [*results(conversation.loop), len(conversation.loop) - 1]
        return [
            self._encoded(self.text(conversation, conversation.loop[: end + 1], keeps_thoughts))
            for end in ends
        ]

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)
