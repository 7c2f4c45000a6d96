# SPDX-License-Identifier: Apache-2.0
"""Every figure of the server's answers stands in the tables, under its own heading."""

import io
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from segreuse_tools.knowledge import status_tables
from vllm_segreuse.features.knowledge.schemas import (
    BlockCounts,
    Document,
    DocumentCounts,
    KnowledgeBaseStatus,
    Stats,
)

NOW = datetime(2020, 1, 1, tzinfo=UTC)
COUNTS = DocumentCounts(warm=11, cold=12, warming=13, failed=14)


def lines(table: Any) -> list[list[str]]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return [line.split() for line in console.export_text().splitlines() if line.strip(" ─")]


def test_a_base_has_its_counts_and_sizes() -> None:
    base = KnowledgeBaseStatus(
        name="n", extra_key="k", preamble=None, context="none", metadata={}, created_at=NOW,
        documents=COUNTS, tokens=1500, blocks=16, hits=17,
    )  # fmt: skip
    head, row = lines(status_tables.bases([base]))
    assert " ".join(head) == "name extra key context warm warming cold failed tokens blocks hits"
    assert row == ["n", "k", "none", "11", "13", "12", "14", "1,500", "16", "17"]


def document(**values: Any) -> Document:
    return Document(
        **(
            {"id": "d", "base": "b", "status": "failed", "tokens": 21, "blocks": 22, "hits": 23}
            | {"references": 24, "last_used": None, "error": "why", "metadata": {}}
            | values
        )
    )


def test_a_document_has_its_sizes_and_what_is_wrong() -> None:
    head, row = lines(status_tables.documents([document()], NOW))
    assert " ".join(head) == "id status tokens blocks hits last used"
    assert row == ["d", "failed:", "why", "21", "22", "23", "never"]


def test_what_is_stored_is_shown_where_there_is_any() -> None:
    stored = COUNTS.model_copy(update={"stored": 15})
    base = KnowledgeBaseStatus(
        name="n", extra_key="k", preamble=None, context="none", metadata={}, created_at=NOW,
        documents=COUNTS, tokens=1500, blocks=16, hits=17,
    )  # fmt: skip
    head, _, row = lines(status_tables.bases([base, base.model_copy(update={"documents": stored})]))
    assert " ".join(head[4:9]) == "warm warming stored cold failed"
    assert row[3:8] == ["11", "13", "15", "12", "14"]
    blocks = BlockCounts(total=200, frozen=31, promised=32, limit=33, free=34, block_size=16)
    rows = lines(
        status_tables.stats(
            Stats(blocks=blocks, bases=35, documents=stored, hits=36, given_back=37)
        )
    )
    assert ["stored", "15", "documents"] in rows
    _, row = lines(
        status_tables.documents([document(status="stored", tier="disk", error=None, blocks=0)], NOW)
    )
    assert row[:3] == ["d", "stored", "(disk)"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-5, "0 s"), (0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"),
        (3600, "1 h"), (86399, "23 h"), (86400, "1 d"), (86400 * 400, "400 d"),
    ],
)  # fmt: skip
def test_ages_are_told_in_the_largest_whole_unit(seconds: int, shown: str) -> None:
    used = NOW - timedelta(seconds=seconds)
    _, row = lines(status_tables.documents([document(last_used=used)], NOW))
    assert " ".join(row).endswith(f" 23 {shown} ago")


def test_names_are_shown_as_they_are() -> None:
    _, row = lines(status_tables.documents([document(id="[bold]x[/bold]", error=None)], NOW))
    assert row[:2] == ["[bold]x[/bold]", "failed"]


def test_stats_have_every_figure() -> None:
    blocks = BlockCounts(total=200, frozen=31, promised=32, limit=33, free=34, block_size=16)
    rows = lines(
        status_tables.stats(
            Stats(blocks=blocks, bases=35, documents=COUNTS, hits=36, given_back=37)
        )
    )
    assert [" ".join(row) for row in rows] == [
        "KV blocks 31 of 200 (15.5%) are frozen; 16 tokens each",
        "promised 32 of at most 33 blocks",
        "free 34 blocks",
        "bases 35",
        "warm 11 documents",
        "warming 13 documents",
        "cold 12 documents",
        "failed 14 documents",
        "hits 36 requests reused a document",
        "given back 37 times, under memory pressure",
    ]
    none = BlockCounts(total=0, frozen=0, promised=0, limit=0, free=0, block_size=16)
    status_tables.stats(
        Stats(blocks=none, bases=0, documents=DocumentCounts(), hits=0, given_back=0)
    )
