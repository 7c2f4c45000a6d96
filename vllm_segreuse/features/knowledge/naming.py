# SPDX-License-Identifier: Apache-2.0
"""Prompts that name compressed documents, and the tokens that stand in their place.

    text     "... [[handbook/travel.md]] How much is the allowance?"
    tokens   of the text before, the document's kept tokens, of the text behind

Only the documents that the request lists are looked for. What else looks like a marker is text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

from vllm_segreuse.features.knowledge.places import places
from vllm_segreuse.features.knowledge.store import Tokens
from vllm_segreuse.options.parsing import DOCUMENTS


class NamedDocument(NamedTuple):
    """A compressed document that a request names.

    Attributes:
        name: `BASE/ID`.
        entry: its frozen entry.
        tokens: int32, those that are kept.
    """

    name: str
    entry: str
    tokens: Tokens


named: ContextVar[tuple[NamedDocument, ...]] = ContextVar("segreuse_named", default=())
"""Of the request that is being handled."""


class PlaceError(ValueError):
    """The documents that a request names do not stand in its prompt."""


def shown(name: str) -> str:
    """A name for a message to a client: slashes of the id as in URLs.

    vLLM takes what looks like a path of the server out of such messages (`sanitize_message` in
    `vllm/entrypoints/serve/exception_handling/utils.py`), and ids are often paths below a folder.
    """
    base, slash, document_id = name.partition("/")
    return base + slash + document_id.replace("%", "%25").replace("/", "%2F")


def marker(name: str) -> str:
    """What a text has in the place of a document."""
    return f"[[{name}]]"


def cut(text: str, documents: Sequence[NamedDocument]) -> list[str | Tokens]:
    """A text as its parts and the tokens of the documents between them. Special tokens stand in
    front of the first part, which is a text, perhaps an empty one; no other is empty."""
    by_marker = {marker(document.name): document.tokens for document in documents}
    pattern = "|".join(map(re.escape, by_marker))
    parts = re.split(f"({pattern})", text)
    return [by_marker.get(part, part) for i, part in enumerate(parts) if part or not i]


def check_places(
    prompt: Sequence[int], documents: Sequence[NamedDocument], at: Sequence[int] = ()
) -> None:
    """Each document stands in the prompt, in the order in which the request names them; and first
    at its marker, of all that were replaced `at` these places. Engines take the first place.

    Raises:
        PlaceError: it does not, or the prompt has token ids that no model has.
    """
    try:
        found = places(prompt, (document.tokens for document in documents))
    except ValueError as error:
        raise PlaceError(f"{DOCUMENTS}: in the prompt {error}") from None
    for document, place in zip(documents, found, strict=True):
        if place is None or (at and place not in at):
            raise PlaceError(
                f"{DOCUMENTS}: the document {shown(document.name)!r} does not stand in the prompt, "
                "or not behind the ones that are named before it: put its marker, [[BASE/ID]], "
                "there; or its kept tokens stand in the text in front of it, too: keep more of them"
            )
