# SPDX-License-Identifier: Apache-2.0
"""Prompts as token ids: a head, documents, a question, in the model's own chat format.

Every part is tokenised by itself, so that a document has the same tokens wherever it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

_CONTENT = "@CONTENT@"
READ = "Read these documents.\n\n"
NOTES = "Here are some notes of last week, in no particular order.\n\n"


class Prompts:
    """Writes prompts for one tokenizer.

    A tokenizer with a chat template gets one message by the user, and the beginning of an answer.
    Without a template the text ends with `Answer:`, and begins with the tokenizer's token for the
    beginning of a text where it has one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat = getattr(tokenizer, "chat_template", None) is not None
        if self.chat:
            before, _, after = tokenizer.apply_chat_template(
                [{"role": "user", "content": _CONTENT}],
                tokenize=False,
                add_generation_prompt=True,
            ).partition(_CONTENT)
            self._before, self._after = self.encode(before), self.encode(after)
        else:
            begin = tokenizer.bos_token_id
            self._before = [] if begin is None else [begin]
            self._after = self.encode("\nAnswer:")
        self.encode_document = lru_cache(maxsize=256)(lambda text: tuple(self.encode(text)))
        self.measure = lru_cache(maxsize=16384)(lambda text: len(self.encode(text)))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens of the tokenizer's own."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def answer(self, tokens: Sequence[int]) -> str:
        """The text of an answer: its first line only where nothing says that the model stops."""
        said = str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()
        return said if self.chat else said.partition("\n")[0]

    def prompt(self, documents: Iterable[str], question: str, intro: str = READ) -> list[int]:
        """Token ids of a whole prompt."""
        tokens = [*self._before, *self.encode(intro)]
        for document in documents:
            tokens += self.encode_document(document)
        return [*tokens, *self.encode(question), *self._after]

    def alone(self, document: str, end: str) -> list[int]:
        """Token ids of a document with nothing in front."""
        return [*self.encode_document(document), *self.encode(end)]
