# SPDX-License-Identifier: Apache-2.0
"""What is told of documents and bases, from a catalogue and a queue made by hand."""

import re
from types import SimpleNamespace as Of
from typing import Any

import numpy as np
import pytest

from segreuse_tools.routing import document_digests
from vllm_segreuse.features.knowledge.answers import Answers
from vllm_segreuse.features.knowledge.catalogue import Catalogue, CatalogueBase, CatalogueDocument
from vllm_segreuse.features.knowledge.chunks import Shape
from vllm_segreuse.features.knowledge.errors import NotFoundError
from vllm_segreuse.features.knowledge.store import BaseRecord, DocumentRecord

SHAPE = Shape(block_size=4, max_prompt_tokens=63, chunk_tokens=20)
CONTEXT = np.array([1], np.int32)
COLD: Any = {"warm": {}, "stored": {}}


def record(document_id: str, entry: str, tokens: int = 9, base: str = "base") -> DocumentRecord:
    ids = np.arange(tokens, dtype=np.int32)
    return DocumentRecord(base, document_id, CONTEXT, ids, {"id": document_id}, entry)


kept = CatalogueDocument.of


@pytest.fixture
def catalogue() -> Catalogue:
    """`a` and `b` share an entry; `c` has one of its own; `d` is faulty."""
    catalogue = Catalogue(SHAPE)
    base = CatalogueBase(BaseRecord("base", "key", "Read:", {"k": 1}, 5.0), CONTEXT)
    catalogue.bases["base"] = base
    catalogue.put(base, kept(record("a", "one")))
    catalogue.put(base, kept(record("b", "one")))
    catalogue.put(base, kept(record("c", "two", 30)))
    catalogue.put(base, kept(record("d", "two", 30), "torn"))
    catalogue.count_uses({"one": (3, 7.0), "two": (2, 8.0), "unknown": (9, 9.0)})
    return catalogue


def answers(catalogue: Catalogue, queued: Any = (), errors: Any = None) -> Answers:
    warming: Any = Of(is_queued=lambda name: name in queued, error=(errors or {}).get)
    return Answers(catalogue, warming)


def told(
    catalogue: Catalogue, document_id: str, warm: Any = None, stored: Any = None, **queue: Any
) -> Any:
    base = catalogue.base("base")
    document = catalogue.document(base, document_id)
    state = {"warm": warm or {}, "stored": stored or {}}
    return answers(catalogue, **queue).document(base, document, state)


def test_a_document_is_what_its_entry_is(catalogue: Catalogue) -> None:
    assert told(catalogue, "a").status == "cold"
    assert told(catalogue, "a", {"one": (3, 2)}).status == "warm"
    assert told(catalogue, "a", queued=["one"]).status == "warming"
    failed = told(catalogue, "a", errors={"one": "no room"})
    assert (failed.status, failed.error) == ("failed", "no room")
    # Warm is warm, whatever went wrong before or is to come.
    both = told(catalogue, "a", {"one": (3, 2)}, queued=["one"], errors={"one": "before"})
    assert (both.status, both.error) == ("warm", None)


def test_references_are_readers_and_documents_that_share_it(catalogue: Catalogue) -> None:
    warm = told(catalogue, "a", {"one": (7, 5)})
    assert (warm.blocks, warm.references, warm.hits) == (7, 5 + 2, 3)
    assert warm.last_used.timestamp() == 7
    cold = told(catalogue, "c")
    assert (cold.blocks, cold.references) == (SHAPE.num_blocks(1, 30), 0)
    assert (cold.tokens, cold.metadata) == (30, {"id": "c"})


def test_a_document_tells_on_which_engines_it_is_warm(catalogue: Catalogue) -> None:
    assert told(catalogue, "a").engines == []
    assert told(catalogue, "a", {"one": (3, 2)}).engines == [0]
    warm = {"one": (3, 0), "two": (1, 0)}
    state = COLD | {"engines": [{"warm": {}}, {"warm": warm}]}
    base = catalogue.base("base")
    found = answers(catalogue).documents(base, ["a", "b", "c", "d"], state)
    assert [document.engines for document in found] == [[1], [1], [1], []], "d is faulty"
    assert [document.status for document in found] == ["cold", "cold", "cold", "failed"]


@pytest.mark.parametrize(
    ("warm", "stored", "queued", "shown"),
    [
        (False, "host", False, ("stored", "host")),
        (False, "disk", False, ("stored", "disk")),
        (True, "disk", True, ("warm", "gpu")),
        (True, None, False, ("warm", "gpu")),
        (False, "host", True, ("warming", "host")),
        (False, None, False, ("failed", None)),
    ],
)
def test_a_document_tells_where_it_is(
    catalogue: Catalogue,
    warm: bool,
    stored: str | None,
    queued: bool,
    shown: tuple[str, str | None],
) -> None:
    document = told(
        *(catalogue, "a", {"one": (3, 2)} if warm else {}, {"one": stored} if stored else {}),
        queued=["one"] if queued else [],
        errors={"one": "an earlier attempt"},
    )
    assert (document.status, document.tier) == shown


def test_a_faulty_document_has_nothing_of_an_entry_of_its_name(catalogue: Catalogue) -> None:
    faulty = told(catalogue, "d", {"two": (9, 1)}, {"two": "disk"}, queued=["two"])
    assert (faulty.status, faulty.error, faulty.tier) == ("failed", "torn", None)
    assert (faulty.blocks, faulty.references, faulty.hits, faulty.last_used) == (0, 0, 0, None)


def test_a_base_counts_shared_blocks_and_hits_once(catalogue: Catalogue) -> None:
    state = COLD | {"warm": {"one": (7, 5), "strange": (99, 9)}}
    base = answers(catalogue).base(catalogue.base("base"), state)
    assert (base.name, base.extra_key, base.preamble) == ("base", "key", "Read:")
    assert (base.blocks, base.hits, base.tokens) == (7, 5, 9 + 9 + 30 + 30)
    counts = {"warm": 2, "cold": 1, "warming": 0, "failed": 1}
    assert base.documents.model_dump() == counts | {"stored": 0}
    assert base.created_at.timestamp() == 5


def test_stats_are_of_all_bases(catalogue: Catalogue) -> None:
    state = {"total": 1, "frozen": 2, "limit": 3, "free": 4, "block_size": 5, "given_back": 6}
    stats = answers(catalogue).stats(COLD | state | {"warm": {"two": (8, 0)}})
    assert stats.blocks.model_dump() == {
        "total": 1, "frozen": 2, "limit": 3, "free": 4, "block_size": 5,
        "promised": SHAPE.num_blocks(1, 9) + SHAPE.num_blocks(1, 30),
    }  # fmt: skip
    assert (stats.bases, stats.hits, stats.given_back) == (1, 5, 6)
    assert stats.documents.warm == 1


def test_what_has_gone_meanwhile_is_left_out(catalogue: Catalogue) -> None:
    found = answers(catalogue)
    assert [d.id for d in found.documents(catalogue.base("base"), ["c", "x", "a"], COLD)] == [
        "c",
        "a",
    ]
    assert [b.name for b in found.bases(["x", "base"], COLD)] == ["base"]
    for missing in (lambda: catalogue.base("x"), lambda: told(catalogue, "x")):
        with pytest.raises(NotFoundError, match="'x'"):
            missing()


def test_an_entry_goes_with_its_last_document(catalogue: Catalogue) -> None:
    documents = catalogue.bases["base"].documents
    assert catalogue.disown("base", [documents.pop("a")]) == []
    assert catalogue.disown("base", [documents.pop("b")]) == ["one"]
    assert [*catalogue.entries] == ["two"]
    # In its own place: the entry stays.
    assert catalogue.disown("base", [documents["c"]]) == []


def test_room_is_counted_as_it_will_be(catalogue: Catalogue) -> None:
    base = catalogue.bases["base"]
    now = catalogue.num_blocks()
    own = SHAPE.num_blocks(1, 15)

    def counted(*about: Any) -> int:
        found = catalogue.num_blocks_with(base, [kept(record(*about))], 4)
        warm, gpu_only, meanwhile = found
        assert (gpu_only, meanwhile) == (0, 0), "documents are computed where they stay"
        return warm

    assert counted("e", "three", 15) == now + own
    assert counted("e", "one") == now, "shared"
    assert counted("c", "three", 15) == now + own - SHAPE.num_blocks(1, 30)
    # `b` still has the entry that `a` leaves.
    assert counted("a", "three", 15) == now + own
    assert catalogue.num_blocks() == now, "only counted"


def test_most_used_first_then_last_used(catalogue: Catalogue) -> None:
    base = catalogue.bases["base"]
    for name in ("three", "four"):
        catalogue.put(base, kept(record(name, name)))
    catalogue.count_uses({"three": (2, 9.0)})
    assert catalogue.most_used_first() == ["one", "three", "two", "four"]


def test_hits_add_up_and_the_last_use_is_the_last(catalogue: Catalogue) -> None:
    assert catalogue.count_uses({"one": (2, 9.0), "unknown": (1, 9.0)}) == ["one"]
    assert (catalogue.entries["one"].hits, catalogue.entries["one"].last_used) == (5, 9.0)


def test_routers_are_told_what_each_engine_holds_and_where(catalogue: Catalogue) -> None:
    """By digests, of the bases with a key; what is faulty, or nowhere as a whole, is not held."""
    engines = [COLD | {"warm": {"one": (3, 0)}, "stored": {"two": "disk"}}, COLD]
    found = answers(catalogue).holdings(COLD | {"engines": engines}, "key")
    a, b, c, d = document_digests([*"abcd"], "key")
    first, second = (engine.documents for engine in found.engines)
    assert {digest: (it.tokens, it.tier) for digest, it in first.items()} == {
        a: (9, "gpu"), b: (9, "gpu"), c: (30, "disk")
    }  # fmt: skip
    assert d not in first
    assert second == {}
    state = COLD | {"warm": {"two": (8, 0)}}
    assert [*answers(catalogue).holdings(state).engines[0].documents] == [c]
    assert answers(catalogue).holdings(state, "another key").engines[0].documents == {}


def test_nothing_that_routers_are_told_can_be_read(catalogue: Catalogue) -> None:
    state = COLD | {"warm": {"one": (3, 0)}}
    [engine] = answers(catalogue).holdings(state).model_dump()["engines"]
    for digest, held in engine["documents"].items():
        assert re.fullmatch("[0-9a-f]{16}", digest)
        assert held == {"tokens": 9, "tier": "gpu"}
