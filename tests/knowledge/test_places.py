# SPDX-License-Identifier: Apache-2.0
"""Documents are found where they stand, each behind the ones before it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_segreuse.features.knowledge.places import places

TOKENS = st.lists(st.sampled_from([1, 2, 0xD800, 200_000]), min_size=1, max_size=30)


def found(prompt: list[int], *documents: list[int]) -> list[int | None]:
    return places(prompt, [np.array(document, np.int32) for document in documents])


def test_documents_stand_behind_each_other() -> None:
    assert found([9, 1, 2, 1, 2, 3], [1, 2], [1, 2]) == [1, 3]
    assert found([9, 1, 2, 1, 2, 3], [1, 2, 3], [1, 2]) == [3, None]
    assert found([9, 1, 2], [2, 1], [1, 2]) == [None, 1]
    assert found([], [1]) == [None]


def test_documents_do_not_overlap() -> None:
    assert found([1, 1, 1], [1, 1], [1, 1]) == [0, None]


def test_bytes_of_two_tokens_are_no_token() -> None:
    assert found([0x0100, 0x0001], [0x010000]) == [None]


@given(TOKENS, TOKENS)
def test_the_first_place_is_found(prompt: list[int], document: list[int]) -> None:
    n = len(document)
    wanted = [i for i in range(len(prompt)) if prompt[i : i + n] == document]
    assert found(prompt, document) == [wanted[0] if wanted else None]
