# SPDX-License-Identifier: Apache-2.0
"""Documents that a model was trained on alone: prompts of them, and what must hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import Request

from segreuse_extras.trained.cold_documents import PREFIX
from segreuse_extras.trained.layout import Layout
from tests.parts import parts_of

if TYPE_CHECKING:
    from tests.stateful.worker import Running, Worker
    from tests.stateful.world import World

LAYOUT = Layout(100, 101, ((102,), (103,), (104,)))
"""Start and end of a document, and what links the first three of a prompt to the rest."""

TEXTS = [[*range(110, 117)], [120, 121], [*range(130, 136)], [*range(140, 150)], [120]]
"""Of documents; with start and end, one is two whole blocks, and one is one."""


def prompt(before: int, documents: list[int], behind: int) -> list[int]:
    """Tokens: text, documents with their links, and text.

    Args:
        before, behind: tokens of text.
        documents: indices of `TEXTS`.
    """
    tokens = [5] * before
    for number, document in enumerate(documents):
        start, end = LAYOUT.start, LAYOUT.end
        tokens += [start, *TEXTS[document], end, *LAYOUT.links[number]]
    return [*tokens, *range(50, 50 + behind)]


def check_copied(worker: Worker, request: Running, row: list[int], history: np.ndarray) -> None:
    """What is copied into a document is what the model computes for the document alone.

    Args:
        row: of the piece.
        history: that the donor's slots have.
    """
    destination, length, _, _, donor_position = row
    document = request.tokens[destination - donor_position : destination + length]
    alone = worker.histories.of(request.identity, document, [])[donor_position:]
    assert history.tolist() == alone, f"not computed alone: {length} tokens at {destination}"


def check_computed(name: str, request: Running, start: int, stop: int) -> None:
    """No token of a document is computed where it stands in a prompt."""
    if name.startswith(PREFIX):
        return
    for span in LAYOUT.spans(request.tokens):
        apart = stop <= span.start or span.stop <= start
        assert apart, f"{name} computes [{start}, {stop}), and a document is at {span}"


def check_report(request: Request, report: dict[str, Any]) -> None:
    """A request that was completed has all of its documents from where they were computed."""
    spans = LAYOUT.spans(request.prompt_token_ids or ())
    in_documents = sum(span.stop - span.start for span in spans)
    if spans:
        assert report["policy"] == "link", f"it ran without its documents: {report}"
        assert report["prefix_tokens"] + report["reused_tokens"] >= in_documents, report
        assert not report["recomputed_tokens"], report


def held_blocks(world: World) -> list[int]:
    """Blocks that are held for requests that wait for their documents."""
    cold = parts_of(world.side).isolated.cold
    held = (blocks for turn in cold.turns.values() for blocks in turn.held.values())
    return [block for blocks in held for block in blocks.tolist()]


def check_idle(world: World) -> None:
    """Nothing is remembered of anybody."""
    requests = parts_of(world.side).isolated
    assert not requests.asking, f"requests that ended: {requests.asking}"
    assert requests.cold.is_idle, f"documents of requests that ended: {requests.cold.turns}"
