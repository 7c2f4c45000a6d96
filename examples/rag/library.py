# SPDX-License-Identifier: Apache-2.0
"""Documents, the passages they are cut into, and a BM25 index that finds those for a question."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import bm25s

QUESTIONS = Path(__file__).with_name("questions.txt")
"""Fifty questions about the documentation topics of Python, one per line."""

SYSTEM = "Answer from the passages."


class Passage(NamedTuple):
    """Some consecutive paragraphs of a document, letter for letter."""

    document: str
    text: str


def python_topics() -> dict[str, str]:
    """The reference documentation that ships with Python: {topic: text}, no download."""
    from pydoc_data.topics import topics

    return dict(sorted(topics.items()))


def folder(path: Path) -> dict[str, str]:
    """The documents of a folder, {id: text}, read as `vllm-segreuse kb add` reads it.

    Raises:
        ExtractError: a file cannot be read; the message names it.
    """
    from segreuse_tools.knowledge import extract

    with extract.Extractor() as extractor:
        return {
            text.id: text.text
            for file in extract.find_sources([path])
            for text in extractor.read(file)
        }


def questions(file: Path = QUESTIONS) -> list[str]:
    """One question per line; empty lines do not count."""
    return [line.strip() for line in file.read_text().splitlines() if line.strip()]


def split(text: str, max_characters: int) -> list[str]:
    """Cuts `text` between paragraphs into passages of at most `max_characters`.

    Passages are slices: their tokens are those of the document, but for the first and the last few.
    A longer paragraph stays whole.
    """
    gaps = list(re.finditer(r"\n\s*\n", text))
    starts = [0, *(gap.end() for gap in gaps)]
    ends = [*(gap.start() for gap in gaps), len(text)]
    passages, start, end = [], 0, ends[0]
    for paragraph_start, paragraph_end in zip(starts[1:], ends[1:], strict=True):
        if paragraph_end - start > max_characters:
            passages.append(text[start:end])
            start = paragraph_start
        end = paragraph_end
    return [passage for passage in [*passages, text[start:end]] if passage.strip()]


class Library:
    """Passages of documents, found by BM25.

    Args:
        documents: {id: text}.
        max_characters: of a passage. About 500 tokens by default.
    """

    def __init__(self, documents: Mapping[str, str], max_characters: int = 2000) -> None:
        # Documents may quote each other: a passage is offered once.
        passages: dict[str, Passage] = {}
        for document, whole in documents.items():
            for text in split(whole, max_characters):
                passages.setdefault(text, Passage(document, text))
        self.passages = list(passages.values())
        self._index = bm25s.BM25()
        self._index.index(_words(passage.text for passage in self.passages), show_progress=False)

    def search(self, question: str, count: int) -> list[Passage]:
        """The `count` best passages (fewer if there are not as many), the best one first."""
        count = min(count, len(self.passages))
        found, _ = self._index.retrieve(_words([question]), k=count, show_progress=False)
        return [self.passages[index] for index in found[0]]


def _words(texts: Iterable[str]) -> bm25s.tokenization.Tokenized:
    return bm25s.tokenize(list(texts), stopwords="en", show_progress=False)


def messages(passages: Sequence[Passage], question: str) -> list[dict[str, str]]:
    """The prompt of a retrieval-augmented question, as chat messages."""
    body = "\n\n".join(passage.text for passage in passages)
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{body}\n\nQuestion: {question}"},
    ]
