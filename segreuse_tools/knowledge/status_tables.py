# SPDX-License-Identifier: Apache-2.0
"""Tables of knowledge bases and documents for a terminal."""

from collections.abc import Iterable
from datetime import UTC, datetime

from rich import box
from rich.table import Table
from rich.text import Text

from vllm_segreuse.features.knowledge.schemas import (
    Document,
    DocumentCounts,
    KnowledgeBaseStatus,
    Stats,
)

_COLOURS = {
    "warm": "green", "warming": "yellow", "stored": "cyan", "cold": "blue", "failed": "red"
}  # fmt: skip


def bases(rows: Iterable[KnowledgeBaseStatus]) -> Table:
    """One line per base."""
    rows = list(rows)
    colours = _colours(*(base.documents for base in rows))
    table = _table(["name", "extra key", "context"], [*colours], _SIZES)
    for base in rows:
        counts = [
            _number(getattr(base.documents, status), colour) for status, colour in colours.items()
        ]
        sizes = (_number(n) for n in (base.tokens, base.blocks, base.hits))
        table.add_row(Text(base.name), Text(base.extra_key), Text(base.context), *counts, *sizes)
    return table


def documents(rows: Iterable[Document], now: datetime | None = None) -> Table:
    """One line per document."""
    table = _table(["id", "status"], _SIZES, ["last used"])
    for document in rows:
        status = Text(document.status, style=_COLOURS[document.status])
        if document.status == "stored":
            status.append(f" ({document.tier})")
        if document.error:
            status.append(f": {document.error}")
        table.add_row(
            Text(document.id),
            status,
            *(_number(n) for n in (document.tokens, document.blocks, document.hits)),
            _ago(document.last_used, now or datetime.now(UTC)),
        )
    return table


def stats(answer: Stats) -> Table:
    """What all bases hold together."""
    blocks, counts = answer.blocks, answer.documents
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="left", style="bold")
    table.add_column(justify="right")
    table.add_column(justify="left")
    share = f"of {blocks.total:,} ({blocks.frozen / max(1, blocks.total):.1%}) are frozen"
    table.add_row("KV blocks", f"{blocks.frozen:,}", f"{share}; {blocks.block_size} tokens each")
    table.add_row("promised", f"{blocks.promised:,}", f"of at most {blocks.limit:,} blocks")
    table.add_row("free", f"{blocks.free:,}", "blocks")
    table.add_row("bases", f"{answer.bases:,}", "")
    for status, colour in _colours(counts).items():
        table.add_row(status, _number(getattr(counts, status), colour), "documents")
    table.add_row("hits", f"{answer.hits:,}", "requests reused a document")
    table.add_row("given back", f"{answer.given_back:,}", "times, under memory pressure")
    return table


_SIZES = ["tokens", "blocks", "hits"]


def _colours(*counts: DocumentCounts) -> dict[str, str]:
    """By status; `stored` only where there are such documents, that is, a second tier."""
    has_tier = any(count.stored for count in counts)
    return {name: colour for name, colour in _COLOURS.items() if has_tier or name != "stored"}


def _table(left: list[str], *right: list[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in (name for names in right for name in names):
        table.add_column(name, justify="right")
    return table


def _number(value: int, colour: str = "") -> Text:
    return Text(f"{value:,}", style=colour if value else "dim")


def _ago(then: datetime | None, now: datetime) -> str:
    if then is None:
        return "never"
    seconds = max(0, int((now - then).total_seconds()))
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s} {unit} ago"
    return f"{seconds} s ago"
