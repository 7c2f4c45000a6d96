# SPDX-License-Identifier: Apache-2.0
"""Headers for routers: equal for what is shared, and computable by anybody."""

import hashlib
import random
import re
import subprocess
from pathlib import Path

import pytest

from segreuse_tools.routing import (
    DATA_PARALLEL_HEADER,
    HEADER,
    data_parallel_headers,
    digests_headers,
    routing_headers,
)


def key(documents: list[str], extra_keys: str | list[str] = "docs") -> str:
    return routing_headers(documents, extra_keys)[HEADER]


def test_the_order_of_documents_does_not_matter() -> None:
    assert key(["a", "b", "c"]) == key(["c", "a", "b"]) == key(["b", "b", "c", "a"])


def test_it_is_the_smallest_sha256_as_any_client_computes_it() -> None:
    digests = [hashlib.sha256(f"one\0two\0{name}".encode()).hexdigest() for name in "abc"]
    assert key(["a", "b", "c"], ["one", "two"]) == min(digests)[:16]
    assert key(["é"], []) == hashlib.sha256("é".encode()).hexdigest()[:16]


def test_the_pages_command_computes_it() -> None:
    page = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()
    [command] = re.findall(r"^for document in .*sha256sum.*$", page, re.MULTILINE)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == key(["faq.md", "travel.md"], ["handbook"])
    turned = command.replace("travel.md faq.md", "faq.md")
    alone = subprocess.run(["sh", "-c", turned], capture_output=True, text=True, check=True)
    assert alone.stdout == key(["faq.md"], "handbook")


def test_requests_meet_as_often_as_they_share_documents() -> None:
    draw = random.Random(0)
    met = 0
    for _ in range(2000):
        names = [f"{draw.random()}" for _ in range(6)]
        met += key(names[:4]) == key(names[2:])  # two of six are in both
    assert met / 2000 == pytest.approx(2 / 6, abs=0.04)


def test_namespaces_do_not_share() -> None:
    assert key(["a"], "one") != key(["a"], "two")
    assert key(["a"], "one") == key(["a"], ["one"])
    assert key(["a"], ["one", "two"]) != key(["a"], ["two", "one"])


def test_routers_that_hash_another_header_get_the_same_value() -> None:
    assert routing_headers(["a"], "docs", "X-Session-ID") == {"X-Session-ID": key(["a"])}


def test_a_single_document_need_be_in_no_list() -> None:
    """Its letters would be taken for documents, and nearly all requests sent to one engine."""
    assert routing_headers("faq.md", "docs") == routing_headers(["faq.md"], "docs")
    assert data_parallel_headers("faq.md", "docs", 7) == data_parallel_headers(
        ["faq.md"], "docs", 7
    )
    assert digests_headers("faq.md", "docs") == digests_headers(["faq.md"], "docs")


def test_without_documents_any_engine_will_do() -> None:
    assert routing_headers([], "docs") == {}
    assert data_parallel_headers([], "docs", 2) == {}
    for none in (0, -2):  # with -2, half of the requests would name engine -1
        with pytest.raises(ValueError, match=f"engines={none}"):
            data_parallel_headers(["a"], "docs", none)


def test_texts_and_keys_are_not_in_the_header() -> None:
    value = key(["a document with a secret"], "a secret key")
    assert len(value) == 16
    assert set(value) <= set("0123456789abcdef")


def test_engines_of_one_server_get_their_shares() -> None:
    ranks = [
        data_parallel_headers([f"document {n}"], "docs", 3)[DATA_PARALLEL_HEADER]
        for n in range(900)
    ]
    assert set(ranks) == {"0", "1", "2"}
    assert all(ranks.count(rank) == pytest.approx(300, abs=60) for rank in set(ranks))
