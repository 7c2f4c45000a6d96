# SPDX-License-Identifier: Apache-2.0
"""What the schemas take, at their limits, and what is just beyond."""

from typing import Any

import pytest
from pydantic import ValidationError

from vllm_segreuse.features.knowledge import schemas
from vllm_segreuse.features.knowledge.schemas import (
    AddDocuments,
    CreateBase,
    NewDocument,
    WarmDocuments,
)

LARGEST = "x" * (schemas.MAX_METADATA_BYTES - len('{"k": ""}'))


def document(**values: Any) -> dict[str, Any]:
    return {"id": "d", "text": "x"} | values


@pytest.mark.parametrize(
    "values",
    [
        {"id": "x"}, {"id": "x" * 512}, {"id": "ü" * 256}, {"id": "..."}, {"id": "a/.b/c..d"},
        {"metadata": {"k": LARGEST}}, {"text": None, "token_ids": [0, 2**31 - 1]},
    ],
)  # fmt: skip
def test_what_is_within_the_limits_is_taken(values: dict[str, Any]) -> None:
    taken = NewDocument(**document(**values))
    assert {name: getattr(taken, name) for name in values} == values


@pytest.mark.parametrize(
    "values",
    [
        {"id": ""}, {"id": "x" * 513}, {"id": "ü" * 257}, {"id": "."}, {"id": "a/./b"},
        {"id": ".."}, {"id": "a/.."}, {"id": "a\x00"}, {"id": "a\n"}, {"id": "\x1b[1m"},
        {"id": "\x85"}, {"id": "\ud800"}, {"text": ""}, {"text": "\ud800"}, {"text": 1},
        {"text": None}, {"token_ids": [1]}, {"text": None, "token_ids": []},
        {"text": None, "token_ids": [2**31]}, {"text": None, "token_ids": [-1]},
        {"text": None, "token_ids": [True]}, {"text": None, "token_ids": [1.0]},
        {"metadata": {"k": LARGEST + "x"}}, {"metadata": {"k": float("nan")}},
        {"metadata": {"k": float("inf")}}, {"metadata": {"k": "\ud800"}}, {"metadata": [1]},
        {"metadata": {"k": object()}}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_beyond_them_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NewDocument(**document(**values))


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "0" * 128])
def test_names_of_bases_are_plain(name: str) -> None:
    assert CreateBase(name=name, extra_key="k" * 256).name == name


@pytest.mark.parametrize(
    "values",
    [
        {"name": ""}, {"name": "a" * 129}, {"name": ".a"}, {"name": "a/b"}, {"name": "a\n"},
        {"name": "ü"}, {"extra_key": ""}, {"extra_key": "k" * 257}, {"extra_key": "\n"},
        {"preamble": ""}, {"preamble": "x" * 100_001},
    ],
)  # fmt: skip
def test_other_bases_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CreateBase(**({"name": "a"} | values))


def test_a_request_has_a_bounded_number_of_distinct_documents() -> None:
    documents = [NewDocument(id=str(n), text="x") for n in range(1001)]
    assert len(AddDocuments(documents=documents[:1000]).documents) == 1000
    assert len(WarmDocuments(ids=["x"] * 1000).ids or ()) == 1000
    for wrong in (documents, [], [documents[0], documents[0]]):
        with pytest.raises(ValidationError):
            AddDocuments(documents=wrong)
    with pytest.raises(ValidationError):
        WarmDocuments(ids=["x"] * 1001)


UNKNOWN = {f"more{n}": 1 for n in range(100)}


@pytest.mark.parametrize(
    ("model", "body", "where"),
    [
        (NewDocument, {"id": "d", "token_ids": [1, *[-1] * 100]}, ("token_ids", 1)),
        (NewDocument, document() | UNKNOWN, ("more0",)),
        (AddDocuments, {"documents": [document(), *[{}] * 100]}, ("documents", 1, "id")),
        (WarmDocuments, {"ids": ["d", *[""] * 100]}, ("ids", 1)),
        (CreateBase, {"name": "a"} | UNKNOWN, ("more0",)),
    ],
)
def test_32_of_many_mistakes_the_first_is_listed(model: Any, body: Any, where: Any) -> None:
    """A list of millions of them would take gigabytes."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert [error["loc"] for error in refused.value.errors()] == [where]
